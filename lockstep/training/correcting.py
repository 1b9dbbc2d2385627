"""Between packed rows and `lockstep.correction`: which tokens are trained, and with what weight.

# N trained tokens of a micro-batch  K those of them that are kept
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction.config import Correction
from lockstep.correction.layout import Layout
from lockstep.correction.metrics import MismatchReport
from lockstep.correction.weighing import TokenFacts, measure, weigh
from lockstep.errors import AlignmentError, ContractError
from lockstep.objectives.aggregation import token_weights
from lockstep.objectives.config import Aggregate
from lockstep.objectives.losses import TokenBatch
from lockstep.training.packing import PackedBatch
from lockstep.types import Sample

Tensor = torch.Tensor
Metrics = dict[str, float]

BEHAVIOUR = {"rollout": "rollout_logprobs", "averaged": "averaged_logprobs"}
"""The column that stands for the policy that sampled, by `Correction.behaviour`."""
WEIGHTS = "importance_weights"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reports:
    """The mismatch of some rows: of what was recorded, and of the averaged behaviour if used."""

    rollout: MismatchReport | None = None
    """Where tokens are told apart by age, turn, place and kind too."""
    averaged: MismatchReport | None = None

    def merge(self, other: Reports) -> Reports:
        return Reports(
            rollout=_merge(self.rollout, other.rollout),
            averaged=_merge(self.averaged, other.averaged),
        )

    def on_host(self) -> Reports:
        return Reports(
            rollout=_on_host(self.rollout),
            averaged=_on_host(self.averaged),
        )

    def vectors(self) -> list[Tensor]:
        """What `metrics_of` needs on the host."""
        return [v for report in self._named().values() for v in (report.sums, report.maxima)]

    def metrics_of(self, values: list[float]) -> Metrics:
        """The metrics, from `vectors` laid end to end on the host."""
        out: Metrics = {}
        for prefix, report in self._named().items():
            size = len(report.sums) + len(report.maxima)
            out |= report.metrics_of(values[:size], prefix, by_part=prefix == "mismatch")
            values = values[size:]
        return out

    def to_metrics(self) -> Metrics:
        vectors = self.vectors()
        return self.metrics_of(torch.cat(vectors).tolist()) if vectors else {}

    def _named(self) -> dict[str, MismatchReport]:
        named = {"mismatch": self.rollout, "mismatch_averaged": self.averaged}
        return {prefix: report for prefix, report in named.items() if report is not None}


def _on_host(report: MismatchReport | None) -> MismatchReport | None:
    if report is None:
        return None
    return replace(report, sums=report.sums.cpu(), maxima=report.maxima.cpu())


def _merge(left: MismatchReport | None, right: MismatchReport | None) -> MismatchReport | None:
    if left is None or right is None:
        return left or right
    return left.merge(right)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Kept:
    """The tokens of a micro-batch that a loss sees, and what multiplies each."""

    tokens: TokenBatch
    weights: Tensor | None
    """[K] float32 without gradient; None multiplies by nothing."""
    index: Tensor | None
    """[K] int64 into N; None if all are kept."""
    reports: Reports

    def select(self, values_N: Tensor) -> Tensor:
        return values_N if self.index is None else values_N.index_select(0, self.index)

    def weights_of_all(self, num_tokens: int) -> Tensor:
        """[N] float32: what multiplies each token's loss, 0.0 at what was not kept."""
        count = num_tokens if self.index is None else len(self.index)
        ones = self.tokens.logprobs.new_ones(count, dtype=torch.float32, requires_grad=False)
        return self.spread(ones if self.weights is None else self.weights, num_tokens)

    def spread(self, values_K: Tensor, num_tokens: int) -> Tensor:
        """[N]: the values at their tokens, 0.0 at what was not kept."""
        if self.index is None:
            return values_K
        return values_K.new_zeros(num_tokens).index_copy(0, self.index, values_K)


