"""The policy in training: `score`, `weigh`, `forward_backward`, `optim_step`, `save`, `load`.
`update` is these in order. Types say what is known of the rows: `Sample`s, `Scored`, `Weighed`.

    trainer = Trainer(load_checkpoint(path), TrainerConfig(lr=1e-3), like=path)
    weighed = trainer.weigh(trainer.score(rows), Correction.mis())
    metrics = trainer.forward_backward(weighed, make_loss(PPOClip()))
    metrics |= trainer.optim_step()

# T packed tokens  N trained tokens  R rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction.config import Correction
from lockstep.correction.metrics import MismatchReport, merge_reports, split_by_age
from lockstep.correction.weighing import Corrected
from lockstep.errors import AlignmentError, ConfigError
from lockstep.models import sequence_parallel
from lockstep.models.decoder import Decoder
from lockstep.models.lora import adapter_parameters, adapter_replaced, adapter_scaled
from lockstep.models.moe import Routing
from lockstep.models.peft_io import load_policy, save_policy
from lockstep.models.sharding import local_part, reshard
from lockstep.objectives.config import Aggregate, ObjectiveConfig
from lockstep.objectives.distillation import vocabulary_kl
from lockstep.objectives.losses import LossFn, TokenBatch, TokenLoss, make_loss, with_teacher
from lockstep.ops.context import take_rows
from lockstep.ops.contract import Fingerprint, check_rows
from lockstep.training.config import DistillConfig, TrainerConfig
from lockstep.training.correcting import (
    WEIGHTS,
    Scored,
    TokenJudge,
    UnequalTokenError,
    Weighed,
    check_equal,
    check_versions,
    loss_weights,
    measure_batch,
    weigh_scored,
)
from lockstep.training.expert_load import count_rows, router_aux_loss
from lockstep.training.learner import MAX_NAMED_ROWS, Learner, Metrics
from lockstep.training.packing import PackedBatch, split_updates, unpack_rows
from lockstep.training.replay import COLUMN, keep_routes, routes_to_replay, routing_of
from lockstep.training.totals import Totals, merge_metrics
from lockstep.types import Sample

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

Tensor = torch.Tensor
Parts = list[tuple[PackedBatch, Tensor]]
"""Micro-batches, and [N] values at the trained tokens of each."""

OLD_ROUTES = COLUMN["recompute"]
POLICY = "policy"
TEACHER_IDS = "teacher_ids"


@dataclass(frozen=True, slots=True)
class _Trained:
    """A micro-batch after its backward; without gradient, on the device."""

    batch: PackedBatch
    logprobs: Tensor
    """[N]."""
    losses: Tensor
    """[N], 0.0 where a token is not trained on."""
    weights: Tensor
    """[N], the correction's, 0.0 where a token is not trained on."""
    weighed: Corrected | None
    """Found by the correction, if it needed this forward's log-probs on the host."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """How `Trainer.update` learns from teachers, which have scored the rows before."""

    config: DistillConfig
    teachers: Sequence[Decoder] = ()
    """The models that the column `teacher` numbers, read with signal=full alone."""


class Trainer(Learner):
    """One policy in training. Needs no run: any code that has `Sample`s can call its verbs."""

    role, setting, model_folder, state_file = "train", "trainer", POLICY, "trainer.json"

    def __init__(
        self,
        model: Decoder,
        config: TrainerConfig,
        *,
        like: str | Path,
        temperature: float = 1.0,
        total_updates: int | None = None,
        contract: Fingerprint | None = None,
        ranks: Ranks | None = None,
        distill: Distillation | None = None,
    ) -> None:
        """model: a `Decoder`, or a `FallbackModel`. like, total_updates, ranks: see `Learner`.

        temperature: of the distribution of the rollout's recorded log-probs.
        contract: numerics that make the sampler's log-probs equal this trainer's bit for bit. Then
        recorded log-probs replace a forward of the old policy, and a token of the current version
        that differs raises ContractError before anything is updated.
        """
        if not 0 < temperature < float("inf"):
            raise ConfigError(
                f"temperature={temperature} of the trainer must be a finite number above 0. Greedy "
                "sampling records log-probs at temperature 1, and gives no groups to learn from."
            )
        config.check_device(model.embedding.device.type)
        config.check_routers(model.config, has_adapter=model.lora is not None)
        super().__init__(model, config, like=like, total_updates=total_updates, ranks=ranks)
        self.model, self.contract = model, contract
        self.temperature, self.distill = temperature, distill
        self.reference: Decoder | None = None
        """The frozen policy of a reference KL. A model with an adapter needs none: its adapter is
        switched off instead, or replaced by `reference_adapter`."""
        self.reference_adapter: list[Tensor] | None = None
        self.num_recomputed = 0
        """Trained tokens whose log-probs were computed again without a gradient, in all."""

    # -- the verbs ------------------------------------------------------------------------------

    def forward(
        self,
        samples: Sequence[Sample],
        *,
        column: str | None = "old_logprobs",
        model: Decoder | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probs of the trained tokens under the current policy, without gradient.

        Returns [T] float32 per sample, NaN where loss_mask is False. column: the samples keep them
        under this name; None keeps nothing. model: another policy, whose router chooses for itself.
        `forward_backward` makes the same micro-batches from these samples, so before an update both
        give the same bits.

        With routing_replay=recompute, filling `old_logprobs` also keeps the chosen experts as
        `old_routed_experts`.
        """
        is_capturing = (
            model is None and column == "old_logprobs" and self.config.routing_replay == "recompute"
        )
        if is_capturing:
            for sample in samples:
                sample.columns.pop(OLD_ROUTES, None)
        parts: Parts = []
        with torch.no_grad():
            for batch in self._pack(samples, routes=None if model else self._routes(samples)):
                routing = Routing() if is_capturing else routing_of(batch)
                parts.append((batch, self._log_probs(batch, routing, model=model)[0]))
                if routing is not None and is_capturing:
                    keep_routes(samples, batch, routing, column=OLD_ROUTES)
        reshard(model or self.model)
        if is_capturing and self.ranks is not None:
            self._share_routes(samples, [batch for batch, _ in parts])
        self.num_recomputed += sum(sample.num_trained for sample in samples)
        out = self._by_row(samples, parts)
        if column is not None:
            _store_column(samples, out, column)
        return out

    def list_likely(self, samples: Sequence[Sample], model: Decoder, *, top_k: int) -> None:
        """Fills `teacher_ids` and `teacher_ids_logprobs`, [T, top_k]: the likeliest ids of `model`,
        a teacher, at each trained token, and their log-probs at the trainer's temperature.

        Raises ConfigError if the vocabulary has fewer ids.
        """
        vocab_size = min(len(model.head), self.model.config.vocab_size)
        if not 0 < top_k <= vocab_size:
            raise ConfigError(f"top_k={top_k} of a vocabulary of {vocab_size} ids: set 1 to that.")
        parts = []
        with torch.no_grad():
            for batch in self._pack(samples):
                hidden = take_rows(
                    model(batch.ids, batch.positions, batch.context), batch.predictors
                )
                ids, logprobs = model.top_log_probs(
                    hidden, top_k, vocab_size=vocab_size, temperature=self.temperature
                )
                parts.append((batch, ids, logprobs))
        listed = self._by_row(samples, [(batch, ids) for batch, ids, _ in parts], fill=0.0)
        logprobs = self._by_row(samples, [(batch, logprobs) for batch, _, logprobs in parts])
        for sample, ids_of_row, of_row in zip(samples, listed, logprobs, strict=True):
            sample.set(TEACHER_IDS, ids_of_row.astype(np.int32))
            sample.set(f"{TEACHER_IDS}_logprobs", of_row)

    def score(self, samples: Sequence[Sample]) -> Scored:
        """Fills `old_logprobs`, the policy before the update.

        Under the contract, rows that only the version in training drew take the sampler's
        log-probs, which are equal. A forward scores the others; then all rows also have `logprobs`.
        """
        is_known = self.contract is not None and self.config.routing_replay != "recompute"
        others: list[Sample] = []
        for sample in samples:
            versions = sample.columns["policy_version"][sample.loss_mask] if is_known else None
            if versions is not None and (versions == self.version).all():
                recorded = np.where(sample.loss_mask, sample.columns["rollout_logprobs"], np.nan)
                sample.set("old_logprobs", recorded.astype(np.float32))
            else:
                others.append(sample)
        if others:
            self.forward(others)
            _store_column(samples, [s.columns["old_logprobs"] for s in samples], "logprobs")
        return Scored(samples, is_by_forward=bool(others))

    def weigh(self, scored: Scored, correction: Correction) -> Weighed:
        """Weights and rejections of the tokens, judged over the whole batch."""
        return weigh_scored(scored, correction, version=self.version)

    def measure(
        self, samples: Sequence[Sample], *, column: str | None = None, is_checking: bool = False
    ) -> MismatchReport:
        """The mismatch between `rollout_logprobs` and the current policy, without gradient.

        column: the samples keep the policy's log-probs under this name. is_checking: a token that
        breaks the contract raises, as in an update.
        """
        with torch.no_grad():
            parts = [
                (batch, self._log_probs(batch, routing_of(batch))[0])
                for batch in self._pack(samples, routes=self._routes(samples))
            ]
        reshard(self.model)
        if is_checking:
            self._check_contract(samples, parts)
        found = (measure_batch(*part, self.version) for part in parts if not part[0].is_filler)
        report = reduce(MismatchReport.merge, found, MismatchReport.empty())
        if column is not None:
            _store_column(samples, self._by_row(samples, parts), column)
        return report if self.ranks is None else report.all_reduced(self.ranks.data_group)

    def forward_backward(
        self,
        samples: Sequence[Sample] | Weighed,
        loss_fn: LossFn,
        *,
        aggregate: Aggregate = "token_mean",
        denominator: float | None = None,
        correction: Correction | None = None,
        column: str | None = None,
        skips_silent: bool = False,
    ) -> Metrics:
        """Adds the gradient of the loss over `samples` to what the next `optim_step` applies.

        Token losses are weighed over all samples of the call, whatever its micro-batches: see
        `ObjectiveConfig.aggregate`. denominator: replaces the number of trained tokens (token_mean)
        or rows (the others), for a batch that comes in several calls or a sum of loss weights. A
        loss that is not finite makes `optim_step` skip.

        samples: rows of `weigh` keep their weights. correction: weighs and rejects tokens of other
        rows by this forward; None trains every token by the samples' own `old_logprobs`. Raises
        ConfigError for a correction that must see the whole batch first.
        column: the samples keep this forward's log-probs under this name. The mismatch is measured
        in this forward if they are kept or the rows are not `Weighed`.
        skips_silent: rows whose advantages are all 0 have no gradient, so they get no backward.
        """
        if is_weighed := isinstance(samples, Weighed):
            rows, correction = samples.rows, samples.correction
        else:
            rows = samples
        if not is_weighed and correction is not None and correction.needs_whole_batch:
            raise ConfigError(
                "this correction depends on the whole batch (normalize, kl_penalty_form=advantage "
                "or denominator=kept), which one forward_backward cannot see before it trains. Use "
                "Trainer.update, or give it the rows of Trainer.weigh."
            )
        judge = TokenJudge(correction, version=self.version, is_weighed=is_weighed)
        weights_of = loss_weights(
            rows, aggregate, denominator=denominator, is_kept_only=judge.counts_kept_only
        )
        num_trained = sum(sample.num_trained for sample in rows)
        silent = {i for i, sample in enumerate(rows) if skips_silent and _is_silent(sample.columns)}
        skips_silent &= len(silent) < len(rows)  # else there would be no gradient at all
        backward = partial(self._backward, loss_fn, weights_of, judge, num_trained, skips_silent)
        self._passes.append((rows, backward))
        totals = Totals(self.device, num_experts=self.model.config.num_experts)
        packed = self._pack(rows, routes=self._routes(rows, is_training=True), apart=silent)
        trained = [backward(batch, totals) for batch in packed]
        # Nothing above waits for the device, so it computes while the host continues.
        logprobs = [(part.batch, part.logprobs.cpu()) for part in trained]
        self._check_contract(rows, logprobs)
        for part, (batch, logprobs_N) in zip(trained, logprobs, strict=True):
            if not batch.is_filler:
                found = judge.reports(
                    batch, logprobs_N, part.weighed, is_measured=column is not None
                )
                totals.reports = merge_reports(totals.reports, found)
        if column is not None:
            _store_column(rows, self._by_row(rows, logprobs), column)
        if correction is not None and correction.changes_tokens and not is_weighed:
            weights = [(part.batch, part.weights) for part in trained]
            _store_column(rows, self._by_row(rows, weights, fill=0.0), WEIGHTS)
        return self._finish_pass(rows, trained, totals)

    def update(
        self,
        samples: Sequence[Sample],
        objective: ObjectiveConfig,
        correction: Correction | None = None,
    ) -> Metrics:
        """All `updates_per_batch` updates of one batch: prepare, score, weigh, step.

        correction: how the gap between sampler and trainer is corrected; None is
        `Correction.bypass()`. If the training forward alone determines every token's weight, there
        is one pass over the rows; otherwise the whole batch is scored and weighed first. Both ways
        give the same bits.

        The mismatch is reported before the first update. Other metrics are means over the updates
        (maxima of `*_max`, sums of counts).
        """
        correction, num_recomputed = correction or Correction.bypass(), self.num_recomputed
        self._prepare(samples, objective, correction)
        is_measured = all(correction.behaviour in s.columns for s in samples)
        if not self.config.scores_first(correction, is_measured=is_measured):
            metrics = self._step(samples, objective, correction, is_scored=False)
        else:
            scored = self.score(samples)
            weighed = self.weigh(scored, correction)
            metrics = self._step(weighed, objective, correction, is_scored=scored.is_by_forward)
            if scored.is_by_forward:
                metrics |= weighed.metrics
            else:  # the sampler's log-probs are compared in the first update's forward
                metrics = {**weighed.metrics, **metrics}
        metrics |= split_by_age(metrics, is_exact=self.contract is not None)
        return metrics | {"tokens/recomputed": float(self.num_recomputed - num_recomputed)}

    # -- the parts of an update -----------------------------------------------------------------

    def _prepare(
        self, samples: Sequence[Sample], objective: ObjectiveConfig, correction: Correction
    ) -> None:
        """Checks the rows, drops what an earlier update left in them, and scores them by the
        reference if the objective reads it."""
        correction.check_updates(self.config.updates_per_batch)
        if self.contract is not None:
            check_rows(self.contract, ((s.id, s.fingerprints) for s in samples if s.num_trained))
        if correction.anchor == "on_policy":
            check_versions(samples, self.version)
        column = correction.behaviour
        is_read = correction.changes_tokens or (
            correction.anchor == "rollout" and objective.reads_old_logprobs
        )
        for sample in samples:
            sample.columns.pop(WEIGHTS, None)
            sample.columns.pop(OLD_ROUTES, None)
            if is_read and column not in sample.columns:
                raise AlignmentError(
                    f"sample {sample.id} has no {column}, which correction.anchor="
                    f"{correction.anchor} with level={correction.level} reads. "
                    "Correction(anchor='recomputed') needs no log-probs of the sampler."
                )
        if not objective.reads_reference_logprobs:
            return
        if self.reference is not None:
            self.forward(samples, column="reference_logprobs", model=self.reference)
        elif self.model.lora is not None:
            adapter = self.reference_adapter
            with (
                adapter_scaled(self.model, 0)
                if adapter is None
                else adapter_replaced(self.model, adapter)
            ):
                self.forward(samples, column="reference_logprobs", model=self.model)
        else:
            raise ConfigError(
                "objective.kl_coef is above 0, and this trainer has no reference policy: set "
                "Trainer.reference to a frozen copy of the policy."
            )

    def take_reference(self, directory: Path | None = None) -> None:
        """Makes the present policy the reference of the KL, or the policy saved in `directory`."""
        if self.model.lora is not None:
            self.reference_adapter = [p.detach().clone() for p in adapter_parameters(self.model)]
            if directory is not None:
                with adapter_replaced(self.model, self.reference_adapter):
                    load_policy(self.model, directory)
        elif self.reference is not None and directory is not None:
            load_policy(self.reference, directory)
        elif self.reference is not None:
            with torch.no_grad():
                pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
                for theirs, mine in pairs:
                    local_part(theirs).copy_(local_part(mine))

    def _step(
        self,
        batch: Sequence[Sample] | Weighed,
        objective: ObjectiveConfig,
        correction: Correction,
        *,
        is_scored: bool,
    ) -> Metrics:
        """forward_backward and optim_step on each update's share of the rows.

        is_scored: the rows have the column `logprobs`. Otherwise the first update fills it, and
        the rows of later updates get none: their policy is not the sampler's.
        """
        num_updates, aux_coef = self.config.updates_per_batch, self.config.router_aux_loss_coef
        has_other_losses = correction.changes_loss or self.distill is not None or aux_coef > 0
        rows = batch.rows if isinstance(batch, Weighed) else batch
        # A loss without a ratio, or with a ratio of 1 by definition, is linear in log-probs.
        loss_fn = make_loss(objective)
        if self.distill is not None and (distill := self.distill.config).signal != "sampled":
            loss_fn = with_teacher(loss_fn, coef=distill.coef, order=distill.divergence)
        parts: list[Metrics] = []
        for number, part in enumerate(split_updates(rows, num_updates) or [[]]):
            metrics = self.forward_backward(
                replace(batch, rows=part) if isinstance(batch, Weighed) else part,
                loss_fn,
                aggregate=objective.aggregate,
                correction=correction,
                column="logprobs" if number == 0 and not is_scored else None,
                skips_silent=objective.is_silent_at_zero
                and not has_other_losses
                and self.ranks is None,
            )
            parts.append(metrics | self.optim_step())
        return merge_metrics(parts)

    def _finish_pass(
        self, rows: Sequence[Sample], trained: Sequence[_Trained], totals: Totals
    ) -> Metrics:
        """The metrics of a `forward_backward`, over all ranks. Names a loss that is not finite."""
        if self.ranks is not None:
            totals = reduce(Totals.merge, self.ranks.gather_data(totals.on_host()))
        self._num_kept += totals.counts["kept"]
        if self.config.expert_bias_rate:
            self._expert_load = self._expert_load + totals.sums.get("load", 0.0)
        metrics = totals.to_metrics()
        if (name := "train/router_aux_loss") in metrics:
            metrics["train/loss"] += self.config.router_aux_loss_coef * metrics[name]
        if not np.isfinite(metrics["train/loss"]):
            losses = [(part.batch, part.losses) for part in trained]
            found = self._by_row(rows, losses, fill=0.0)
            self._bad_loss = self._bad_loss or _name_bad_losses(rows, found)
        return metrics

    # -- one micro-batch ------------------------------------------------------------------------

    def _backward(
        self,
        loss_fn: LossFn,
        weights_of: Callable[[PackedBatch], Tensor],
        judge: TokenJudge,
        num_trained: int,
        skips_silent: bool,
        batch: PackedBatch,
        totals: Totals | None = None,
    ) -> _Trained:
        """Forward and backward of a micro-batch, whose figures are added to `totals`. num_trained:
        trained tokens of all micro-batches and ranks."""
        routing, aux_coef = routing_of(batch), self.config.router_aux_loss_coef
        if routing is None and self.model.config.routed_layers:
            routing = Routing()  # keeps the chosen experts, for `moe/...`
        if routing is not None and aux_coef:
            routing.weight_T = count_rows(batch)
        is_silent = skips_silent and _is_silent(batch.host_columns)
        with torch.set_grad_enabled(not is_silent):
            logprobs, entropy, extra = self._score_trained(batch, routing)
        tokens, weighed = judge.keep_tokens(batch, logprobs, entropy, extra=extra)
        weight_N = weights_of(batch)
        loss_N, total, out, aux = torch.zeros_like(logprobs.detach()), None, None, None
        if not batch.is_filler and len(tokens.logprobs):
            out = loss_fn(tokens)
            loss = judge.with_penalty(_weighed(out, tokens), tokens)
            total = (loss * tokens.select(weight_N)).sum()
            if routing is not None and aux_coef:
                aux = router_aux_loss(batch, routing) * (len(logprobs) / num_trained)
                total = total + aux_coef * aux
            loss_N = tokens.spread(loss.detach())
        self._run_backward(None if is_silent else total, logprobs)
        if totals is not None and not batch.is_filler:
            totals.add(
                batch,
                tokens,
                out,
                loss=(loss_N.double() * weight_N).sum(),
                logprobs_N=logprobs.detach(),
                routing=routing,
                aux=aux,
            )
        weights = torch.ones_like(tokens.logprobs) if tokens.weights is None else tokens.weights
        return _Trained(batch, logprobs.detach(), loss_N, tokens.spread(weights), weighed)

    def _score_trained(
        self, batch: PackedBatch, routing: Routing | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(log-probs [N], entropy [N], fields of a `TokenBatch` for the comparison with a
        teacher)."""
        listed, distill = batch.columns.get(TEACHER_IDS), self.distill
        if listed is not None and batch.support is None:
            targets = torch.cat([batch.targets[:, None], listed.long()], 1)
            found, entropy = self._log_probs(batch, routing, targets=targets)
            return found[:, 0], entropy, {"listed": found[:, 1:]}
        if listed is None and (distill is None or not distill.teachers):
            return *self._log_probs(batch, routing), {}
        model = self.model
        hidden = take_rows(
            model(batch.ids, batch.positions, batch.context, routing), batch.predictors
        )
        logprobs, entropy = model.log_probs(
            hidden, batch.targets, temperature=self.temperature, support=batch.support
        )
        if distill is None or listed is not None:  # over the vocabulary, whatever was drawn from
            assert listed is not None, "rows without listed ids have returned above"
            found, _ = model.log_probs(hidden, listed.long(), temperature=self.temperature)
            return logprobs, entropy, {"listed": found}
        kl, where = torch.zeros_like(logprobs), batch.columns["teacher"]
        for number, teacher in enumerate(distill.teachers):
            mine = (where == number).nonzero()[:, 0]
            if not len(mine):
                continue
            with torch.no_grad():
                theirs = teacher(batch.ids, batch.positions, batch.context)
            of_mine = vocabulary_kl(
                *(hidden[mine], model.head),
                *(take_rows(theirs, batch.predictors[mine]), teacher.head),
                temperature=self.temperature,
                vocab_size=model.config.vocab_size,
                order=distill.config.divergence,
            )
            kl = kl.index_copy(0, mine, of_mine)
        return logprobs, entropy, {"teacher_kl": kl}

    def _log_probs(
        self,
        batch: PackedBatch,
        routing: Routing | None = None,
        *,
        model: Decoder | None = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs [N], entropy [N]), float32, at the trained tokens. targets: [N, K] ids to
        score there, in place of the tokens' own; the log-probs are [N, K] then."""
        model = model or self.model
        score = model.score
        if self._split_over is not None:
            score = sequence_parallel.SplitModel(model, self._split_over).score
        return score(
            batch.ids,
            batch.positions,
            batch.context,
            predictors_N=batch.predictors,
            targets_N=batch.targets if targets is None else targets,
            temperature=self.temperature,
            support=batch.support,
            routing=routing,
        )

    # -- routes -----------------------------------------------------------------------------------

    def pack(self, samples: Sequence[Sample]) -> Iterator[PackedBatch]:
        """The micro-batches of a training forward, with the routes that it replays. Raises
        RoutingReplayError for routes that it cannot replay."""
        return self._pack(samples, routes=self._routes(samples, is_training=True))

    def _routes(
        self, samples: Sequence[Sample], *, is_training: bool = False
    ) -> list[npt.NDArray[np.int16]] | None:
        """The experts to replay, per sample. Recomputed ones do not exist before the first forward
        that is no training."""
        replay = self.config.routing_replay
        has_own = any(OLD_ROUTES in sample.columns for sample in samples)
        if replay == "none" or (replay == "recompute" and not has_own and not is_training):
            return None
        return routes_to_replay(
            samples, replay, self.model.config, is_partial=self.config.partial_routes
        )

    def _share_routes(self, samples: Sequence[Sample], batches: Sequence[PackedBatch]) -> None:
        """Gives the captured routes of this rank's rows to the others, and takes theirs."""
        assert self.ranks is not None, "there is nobody to share with"
        mine = {row for batch in batches if not batch.is_filler for row in batch.rows}
        for theirs in self.ranks.gather_data({i: samples[i].columns[OLD_ROUTES] for i in mine}):
            for row, routes in theirs.items():
                samples[row].set(OLD_ROUTES, routes)

    # -- checks, files --------------------------------------------------------------------------

    def _check_contract(self, samples: Sequence[Sample], parts: Parts) -> None:
        """Raises UnequalTokenError, on all ranks, if any token breaks the contract; the gradients
        collected so far are dropped."""
        if self.contract is None:
            return
        broken: UnequalTokenError | None = None
        try:
            for batch, logprobs in parts:
                check_equal(batch, logprobs, samples, version=self.version)
        except UnequalTokenError as error:
            broken = error
        if self.ranks is not None:
            broken = next(filter(None, self.ranks.gather_data(broken)), None)
        if broken is not None:
            self._drop_gradients()
            raise broken

    def _by_row(
        self, samples: Sequence[Sample], parts: Parts, *, fill: float = float("nan")
    ) -> list[npt.NDArray[np.float32]]:
        return unpack_rows(samples, parts, ranks=self.ranks, fill=fill)

    def save_policy(self, directory: Path) -> None:
        """Writes the trained weights alone: see `peft_io.save_policy`."""
        save_policy(self.model, directory, like=self.like, is_writer=self.is_writer)


def _is_silent(columns: Mapping[str, Any]) -> bool:
    """True if every advantage is 0."""
    return "advantages" in columns and not columns["advantages"].any()


def _weighed(out: TokenLoss, tokens: TokenBatch) -> Tensor:
    """[K]: the policy loss times the correction's weights, plus the regularizer."""
    if out.loss.shape != tokens.logprobs.shape:
        raise AlignmentError(
            f"the loss gave {list(out.loss.shape)} values for "
            f"{list(tokens.logprobs.shape)} trained tokens: a loss gives one per token, and "
            "the trainer sums them."
        )
    loss = out.loss if tokens.weights is None else out.loss * tokens.weights
    return loss if out.regularizer is None else loss + out.regularizer


def _store_column(
    samples: Sequence[Sample], values: Sequence[npt.NDArray[np.float32]], column: str
) -> None:
    for sample, of_row in zip(samples, values, strict=True):
        sample.set(column, of_row)


def _name_bad_losses(samples: Sequence[Sample], losses: Sequence[npt.NDArray[np.float32]]) -> str:
    """losses: [T] per sample, 0.0 where nothing is trained."""
    bad: list[str] = []
    for row, (sample, values) in enumerate(zip(samples, losses, strict=True)):
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            at = int(wrong[0])
            bad.append(f"{sample.id} (row {row}, token {at}: {values[at]})")
    if not bad:
        return "the loss is not finite, but each token's is: their sum is too large"
    more = f" and {len(bad) - MAX_NAMED_ROWS} more" if len(bad) > MAX_NAMED_ROWS else ""
    return f"the loss is not finite; it comes from {', '.join(bad[:MAX_NAMED_ROWS])}{more}"
