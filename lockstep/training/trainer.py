"""The policy in training: `forward`, `forward_backward`, `optim_step`, `save`, `load`.

    trainer = Trainer(load_checkpoint(path), TrainerConfig(lr=1e-3), like=path)
    metrics = trainer.forward_backward(rows, make_loss(PPOClip()))   # measured before the update
    metrics |= trainer.optim_step()

# T packed tokens  N trained tokens  R rows
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from lockstep.correction.metrics import MismatchReport
from lockstep.errors import AlignmentError, CheckpointError, ConfigError, TokenError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_weights, read_tensors, save_checkpoint
from lockstep.objectives.config import Aggregate, ImportanceSampling, ObjectiveConfig, PPOClip
from lockstep.objectives.losses import LossFn, TokenBatch, TokenLoss, make_loss
from lockstep.ops import api as ops
from lockstep.store.files import write_json
from lockstep.training.config import TrainerConfig
from lockstep.training.optimizer import Optimizer, lr_share
from lockstep.training.packing import PackedBatch, pack, plan_microbatches, split_updates
from lockstep.types import Sample

Tensor = torch.Tensor
Metrics = dict[str, float]

POLICY, OPTIMIZER, STATE = "policy", "optimizer.safetensors", "trainer.json"

MAX_NAMED_ROWS = 3  # of the rows behind a skipped update; more would hide the first

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Call:
    """What a `forward_backward` was given: asked again for the row behind a bad gradient."""

    samples: Sequence[Sample]
    weigh: Callable[[PackedBatch], Tensor]
    loss_fn: LossFn


class Trainer:
    """One policy, its optimizer and their counters.

    The model's parameters are updated in place: an engine in this process can run the same ones.
    """

    def __init__(
        self,
        model: Decoder,
        config: TrainerConfig,
        *,
        like: str | Path,
        temperature: float = 1.0,
        total_updates: int | None = None,
    ) -> None:
        """like: the checkpoint directory whose config and tokenizer files `save` copies.

        temperature: of the distribution under which the rollout's log-probs are recorded.
        total_updates: of the run; a schedule that falls needs it. Raises ConfigError without.
        """
        if not 0 < temperature < float("inf"):
            raise ConfigError(
                f"temperature={temperature} of the trainer must be a finite number above 0. Greedy "
                "sampling records log-probs at temperature 1, and gives no groups to learn from."
            )
        self.model = model
        self.config = config
        self.like = Path(like)
        self.temperature = temperature
        self.total_updates = total_updates
        self.optimizer = Optimizer(model.named_parameters(), config)
        self.num_updates = 0
        """Updates asked for, the skipped ones included: the place in the schedule."""
        self.num_skipped = 0
        self.version = 0
        """Of the policy: one more with each update that was made."""
        self.last_skip = ""
        """Why the last update was skipped, and the row behind it; empty if it was made."""
        self._bad_loss = ""
        self._calls: list[_Call] = []
        lr_share(config.warmup_updates, config, total_updates=total_updates)

    # -- the verbs ------------------------------------------------------------------------------

    def forward(
        self, samples: Sequence[Sample], *, column: str | None = "old_logprobs"
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probs of the trained tokens under the policy as it stands; no gradient.

        [T] float32 per sample, NaN where loss_mask is False. `column`: also kept in the samples
        under this name; None keeps nothing. The micro-batches are those of `forward_backward` on
        the same samples, so before an update both give the same bits.
        """
        with torch.no_grad():
            parts = [(batch, self._log_probs(batch)[0]) for batch in self.pack(samples)]
        out = _by_row(samples, parts)
        if column is not None:
            _keep(samples, out, column)
        return out

    def measure(self, samples: Sequence[Sample], *, column: str | None = None) -> MismatchReport:
        """The mismatch of `rollout_logprobs` and the policy as it stands. No gradient.

        `column`: the log-probs that were compared are kept in the samples under this name.
        """
        with torch.no_grad():
            parts = [(batch, self._log_probs(batch)[0]) for batch in self.pack(samples)]
        report = MismatchReport.empty(self.device)
        for batch, logprobs in parts:
            report = report.merge(_mismatch(batch, logprobs))
        if column is not None:
            _keep(samples, _by_row(samples, parts), column)
        return report

    def measure_after(self, samples: Sequence[Sample]) -> Metrics:
        """`mismatch_after/...`: how far the update has moved the policy from the rollout's."""
        return self.measure(samples).to_metrics("mismatch_after")

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        *,
        aggregate: Aggregate = "token_mean",
        fixed_length: int = 0,
        denominator: float | None = None,
        column: str | None = None,
    ) -> Metrics:
        """Adds the gradient of the loss over `samples` to what the next `optim_step` will use.

        The token losses are weighed over all samples of the call, whatever its micro-batches:
        see `ObjectiveConfig.aggregate`. `denominator` replaces the number of trained tokens
        (token_mean) or of rows (the others), for a batch that comes in several calls or a sum of
        loss weights. The mismatch is measured in the same forward where the samples have
        `rollout_logprobs`. `column`: the log-probs are kept in the samples under this name. A loss
        that is not finite is remembered; `optim_step` then skips.
        """
        batches = self.pack(samples)
        weigh = _token_weights(samples, aggregate, fixed_length, denominator)
        self._calls.append(_Call(samples=samples, weigh=weigh, loss_fn=loss_fn))
        totals = _Totals(self.device)
        losses: list[tuple[PackedBatch, Tensor]] = []
        logprobs: list[tuple[PackedBatch, Tensor]] = []
        for batch in batches:
            tokens, out = self._backward(batch, loss_fn, weigh(batch))
            losses.append((batch, out.loss.detach()))
            logprobs.append((batch, tokens.logprobs.detach()))
            totals.add(batch, tokens, out, weigh(batch))
        if column is not None:
            _keep(samples, _by_row(samples, logprobs), column)
        metrics = totals.to_metrics()
        if not np.isfinite(metrics["train/loss"]):
            self._bad_loss = self._bad_loss or _name_bad_losses(samples, losses)
        return metrics

    def optim_step(self) -> Metrics:
        """One update by the gradients collected so far, or none if any of it is not finite.

        A skipped update leaves weights and optimizer state as they are, counts in
        `train/skipped_updates`, and says why, and which row is behind it, in `last_skip` and in the
        log. The schedule goes on either way.
        """
        lr = self.config.lr * lr_share(
            self.num_updates, self.config, total_updates=self.total_updates
        )
        reason, norm = self._bad_loss, float("nan")
        if not reason:
            norm = float(self.optimizer.gradient_norm())
            if not self.optimizer.gradients():
                reason = "no token was trained since the last update"
            elif not np.isfinite(norm):
                reason = self._name_bad_gradients()
        self.last_skip = reason
        if reason:
            self.num_skipped += 1
            _log.warning("update %d skipped: %s", self.num_updates, reason)
            self.optimizer.zero_gradients()
        else:
            clip = self.config.grad_clip
            self.optimizer.step(lr=lr, gradient_scale=clip / norm if 0 < clip < norm else 1.0)
            self.version += 1
        self.num_updates += 1
        self._bad_loss = ""
        self._calls.clear()
        return {
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped_updates": float(bool(reason)),
        }

    def update(self, samples: Sequence[Sample], objective: ObjectiveConfig) -> Metrics:
        """All updates of one batch, `updates_per_batch` of them, by `objective`.

        Fills `old_logprobs` first where the objective reads them. The mismatch reported is that
        before the first update: measured in the training forward if there is one update, else in a
        forward of its own. Other metrics are means over the updates (maxima of `*_max`, sums of
        counts).
        """
        loss_fn, num_updates = make_loss(objective), self.config.updates_per_batch
        if isinstance(objective, PPOClip | ImportanceSampling):
            self._fill_old_logprobs(samples, objective.old_policy)
        before: Metrics = {}
        has_rollout = all("rollout_logprobs" in s.columns for s in samples)
        is_measured_apart = num_updates > 1 and has_rollout
        if is_measured_apart:
            before = self.measure(samples, column="logprobs").to_metrics()
        parts: list[Metrics] = []
        for part in split_updates(samples, num_updates) or [[]]:
            metrics = self.forward_backward(
                part, loss_fn,
                aggregate=objective.aggregate, fixed_length=objective.fixed_length,
                column=None if is_measured_apart else "logprobs",
            )  # fmt: skip
            parts.append(metrics | self.optim_step())
        return _merge_metrics(parts) | before

    def save(self, directory: str | Path) -> None:
        """Writes policy (Hugging Face form), optimizer and counters into `directory`.

        `CheckpointStore` makes this atomic and checks it when it is read.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_checkpoint(self.model, directory / POLICY, like=self.like)
        tensors = {n: t.contiguous().cpu() for n, t in self.optimizer.state_tensors().items()}
        save_file(tensors, str(directory / OPTIMIZER))
        counters = {
            "num_updates": self.num_updates, "num_skipped": self.num_skipped,
            "version": self.version,
        }  # fmt: skip
        write_json(directory / STATE, counters)

    def load(self, directory: str | Path, *, weights_only: bool = False) -> None:
        """Continues what `save` wrote: the next update gives the same bits as without a stop.

        weights_only: the policy alone, with a fresh optimizer and counters at 0: a new run from an
        old one. Raises CheckpointError listing everything that does not fit this model; another
        architecture or shape is refused before anything is changed.
        """
        directory = Path(directory)
        self._check_same_shapes(directory / POLICY)
        if not weights_only:
            counters = _read_counters(directory / STATE)
            tensors = _read_optimizer(directory / OPTIMIZER)
            self.optimizer.load_state_tensors(tensors, where=str(directory / OPTIMIZER))
        load_weights(self.model, read_tensors(directory / POLICY), where=str(directory / POLICY))
        if weights_only:
            self.optimizer = Optimizer(self.model.named_parameters(), self.config)
            counters = {"num_updates": 0, "num_skipped": 0, "version": 0}
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.version = counters["version"]
        self.last_skip = self._bad_loss = ""
        self._calls.clear()

    # -- mechanism ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.model.embedding.device

    def pack(self, samples: Sequence[Sample]) -> list[PackedBatch]:
        """The micro-batches of `samples`: always the same for the same samples.

        Raises TokenError for a row that the model cannot read, besides what `packing` raises.
        """
        vocab_size, max_positions = self.model.config.vocab_size, self.model.config.max_positions
        for sample in samples:
            if len(sample) > max_positions:
                raise TokenError(
                    f"sample {sample.id} has {len(sample)} tokens, the model's positions end at "
                    f"{max_positions}. Lower the tokens of an episode."
                )
            if len(sample) and int(sample.token_ids.max()) >= vocab_size:
                at = int(np.argmax(sample.token_ids >= vocab_size))
                raise TokenError(
                    f"sample {sample.id}: token {at} has the id {int(sample.token_ids[at])}, the "
                    f"model's vocabulary ends at {vocab_size - 1}. Another model's tokenizer?"
                )
            support = sample.ragged.get("support")
            if support is not None and (support.values >= vocab_size).any():
                raise TokenError(
                    f"sample {sample.id}: a support has the id {int(support.values.max())}, the "
                    f"model's vocabulary ends at {vocab_size - 1}. Another model's sampler?"
                )
        plan = plan_microbatches(samples, self.config.max_tokens_per_microbatch)
        return pack(samples, plan, device=self.device)

    def _log_probs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), each [N] float32, of the trained tokens."""
        hidden_TD = self.model(batch.ids, batch.positions, batch.context)
        return ops.log_probs(
            hidden_TD.index_select(0, batch.predictors),
            self.model.head,
            batch.targets,
            temperature=self.temperature,
            support=batch.support,
        )

    def _backward(
        self, batch: PackedBatch, loss_fn: LossFn, weight_N: Tensor
    ) -> tuple[TokenBatch, TokenLoss]:
        logprobs, entropy = self._log_probs(batch)
        tokens = TokenBatch(
            logprobs=logprobs, entropy=entropy, columns=batch.columns, row=batch.row,
            num_rows=batch.num_rows,
        )  # fmt: skip
        out = loss_fn(tokens)
        if out.loss.shape != logprobs.shape:
            raise AlignmentError(
                f"the loss gave {list(out.loss.shape)} values for {list(logprobs.shape)} trained "
                "tokens: a loss gives one per token, and the trainer sums them."
            )
        (out.loss * weight_N).sum().backward()
        self.optimizer.collect_gradients()
        return tokens, out

    def _fill_old_logprobs(self, samples: Sequence[Sample], old_policy: str) -> None:
        if old_policy == "recomputed":
            self.forward(samples, column="old_logprobs")
            return
        for sample in samples:
            if "rollout_logprobs" not in sample.columns:
                raise AlignmentError(
                    f"sample {sample.id} has no rollout_logprobs; objective.old_policy=rollout "
                    "reads them. Use objective.old_policy=recomputed for rows without."
                )
            sample.set("old_logprobs", sample.columns["rollout_logprobs"])

    def _name_bad_gradients(self) -> str:
        """Looks for the rows whose own gradient is not finite, halving the batch; costs up to two
        more passes over it, once in a bad while."""
        found = "the gradient is not finite"
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
            return f"{found}, because the weights are not: an earlier state must be loaded"
        bad: list[str] = []
        for call in self._calls:
            rows = [i for i, s in enumerate(call.samples) if s.num_trained]
            while rows and len(bad) < MAX_NAMED_ROWS:
                row = self._first_bad_row(call, rows)
                if row is None:
                    break
                bad.append(f"{call.samples[row].id} (row {row})")
                rows = [i for i in rows if i > row]
        if not bad:
            return f"{found}, but each row's own is: their sum is too large for float32"
        return f"{found}; it comes from {', '.join(bad)}"

    def _first_bad_row(self, call: _Call, rows: list[int]) -> int | None:
        if not self._has_bad_gradient(call, rows):
            return None
        while len(rows) > 1:
            half = rows[: len(rows) // 2]
            rows = half if self._has_bad_gradient(call, half) else rows[len(half) :]
        return rows[0] if self._has_bad_gradient(call, rows) else None

    def _has_bad_gradient(self, call: _Call, rows: Sequence[int]) -> bool:
        chosen = [call.samples[i] for i in rows]
        self.optimizer.zero_gradients()
        for batch in self.pack(chosen):
            self._backward(batch, call.loss_fn, call.weigh(batch))
        return not bool(torch.isfinite(self.optimizer.gradient_norm()))

    def _check_same_shapes(self, policy: Path) -> None:
        saved, mine = ModelConfig.from_directory(policy), self.model.config
        differing = [
            f"{f.name} is {getattr(saved, f.name)} there and {getattr(mine, f.name)} here"
            for f in fields(ModelConfig)
            if getattr(saved, f.name) != getattr(mine, f.name)
        ]
        if differing:
            raise CheckpointError(f"{policy} holds another model: {'; '.join(differing)}.")


def _by_row(
    samples: Sequence[Sample], parts: Sequence[tuple[PackedBatch, Tensor]]
) -> list[npt.NDArray[np.float32]]:
    """[N] values of packed batches as [T] float32 per sample, NaN where nothing is trained."""
    out = [np.full(len(s), np.nan, np.float32) for s in samples]
    for batch, values in parts:
        for row, places, of_row in batch.unpack(values):
            out[row][places] = of_row
    return out


def _keep(
    samples: Sequence[Sample], values: Sequence[npt.NDArray[np.float32]], column: str
) -> None:
    for sample, of_row in zip(samples, values, strict=True):
        sample.set(column, of_row)


class _Totals:
    """Sums and maxima over micro-batches, on the device until one copy to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.means: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.mismatch: MismatchReport | None = None
        self.num_tokens = 0

    def add(self, batch: PackedBatch, tokens: TokenBatch, out: TokenLoss, weight_N: Tensor) -> None:
        logprobs, loss = tokens.logprobs.detach(), out.loss.detach()
        self.loss = self.loss + (loss.double() * weight_N).sum()
        means = {"entropy": tokens.entropy.detach(), "logprob": logprobs, **out.mean}
        for name, values in means.items():
            total = values.sum(dtype=torch.float64)
            self.means[name] = self.means[name] + total if name in self.means else total
        for name, values in out.maximum.items():
            top = values.amax().double()
            self.maxima[name] = torch.maximum(self.maxima.get(name, top), top)
        if "rollout_logprobs" in batch.columns:
            report = _mismatch(batch, logprobs)
            self.mismatch = report if self.mismatch is None else self.mismatch.merge(report)
        self.num_tokens += len(logprobs)

    def to_metrics(self) -> Metrics:
        parts = [torch.stack([self.loss, *self.means.values(), *self.maxima.values()])]
        if self.mismatch is not None:
            parts += [self.mismatch.sums, self.mismatch.maxima]
        values = torch.cat(parts).tolist()
        loss, rest = values[0], values[1:]
        means = dict(zip(self.means, rest, strict=False))
        maxima = dict(zip(self.maxima, rest[len(means) :], strict=False))
        n = max(self.num_tokens, 1)
        out = {"train/loss": loss, "tokens/trained": float(self.num_tokens)}
        out |= {f"train/{name}": total / n for name, total in means.items() if name != "logprob"}
        out |= {f"train/{name}": top for name, top in maxima.items()}
        if "logprob" in means:
            out["perplexity"] = float(np.exp(-means["logprob"] / n))
        if self.mismatch is not None:
            out |= MismatchReport.metrics_of(rest[len(means) + len(maxima) :])
        return out


def _mismatch(batch: PackedBatch, logprobs: Tensor) -> MismatchReport:
    if "rollout_logprobs" not in batch.columns:
        raise AlignmentError(
            "the samples have no rollout_logprobs: there is nothing to compare the trainer with."
        )
    return MismatchReport.of(
        logprobs, batch.columns["rollout_logprobs"], row=batch.row, num_rows=batch.num_rows
    )


def _token_weights(
    samples: Sequence[Sample], aggregate: Aggregate, fixed_length: int, denominator: float | None
) -> Callable[[PackedBatch], Tensor]:
    """batch -> [N] or []: what each token's loss counts in the loss of the whole call."""
    num_tokens = sum(s.num_trained for s in samples)
    num_rows = sum(s.num_trained > 0 for s in samples)
    if aggregate == "token_mean":
        scale = 1.0 / max(denominator if denominator is not None else num_tokens, 1e-30)
        return lambda batch: torch.tensor(scale, dtype=torch.float32, device=batch.ids.device)
    scale = 1.0 / max(denominator if denominator is not None else num_rows, 1e-30)
    if aggregate == "fixed_length":
        return lambda batch: torch.tensor(
            scale / fixed_length, dtype=torch.float32, device=batch.ids.device
        )
    return lambda batch: (scale / batch.row_tokens.float())[batch.row]


def _name_bad_losses(
    samples: Sequence[Sample], losses: Sequence[tuple[PackedBatch, Tensor]]
) -> str:
    bad: list[str] = []
    num_bad = 0
    for batch, loss in losses:
        for row, places, values in batch.unpack(loss):
            wrong = np.flatnonzero(~np.isfinite(values))
            if wrong.size:
                num_bad += 1
                at = int(places[wrong[0]])
                bad.append(f"{samples[row].id} (row {row}, token {at}: {values[wrong[0]]})")
    if not bad:
        return "the loss is not finite, but each token's is: their sum is too large"
    more = f" and {num_bad - MAX_NAMED_ROWS} more" if num_bad > MAX_NAMED_ROWS else ""
    return f"the loss is not finite; it comes from {', '.join(bad[:MAX_NAMED_ROWS])}{more}"


def _merge_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Of the updates of one batch: sums of counts, maxima of maxima, means of the rest."""
    if len(parts) == 1:
        return parts[0]
    out: Metrics = {}
    for name in dict.fromkeys(k for part in parts for k in part):
        values = [part[name] for part in parts if name in part]
        if name in ("tokens/trained", "train/skipped_updates"):
            out[name] = float(np.sum(values))
        elif name.endswith("_max"):
            out[name] = float(np.max(values))
        else:
            out[name] = float(np.mean(values))
    return out


def _read_counters(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). A torn copy?") from error


def _read_optimizer(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}). A torn copy?") from error