def keep_tokens(
    batch: PackedBatch,
    logprobs: Tensor,
    entropy: Tensor,
    correction: Correction | None,
    *,
    version: int,
    is_measuring: bool = False,
) -> Kept:
    """What of a micro-batch is trained, judged by its own forward or by what was judged before.

    logprobs, entropy: [N] float32, of that forward, with gradient. correction: None takes the
    samples' columns as they are. Rows that have the column `importance_weights` were weighed over
    their whole batch already; is_measuring: this forward is still the one that tells their
    mismatch. version: of the policy, for the age of tokens.
    """
    columns, reports = dict(batch.columns), Reports()
    weights: Tensor | None = None
    keep: Tensor | None = None
    constant = logprobs.detach()
    if correction is not None:
        behaviour = columns.get(BEHAVIOUR[correction.behaviour])
        if WEIGHTS in columns:
            weights = columns[WEIGHTS]
            keep = weights > 0
            if is_measuring:
                reports = Reports(rollout=measure_batch(batch, constant, version))
        elif behaviour is not None:
            weighed = weigh(
                constant, behaviour, correction,
                layout=layout_of(batch), facts=facts_of(batch, version),
            )  # fmt: skip
            keep = weighed.keep
            weights = weighed.weights if correction.level != "none" else None
            reports = _reports(batch, constant, correction, weighed.report, version)
        if correction.anchor == "on_policy":
            columns["old_logprobs"] = constant
        elif correction.anchor == "rollout" and behaviour is not None:
            columns["old_logprobs"] = behaviour
    elif "rollout_logprobs" in columns:
        reports = Reports(rollout=measure_batch(batch, constant, version))
    tokens = TokenBatch(
        logprobs=logprobs, entropy=entropy, columns=columns, row=batch.row, num_rows=batch.num_rows
    )
    if keep is None or bool(keep.all()):
        return Kept(tokens=tokens, weights=weights, index=None, reports=reports)
    index = keep.nonzero()[:, 0]
    tokens = TokenBatch(
        logprobs=logprobs.index_select(0, index),
        entropy=entropy.index_select(0, index),
        columns={name: column.index_select(0, index) for name, column in columns.items()},
        row=batch.row.index_select(0, index),
        num_rows=batch.num_rows,
    )
    if weights is not None:
        weights = weights.index_select(0, index)
    return Kept(tokens=tokens, weights=weights, index=index, reports=reports)


def measure_batch(batch: PackedBatch, logprobs: Tensor, version: int) -> MismatchReport:
    """The mismatch of `rollout_logprobs` and [N] log-probs of the trainer."""
    if "rollout_logprobs" not in batch.columns:
        raise AlignmentError(
            "the samples have no rollout_logprobs: there is nothing to compare the trainer with."
        )
    return measure(
        logprobs, batch.columns["rollout_logprobs"],
        layout=layout_of(batch), facts=facts_of(batch, version),
    )  # fmt: skip


def correct_samples(
    samples: Sequence[Sample],
    correction: Correction,
    *,
    version: int,
    device: torch.device,
) -> tuple[list[Sample], Reports]:
    """Weighs a whole batch by the column `old_logprobs`, for a first forward has been made.

    Fills `importance_weights` (0.0 where a token is rejected; 1.0 everywhere where nothing is known
    of the sampler). Returns the rows to train, which are the samples but for the KL penalty in
    their advantages, and the mismatch. Raises AlignmentError for a penalty without advantages.
    """
    for sample in samples:
        if correction.kl_penalty_coef > 0 and "advantages" not in sample.columns:
            raise AlignmentError(
                f"sample {sample.id} has no advantages, which correction.kl_penalty_coef="
                f"{correction.kl_penalty_coef:g} is added to."
            )
    layout = Layout.packed([s.num_trained for s in samples])

    def at_trained(name: str) -> Tensor | None:
        if not samples or name not in samples[0].columns:
            return None
        return _tensor([s.columns[name][s.loss_mask] for s in samples], device)

    versions = at_trained("policy_version")
    facts = TokenFacts(
        advantages=at_trained("advantages"),
        ages=None if versions is None else version - versions,
        turns=at_trained("turn"),
        positions=_tensor([np.flatnonzero(s.loss_mask) for s in samples], device),
        kinds=at_trained("token_kind"),
    )
    old, behaviour = at_trained("old_logprobs"), at_trained(BEHAVIOUR[correction.behaviour])
    if old is None or behaviour is None:
        for sample in samples:
            sample.set(WEIGHTS, sample.loss_mask.astype(np.float32))
        return list(samples), Reports()
    weighed = weigh(old, behaviour, correction, layout=layout, facts=facts)
    corrected = weighed.finish(weighed.report)  # not `correct`: each rank has the whole batch here
    reports = Reports(rollout=corrected.report)
    if correction.behaviour == "averaged":
        rollout = at_trained("rollout_logprobs")
        raw = None if rollout is None else measure(old, rollout, layout=layout, facts=facts)
        reports = Reports(rollout=raw, averaged=corrected.report)
    ends = layout.offsets[1:-1]
    weights = np.split(corrected.weights.cpu().numpy(), ends)
    penalties = [None] * len(samples)
    if corrected.penalty is not None:
        penalties = np.split(corrected.penalty.cpu().numpy(), ends)
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
    return rows, reports


