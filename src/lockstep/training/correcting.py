"""Between packed rows and `lockstep.correction`: which tokens are trained, and with what weight.

# N trained tokens of a micro-batch  K kept tokens among them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
import torch

from lockstep.correction import kl
from lockstep.correction.config import Correction
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import MismatchReport
from lockstep.correction.weighing import Corrected, TokenFacts, measure, weigh
from lockstep.errors import AlignmentError, ContractError
from lockstep.objectives.aggregation import token_weights
from lockstep.objectives.config import Aggregate
from lockstep.objectives.losses import TokenBatch
from lockstep.ops.transfer import to_device
from lockstep.training.packing import PackedBatch
from lockstep.types import Sample

Tensor = torch.Tensor
Reports = dict[str, MismatchReport]
"""Metric prefix -> report: `mismatch` of the recorded log-probs, and `mismatch_averaged` of the
averaged behaviour where that is used."""

WEIGHTS = "importance_weights"


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows with the column `old_logprobs`: the policy before the update."""

    rows: Sequence[Sample]
    is_by_forward: bool = True
    """False if all of them are the sampler's log-probs."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """Scored rows with the column `importance_weights`, judged over their whole batch."""

    rows: Sequence[Sample]
    correction: Correction
    metrics: Mapping[str, float]
    """Figures of the mismatch."""


@dataclass(frozen=True, slots=True)
class TokenJudge:
    """Says which tokens of a micro-batch are trained, and with what weight."""

    correction: Correction | None
    """None keeps every token."""
    _: KW_ONLY
    version: int
    """Version of the policy, for the age of tokens."""
    is_weighed: bool = False
    """True if the rows were weighed over their whole batch."""

    @property
    def counts_kept_only(self) -> bool:
        """True if a mean is over the kept tokens instead of all."""
        is_kept = self.correction is not None and self.correction.denominator == "kept"
        return self.is_weighed and is_kept

    def keep_tokens(
        self,
        batch: PackedBatch,
        logprobs: Tensor,
        entropy: Tensor,
        *,
        extra: Mapping[str, Tensor] = {},
    ) -> tuple[TokenBatch, Corrected | None]:
        """The trained tokens of a micro-batch, as a loss sees them. Also the correction's report,
        if it weighed or judged them by this forward; only then this waits for the GPU.

        logprobs, entropy: [N] float32 of this forward, with gradient. extra: more fields of the
        batch, [N, ...]. A correction that changes no token keeps all tokens with a recorded
        log-prob.

        A correction that rejects token 1 of three gives a batch of two, `kept=[0, 2]`; its `spread`
        puts their losses back at places 0 and 2, and 0.0 at place 1.
        """
        columns, on_host, correction = dict(batch.columns), batch.host_columns, self.correction
        weights = keep = weighed = None
        if correction is not None:
            name = correction.behaviour
            if self.is_weighed:
                weights, keep = columns[WEIGHTS], on_host[WEIGHTS] > 0
            elif name in columns and correction.changes_tokens:
                weighed = _weigh(batch, logprobs.detach(), on_host[name], correction, self.version)
                keep = weighed.keep
                if correction.level != "none":
                    weights = to_device(weighed.weights.numpy(), logprobs.device)
            elif name in columns:
                keep = on_host[name].isfinite()
            if correction.anchor == "on_policy":
                columns["old_logprobs"] = logprobs.detach()
            elif correction.anchor == "rollout" and name in columns:
                columns["old_logprobs"] = columns[name]
        sizes, kept = batch.sizes, None
        if keep is not None and not keep.all():
            places = np.flatnonzero(keep.numpy())
            row = np.repeat(np.arange(batch.num_rows), sizes)[places]
            sizes = np.bincount(row, minlength=batch.num_rows)
            kept = to_device(places, logprobs.device)

        def at_kept(values: Tensor) -> Tensor:
            return values if kept is None else values.index_select(0, kept)

        tokens = TokenBatch(
            logprobs=at_kept(logprobs),
            entropy=at_kept(entropy),
            columns={name: at_kept(column) for name, column in columns.items()},
            row=at_kept(batch.row),
            num_rows=batch.num_rows,
            weights=None if weights is None else at_kept(weights),
            kept=kept,
            num_all=len(logprobs),
            sizes=sizes,
            **{name: at_kept(values) for name, values in extra.items()},
        )
        return tokens, weighed

    def with_penalty(self, loss: Tensor, tokens: TokenBatch) -> Tensor:
        """[K]: the loss with the KL penalty of a correction that puts it there."""
        correction = self.correction
        if correction is None or not correction.changes_loss:
            return loss
        return loss + kl.pull(
            tokens.logprobs,
            tokens.column(correction.behaviour),
            coef=correction.kl_penalty_coef,
            clip=correction.kl_penalty_clip,
        )

    def reports(
        self, batch: PackedBatch, logprobs: Tensor, weighed: Corrected | None, *, is_measured: bool
    ) -> Reports:
        """The mismatch of a micro-batch that was trained. weighed: what `keep_tokens` gave with it.
        is_measured: measures also rows that were weighed over their whole batch."""
        columns, correction, version = batch.host_columns, self.correction, self.version
        if correction is None or self.is_weighed:
            has_some = "rollout_logprobs" in columns if correction is None else is_measured
            return {"mismatch": measure_batch(batch, logprobs, version)} if has_some else {}
        behaviour = columns.get(correction.behaviour)
        if behaviour is None:
            return {}
        found = (weighed or _weigh(batch, logprobs, behaviour, correction, version)).report
        if not correction.rescorings:
            return {"mismatch": found}
        return {"mismatch": measure_batch(batch, logprobs, version), "mismatch_averaged": found}


def measure_batch(batch: PackedBatch, logprobs: Tensor, version: int) -> MismatchReport:
    """The mismatch between `rollout_logprobs` and [N] log-probs of the trainer."""
    if "rollout_logprobs" not in batch.host_columns:
        raise AlignmentError(
            "the samples have no rollout_logprobs: there is nothing to compare the trainer with."
        )
    rollout = batch.host_columns["rollout_logprobs"]
    return _weigh(batch, logprobs, rollout, Correction(), version).report


def _weigh(
    batch: PackedBatch, logprobs: Tensor, behaviour: Tensor, correction: Correction, version: int
) -> Corrected:
    """behaviour: [N] on the host, where all of this is computed."""
    positions = torch.from_numpy(np.concatenate(batch.places))
    facts = _facts(batch.host_columns.get, positions, version)
    layout = Layout.packed(batch.sizes)
    return weigh(logprobs.cpu(), behaviour, correction, layout=layout, facts=facts)


def weigh_scored(scored: Scored, correction: Correction, *, version: int) -> Weighed:
    """Weighs a whole batch before the first update.

    Fills `importance_weights`: 0.0 for a rejected token, 1.0 everywhere if the sampler's log-probs
    are unknown. The rows are the scored ones, with the KL penalty added to their advantages. Raises
    AlignmentError for a penalty without advantages.
    """
    samples = scored.rows
    for sample in samples:
        if correction.changes_advantages and "advantages" not in sample.columns:
            raise AlignmentError(
                f"sample {sample.id} has no advantages, which correction.kl_penalty_coef="
                f"{correction.kl_penalty_coef:g} is added to."
            )
    layout = Layout.packed([s.num_trained for s in samples])

    def at_trained(name: str) -> Tensor | None:
        if not samples or name not in samples[0].columns:
            return None
        return torch.from_numpy(np.concatenate([s.columns[name][s.loss_mask] for s in samples]))

    old, behaviour = at_trained("old_logprobs"), at_trained(correction.behaviour)
    if old is None or behaviour is None:
        for sample in samples:
            sample.set(WEIGHTS, sample.loss_mask.astype(np.float32))
        return Weighed(samples, correction, {})
    positions = np.concatenate([np.flatnonzero(s.loss_mask) for s in samples])
    facts = _facts(at_trained, torch.from_numpy(positions), version)
    weighed = weigh(old, behaviour, correction, layout=layout, facts=facts)
    corrected = weighed.finish(weighed.report)  # not `correct`: each rank has the whole batch here
    metrics = corrected.report.to_metrics()
    if correction.rescorings:
        metrics = corrected.report.to_metrics("mismatch_averaged", by_part=False)
        if (rollout := at_trained("rollout_logprobs")) is not None:
            metrics = measure(old, rollout, layout=layout, facts=facts).to_metrics() | metrics
    ends = layout.offsets[1:-1]
    weights = np.split(corrected.weights.numpy(), ends)
    penalties = [None] * len(samples)
    if corrected.penalty is not None:
        penalties = np.split(corrected.penalty.numpy(), ends)
    rows: list[Sample] = []
    for sample, of_row, penalty in zip(samples, weights, penalties, strict=True):
        column = np.zeros(len(sample), np.float32)
        column[sample.loss_mask] = of_row
        sample.set(WEIGHTS, column)
        row = sample
        if penalty is not None:
            advantages = sample.columns["advantages"].copy()
            advantages[sample.loss_mask] += penalty
            row = replace(sample, columns={**sample.columns, "advantages": advantages})
        rows.append(row)
    return Weighed(rows, correction, metrics)


def loss_weights(
    samples: Sequence[Sample],
    aggregate: Aggregate,
    *,
    denominator: float | None = None,
    is_kept_only: bool = False,
) -> Callable[[PackedBatch], Tensor]:
    """A function from a micro-batch to [N] float32: each token's share in the loss of all
    `samples`.

    denominator: replaces the number of tokens (token_mean) or rows (the others). is_kept_only:
    count only tokens that `importance_weights` keeps, and rows that have one.
    """
    sizes = [
        int((s.columns[WEIGHTS] > 0).sum()) if is_kept_only else s.num_trained for s in samples
    ]
    if denominator is None:
        is_token = aggregate == "token_mean"
        denominator = max(sum(sizes) if is_token else sum(size > 0 for size in sizes), 1)
    # A sum of loss weights may be 0, where nothing has a loss: then nothing is divided.
    total = max(denominator, 1e-30)

    def weights_of(batch: PackedBatch) -> Tensor:
        mask = batch.host_columns[WEIGHTS] > 0 if is_kept_only else None
        layout = Layout.packed(batch.sizes, mask)
        weights = token_weights(layout, aggregate, denominator=total)
        return to_device(weights.numpy(), batch.ids.device)

    return weights_of


def _facts(column: Callable[[str], Tensor | None], positions: Tensor, version: int) -> TokenFacts:
    """The columns of the N trained tokens that the mismatch is grouped by."""
    versions = column("policy_version")
    return TokenFacts(
        advantages=column("advantages"),
        ages=None if versions is None else version - versions,
        turns=column("turn"),
        positions=positions,
        kinds=column("token_kind"),
    )


# -- refused inputs --------------------------------------------------------------------------------


def check_versions(samples: Sequence[Sample], version: int) -> None:
    """Raises AlignmentError unless every trained token was sampled by this version."""
    for sample in samples:
        column = sample.columns.get("policy_version")
        found = None if column is None else column[sample.loss_mask]
        if found is None or (found != version).any():
            what = "no policy_version"
            if found is not None:
                what = f"tokens of policy version {int(found[found != version][0])}"
            raise AlignmentError(
                f"sample {sample.id} has {what}; correction.anchor=on_policy needs rows that "
                f"version {version}, the one in training, has sampled. Use anchor=recomputed."
            )


def check_equal(
    batch: PackedBatch, logprobs: Tensor, samples: Sequence[Sample], *, version: int
) -> None:
    """Raises UnequalTokenError at the first token of this version whose two log-probs differ.

    logprobs: [N] float32 of the training forward, on the host. Tokens of older versions may differ.
    """
    columns = batch.host_columns
    recorded, versions = columns.get("rollout_logprobs"), columns.get("policy_version")
    if recorded is None or versions is None:
        raise AlignmentError(
            "rows under a numerics contract need rollout_logprobs and policy_version: the contract "
            "promises that they equal the trainer's."
        )
    differs = (logprobs != recorded) & (versions == version)
    if not bool(differs.any()):
        return
    for row, places, values in batch.unpack(torch.stack([differs.float(), logprobs, recorded], 1)):
        wrong = np.flatnonzero(values[:, 0])
        if wrong.size:
            _, trainer, rollout = values[wrong[0]].tolist()
            raise UnequalTokenError(
                samples[row],
                int(places[wrong[0]]),
                f"{int(differs.sum())} of {int((versions == version).sum())} tokens of a "
                f"micro-batch break the contract: sampled and trained by policy version {version}, "
                "with different log-probs. The first is",
                f"{rollout!r} was recorded when it was sampled, {trainer!r} is the trainer's.",
            )


class UnequalTokenError(ContractError):
    """A token of the version in training whose recorded log-prob is not the trainer's."""

    def __init__(self, sample: Sample, token: int, before: str, after: str) -> None:
        self.sample, self.token = sample, token
        self._arguments = (sample, token, before, after)
        super().__init__(
            f"{before} token {token} of sample {sample.id} (id {int(sample.token_ids[token])}): "
            f"{after}"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # one rank finds it, all ranks raise it
        return UnequalTokenError, self._arguments
