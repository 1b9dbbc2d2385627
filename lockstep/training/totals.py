"""What the micro-batches of an update add up to, and its metrics.

# N trained tokens of a micro-batch  L routed layers  E experts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
import torch

from lockstep.models.moe import Routing
from lockstep.objectives.losses import TokenLoss
from lockstep.training.correcting import Kept, Reports
from lockstep.training.expert_load import ExpertLoad
from lockstep.training.packing import PackedBatch
from lockstep.training.replay import num_differing

Tensor = torch.Tensor
Metrics = dict[str, float]


@dataclass(slots=True, eq=False, kw_only=True)
class Done:
    """What a micro-batch's backward leaves behind."""

    batch: PackedBatch
    kept: Kept
    logprobs_N: Tensor
    weight_N: Tensor
    routing: Routing | None
    loss_N: Tensor = field(init=False)
    out: TokenLoss | None = None
    load: ExpertLoad | None = None

    def __post_init__(self) -> None:
        self.loss_N = torch.zeros_like(self.logprobs_N)


class Totals:
    """Sums and maxima over micro-batches, on the device until one copy to the host."""

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.reports = Reports()
        self.num_tokens = self.num_kept = 0
        self.num_fed = self.num_routed = self.num_choices = 0
        """Tokens of forwards that replay, those of them with routes, and times the layers."""
        self.num_differing = torch.zeros_like(self.loss)
        self.load: ExpertLoad | None = None
        self.balance_loss = torch.zeros_like(self.loss)

    def add(self, done: Done) -> None:
        kept = done.kept
        self.reports = self.reports.merge(kept.reports)
        self.loss = self.loss + (done.loss_N.double() * done.weight_N).sum()
        self._sum("logprob", done.logprobs_N)
        self.num_tokens += len(done.logprobs_N)
        self.num_kept += len(kept.tokens.logprobs)
        if done.load is not None:
            self.load = done.load if self.load is None else self.load + done.load
        if done.routing is not None and done.routing.balancing is not None:
            for loss in done.routing.balancing.losses.values():
                self.balance_loss = self.balance_loss + loss
        if done.routing is not None and done.batch.routes is not None:
            self.num_fed += len(done.batch.ids)
            self.num_routed += done.batch.num_routed
            self.num_choices += done.batch.num_routed * len(done.routing.differing)
            self.num_differing = self.num_differing + num_differing(done.routing)
        if done.out is None:
            return
        self._sum("entropy", kept.tokens.entropy.detach())
        for name, values in done.out.mean.items():
            self._sum(name, values)
        for name, values in done.out.maximum.items():
            top = values.amax().double()
            self.maxima[name] = torch.maximum(self.maxima.get(name, top), top)

    def on_host(self) -> Totals:
        """The same on the CPU: what one rank tells the others."""
        self.loss, self.num_differing = self.loss.cpu(), self.num_differing.cpu()
        self.load = None if self.load is None else ExpertLoad(self.load.counts_LE.cpu())
        self.balance_loss = self.balance_loss.cpu()
        self.sums = {name: total.cpu() for name, total in self.sums.items()}
        self.maxima = {name: top.cpu() for name, top in self.maxima.items()}
        self.reports = self.reports.on_host()
        return self

    def merge(self, other: Totals) -> Totals:
        """Of the micro-batches of both."""
        out = Totals(self.loss.device)
        out.loss = self.loss + other.loss
        out.reports = self.reports.merge(other.reports)
        out.num_tokens = self.num_tokens + other.num_tokens
        out.num_kept = self.num_kept + other.num_kept
        out.num_fed = self.num_fed + other.num_fed
        out.num_routed = self.num_routed + other.num_routed
        out.num_choices = self.num_choices + other.num_choices
        out.num_differing = self.num_differing + other.num_differing
        loads = [t.load for t in (self, other) if t.load is not None]
        out.load = reduce(add, loads) if loads else None
        out.balance_loss = self.balance_loss + other.balance_loss
        for name in dict.fromkeys([*self.sums, *other.sums]):
            both = [t.sums[name] for t in (self, other) if name in t.sums]
            out.sums[name] = both[0] if len(both) == 1 else both[0] + both[1]
        for name in dict.fromkeys([*self.maxima, *other.maxima]):
            both = [t.maxima[name] for t in (self, other) if name in t.maxima]
            out.maxima[name] = both[0] if len(both) == 1 else torch.maximum(*both)
        return out

    def _sum(self, name: str, values: Tensor) -> None:
        total = values.sum(dtype=torch.float64)
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def to_metrics(self) -> Metrics:
        scalars = [self.loss, self.num_differing, *self.sums.values(), *self.maxima.values()]
        values = torch.cat([torch.stack(scalars), *self.reports.vectors()]).tolist()
        loss, differing, rest = values[0], values[1], values[2:]
        sums = dict(zip(self.sums, rest, strict=False))
        maxima = dict(zip(self.maxima, rest[len(sums) :], strict=False))
        out = {"train/loss": loss, "tokens/trained": float(self.num_kept)}
        kept = max(self.num_kept, 1)
        out |= {f"train/{name}": x / kept for name, x in sums.items() if name != "logprob"}
        out |= {f"train/{name}": top for name, top in maxima.items()}
        if self.num_fed:
            out["routing/replayed_share"] = self.num_routed / self.num_fed
            out["routing/differing_share"] = differing / max(self.num_choices, 1)
        if self.num_tokens:
            out["perplexity"] = float(np.exp(-sums["logprob"] / self.num_tokens))
        return out | self.reports.metrics_of(rest[len(sums) + len(maxima) :])


def merge_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Of the updates of one batch: sums of counts, maxima of maxima, means of the rest."""
    if len(parts) == 1:
        return parts[0]
    out: Metrics = {}
    for name in dict.fromkeys(k for part in parts for k in part):
        values = [part[name] for part in parts if name in part]
        if name in ("tokens/trained", "train/skipped_updates", "train/overflows"):
            out[name] = float(np.sum(values))
        elif name.endswith("_max"):
            out[name] = float(np.max(values))
        else:
            out[name] = float(np.mean(values))
    return out