def loss_weights(
    samples: Sequence[Sample],
    aggregate: Aggregate,
    *,
    fixed_length: int = 0,
    denominator: float | None = None,
    is_kept_only: bool = False,
) -> Callable[[PackedBatch], Tensor]:
    """batch -> [N] float32: what each token's loss counts in the loss of all `samples`.

    denominator: in place of the number of tokens (token_mean) or rows (the others).
    is_kept_only: count only tokens that `importance_weights` keeps, and rows that have one.
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
        mask = batch.columns[WEIGHTS] > 0 if is_kept_only else None
        return token_weights(
            Layout.packed(batch.sizes, mask), aggregate, fixed_length=fixed_length,
            denominator=total, device=batch.ids.device,
        )  # fmt: skip

    return weights_of


def layout_of(batch: PackedBatch) -> Layout:
    return Layout.packed(batch.sizes)


def facts_of(batch: PackedBatch, version: int) -> TokenFacts:
    """What is known of the N trained tokens beside their log-probs."""
    columns = batch.columns
    versions = columns.get("policy_version")
    return TokenFacts(
        advantages=columns.get("advantages"),
        ages=None if versions is None else version - versions,
        turns=columns.get("turn"),
        positions=batch.positions.index_select(0, batch.predictors) + 1,
        kinds=columns.get("token_kind"),
    )


def check_versions(samples: Sequence[Sample], version: int) -> None:
    """Raises AlignmentError unless every trained token was sampled by this version."""
    for sample in samples:
        column = sample.columns.get("policy_version")
        found = None if column is None else column[sample.loss_mask]
        if found is None or (found != version).any():
            what = (
                "no policy_version"
                if found is None
                else f"tokens of policy version {int(found[found != version][0])}"
            )
            raise AlignmentError(
                f"sample {sample.id} has {what}; correction.anchor=on_policy needs rows that "
                f"version {version}, the one in training, has sampled: a ratio fixed at 1 would "
                "hide the difference. Use anchor=recomputed."
            )


def check_equal(
    batch: PackedBatch, logprobs: Tensor, samples: Sequence[Sample], *, version: int
) -> None:
    """Raises ContractError at the first token of this version whose two log-probs differ in a bit.

    logprobs: [N] float32 of the training forward. Tokens of older versions differ as they should.
    """
    recorded, versions = batch.columns.get("rollout_logprobs"), batch.columns.get("policy_version")
    if recorded is None or versions is None:
        raise AlignmentError(
            "rows under a numerics contract need rollout_logprobs and policy_version: what is "
            "promised is that they are the trainer's."
        )
    differs = (logprobs != recorded) & (versions == version)
    if not bool(differs.any()):
        return
    for row, places, values in batch.unpack(torch.stack([differs.float(), logprobs, recorded], 1)):
        wrong = np.flatnonzero(values[:, 0])
        if wrong.size:
            at, sample = int(places[wrong[0]]), samples[row]
            raise UnequalTokenError(
                sample=sample, token=at, trainer=float(values[wrong[0], 1]),
                rollout=float(values[wrong[0], 2]), version=version,
                num_unequal=int(differs.sum()), num_compared=int((versions == version).sum()),
            )  # fmt: skip


class UnequalTokenError(ContractError):
    """A token of the version in training whose recorded log-prob is not the trainer's."""

    def __init__(
        self,
        *,
        sample: Sample,
        token: int,
        trainer: float,
        rollout: float,
        version: int,
        num_unequal: int,
        num_compared: int,
    ) -> None:
        self.sample, self.token = sample, token
        self._facts = {
            "sample": sample, "token": token, "trainer": trainer, "rollout": rollout,
            "version": version, "num_unequal": num_unequal, "num_compared": num_compared,
        }  # fmt: skip
        super().__init__(
            f"{num_unequal} of {num_compared} tokens of a micro-batch break the contract: sampled "
            f"and trained by policy version {version}, with different log-probs. The first is "
            f"token {token} of sample {sample.id} (id {int(sample.token_ids[token])}): "
            f"{rollout!r} was recorded when it was sampled, {trainer!r} is the trainer's."
        )

    def __reduce__(self):  # one rank finds it, all ranks raise it
        return _unequal_token, (self._facts,)


def _unequal_token(facts: dict[str, Any]) -> UnequalTokenError:
    return UnequalTokenError(**facts)


def _reports(
    batch: PackedBatch,
    logprobs: Tensor,
    correction: Correction,
    report: MismatchReport,
    version: int,
) -> Reports:
    if correction.behaviour == "rollout":
        return Reports(rollout=report)
    return Reports(rollout=measure_batch(batch, logprobs, version), averaged=report)


def _tensor(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
