"""The sums of an update's micro-batches, and its metrics.

# N trained tokens of a micro-batch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from lockstep.correction.metrics import MismatchReport, merge_reports
from lockstep.models.moe import Routing
from lockstep.objectives.losses import TokenBatch, TokenLoss
from lockstep.training.expert_load import expert_load, load_metrics
from lockstep.training.packing import PackedBatch
from lockstep.training.replay import num_differing

Tensor = torch.Tensor
Metrics = dict[str, float]


class Totals:
    """Sums and maxima over micro-batches, on the device until one copy to the host."""

    def __init__(self, device: torch.device, *, num_experts: int) -> None:
        self.num_experts = num_experts
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.sums: dict[str, Tensor] = {"loss": zero, "differing": zero}
        """differing: replayed choices, over tokens and layers, that the router would have made
        otherwise. load: [L, E], see `expert_load`. aux: of micro-batches, by their share in the
        trained tokens. train/...: the figures of the loss."""
        self.maxima: dict[str, Tensor] = {}
        self.counts: Counter[str] = Counter()
        """Trained tokens, tokens kept by the correction, computed tokens. In forwards with replay:
        computed tokens, computed tokens with routes, and the latter times the layers."""
        self.reports: dict[str, MismatchReport] = {}
        """Filled after the last micro-batch, so that none waits for its log-probs."""

    def add(
        self,
        batch: PackedBatch,
        tokens: TokenBatch,
        out: TokenLoss | None,
        *,
        loss: Tensor,
        logprobs_N: Tensor,
        routing: Routing | None,
        aux: Tensor | None,
    ) -> None:
        """out: None where the correction kept no token. loss: [] float64, as it was summed."""
        self._add("loss", loss)
        if aux is not None:
            self._add("aux", aux.detach().double())
        self._add("logprob", logprobs_N.sum(dtype=torch.float64))
        self.counts.update(
            tokens=len(logprobs_N), kept=len(tokens.logprobs), computed=len(batch.ids)
        )
        if routing is not None and routing.chosen:
            self._add("load", expert_load(batch, routing.stacked(), self.num_experts))
        if routing is not None and batch.routes is not None:
            self.counts.update(
                replaying=len(batch.ids),
                routed=batch.num_routed,
                choices=batch.num_routed * len(routing.differing),
            )
            self._add("differing", num_differing(routing))
        if out is None:
            return
        for name, values in {"entropy": tokens.entropy.detach(), **out.mean}.items():
            self._add(f"train/{name}", values.sum(dtype=torch.float64))
        for name, values in out.maximum.items():
            self._raise(name, values.amax().double())

    def on_host(self) -> Totals:
        """The same on the CPU, to be sent to other ranks."""
        self.sums = {name: total.cpu() for name, total in self.sums.items()}
        self.maxima = {name: top.cpu() for name, top in self.maxima.items()}
        return self

    def merge(self, other: Totals) -> Totals:
        """Adds another rank's totals to these."""
        self.reports = merge_reports(self.reports, other.reports)
        self.counts.update(other.counts)
        for name, total in other.sums.items():
            self._add(name, total)
        for name, top in other.maxima.items():
            self._raise(name, top)
        return self

    def _add(self, name: str, total: Tensor) -> None:
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def _raise(self, name: str, top: Tensor) -> None:
        self.maxima[name] = torch.maximum(self.maxima.get(name, top), top)

    def to_metrics(self) -> Metrics:
        named = {name: total for name, total in self.sums.items() if name != "load"}
        found = torch.stack([*named.values(), *self.maxima.values()]).tolist()
        sums = dict(zip(named, found, strict=False))
        maxima = dict(zip(self.maxima, found[len(sums) :], strict=True))
        counts, kept = self.counts, max(self.counts["kept"], 1)
        out = {"train/loss": sums["loss"], "tokens/trained": float(counts["kept"])}
        out |= {name: x / kept for name, x in sums.items() if name.startswith("train/")}
        out |= {f"train/{name}": top for name, top in maxima.items()}
        out["tokens/computed"] = float(counts["computed"])
        if "aux" in sums:
            out["train/router_aux_loss"] = sums["aux"]
        if counts["replaying"]:
            out["routing/replayed_share"] = counts["routed"] / counts["replaying"]
            out["routing/differing_share"] = sums["differing"] / max(counts["choices"], 1)
        if counts["tokens"]:
            out["perplexity"] = float(np.exp(-sums["logprob"] / counts["tokens"]))
        for prefix, report in self.reports.items():
            out |= report.to_metrics(prefix, by_part=prefix == "mismatch")
        load_LE = self.sums.get("load")
        return out | ({} if load_LE is None else load_metrics(load_LE.cpu().numpy()))


def merge_metrics(parts: Sequence[Metrics]) -> Metrics:
    """The metrics of all updates of one batch: sums of counts, maxima of maxima, means of the
    rest; and how far the policy had moved at each."""
    if len(parts) == 1:
        return parts[0]
    out: Metrics = {}
    for name in dict.fromkeys(k for part in parts for k in part):
        values = [part[name] for part in parts if name in part]
        if name.endswith(("/trained", "/computed", "/skipped_updates", "/overflows")):
            out[name] = float(np.sum(values))
        elif name.endswith("_max"):
            out[name] = float(np.max(values))
        else:
            out[name] = float(np.mean(values))
        if name == "train/approx_kl":
            out |= {f"{name}/{number}": value for number, value in enumerate(values)}
    return out
