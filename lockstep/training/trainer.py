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
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from lockstep.correction.config import Correction
from lockstep.correction.metrics import MismatchReport
from lockstep.errors import AlignmentError, CheckpointError, ConfigError
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora import adapter_off
from lockstep.models.moe import Routing
from lockstep.models.peft_io import check_policy, load_policy, save_policy
from lockstep.models.sequence_parallel import SequenceParallel
from lockstep.models.sharding import let_go, local_part
from lockstep.objectives.config import Aggregate, ObjectiveConfig
from lockstep.objectives.losses import LossFn, TokenLoss, make_loss
from lockstep.ops.context import Coefficients
from lockstep.ops.contract import Fingerprint, check_rows
from lockstep.ops.head import chunk_rows
from lockstep.store.files import write_json
from lockstep.training.config import TrainerConfig
from lockstep.training.correcting import (
    BEHAVIOUR,
    WEIGHTS,
    Kept,
    Reports,
    UnequalTokenError,
    check_equal,
    check_versions,
    correct_samples,
    keep_tokens,
    loss_weights,
    measure_batch,
)
from lockstep.training.expert_load import ExpertLoad
from lockstep.training.loss_scale import LossScale
from lockstep.training.optimizer import Optimizer, freeze, lr_share
from lockstep.training.packing import (
    PackedBatch,
    budget_for_ranks,
    check_readable,
    pack,
    plan_microbatches,
    split_updates,
    unpack_over_ranks,
)
from lockstep.training.replay import (
    COLUMN,
    keep_routes,
    routes_to_replay,
    routing_of,
)
from lockstep.training.totals import Done, Metrics, Totals, merge_metrics
from lockstep.types import Sample

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

Tensor = torch.Tensor

OLD_ROUTES = COLUMN["recompute"]
POLICY, OPTIMIZER, STATE = "policy", "optimizer.safetensors", "trainer.json"

MAX_NAMED_ROWS = 3  # of the rows behind a skipped update; more would hide the first

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _Call:
    """What a `forward_backward` was given: asked again for the row behind a bad gradient."""

    samples: Sequence[Sample]
    weigh: Callable[[PackedBatch], Tensor]
    loss_fn: LossFn
    correction: Correction | None
    is_measuring: bool
    load: ExpertLoad | None
    """What the auxiliary loss is balanced by; None has none."""
    is_fixed: bool
    """Whether the loss's gradient by the log-probs is said not to depend on them."""
    is_refuted: bool = False
    """A gradient that was taken for known was another one: no more is tried."""


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
        reference: Decoder | None = None,
        contract: Fingerprint | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """model: a `FallbackModel` is taken for a decoder.
        like: the checkpoint directory whose config and tokenizer files `save` copies.
        reference: the frozen policy that a reference KL is taken to; a model with an adapter needs
        none, since the adapter can be switched off.

        temperature: of the distribution under which the rollout's log-probs are recorded.
        total_updates: of the run; a schedule that falls needs it. Raises ConfigError without.
        contract: the numerics under which the sampler's log-probs are this trainer's, bit for bit.
        Then the recorded ones are taken as the old ones without a forward of our own, and a token
        of the version in training whose log-prob differs raises ContractError before anything is
        updated.
        ranks: the processes that train together; every method is then called by all of them, with
        the same rows. Each has all columns afterwards; forward and backward alone are divided.
        """
        if not 0 < temperature < float("inf"):
            raise ConfigError(
                f"temperature={temperature} of the trainer must be a finite number above 0. Greedy "
                "sampling records log-probs at temperature 1, and gives no groups to learn from."
            )
        config.check_device(model.embedding.device.type)
        if config.routing_replay != "none" and not model.config.routed_layers:
            raise ConfigError(
                f"trainer.routing_replay={config.routing_replay} needs a model with routers; this "
                f"one ({model.config.architecture}) has none to hand routes to. Set "
                "routing_replay=none."
            )
        if config.router_aux_coef and not model.config.routed_layers:
            raise ConfigError(
                f"trainer.router_aux_coef={config.router_aux_coef} needs a model with routers; "
                f"this one ({model.config.architecture}) has none to train. Leave it at 0."
            )
        self.model = model
        model.recomputes_blocks = config.recompute == "blocks"
        self.reference = reference
        self.contract = contract
        self.config = config
        self.ranks = ranks
        self._sequence = None
        if ranks is not None and ranks.sequence_group is not None:
            self._sequence = SequenceParallel(ranks.sequence_group)
        self.like = Path(like)
        self.temperature = temperature
        self.total_updates = total_updates
        freeze(model.named_parameters(), config.freeze)
        self.optimizer = Optimizer(model.named_parameters(), config)
        self.loss_scale = LossScale.for_training(config.loss_scale, model.embedding.dtype)
        self.num_updates = 0
        """Updates asked for, the skipped ones included: the place in the schedule."""
        self.num_skipped = 0
        self.version = 0
        """Of the policy: one more with each update that was made."""
        self.last_skip = ""
        """Why the last update was skipped, and the row behind it; empty if it was made."""
        self.num_recomputed = 0
        """Trained tokens whose log-probs were computed again without a gradient, in all."""
        self._bad_loss = ""
        self._num_kept = 0
        self._counted: tuple[tuple[int, list[str]], ExpertLoad] | None = None
        """The load of the last forward that filled `old_logprobs`: of which policy and rows."""
        self._calls: list[_Call] = []
        lr_share(config.warmup_updates, config, total_updates=total_updates)

    # -- the verbs ------------------------------------------------------------------------------

    def forward(
        self,
        samples: Sequence[Sample],
        *,
        column: str | None = "old_logprobs",
        model: Decoder | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Log-probs of the trained tokens under the policy as it stands; no gradient.

        [T] float32 per sample, NaN where loss_mask is False. `column`: also kept in the samples
        under this name; None keeps nothing. model: another policy than the one in training, whose
        router then chooses for itself. The micro-batches are those of `forward_backward` on the
        same samples, so before an update both give the same bits.

        With routing_replay=recompute, filling `old_logprobs` also keeps the experts that the router
        chose as `old_routed_experts`: what is replayed from then on.
        """
        is_own = model is None
        is_capturing = (
            self.config.routing_replay == "recompute" and is_own and column == "old_logprobs"
        )
        is_counting = self.config.router_aux_coef > 0 and is_own and column == "old_logprobs"
        loads: list[ExpertLoad] = []
        if is_capturing:
            for sample in samples:
                sample.columns.pop(OLD_ROUTES, None)
        with torch.no_grad():
            parts: list[tuple[PackedBatch, Tensor]] = []
            for batch in self.pack(samples, is_replaying=is_own):
                captured = Routing() if is_capturing else None
                routing = captured or routing_of(batch)
                if is_counting:
                    routing = routing or Routing()
                parts.append((batch, self._log_probs(batch, routing, model=model)[0]))
                if captured is not None:
                    keep_routes(samples, batch, captured, column=OLD_ROUTES)
                if is_counting and routing is not None and not batch.is_filler:
                    loads.append(self._load_of(batch, routing.stacked()))
        let_go(model or self.model)
        if is_capturing and self.ranks is not None:
            self._share_routes(samples, [batch for batch, _ in parts])
        if is_counting:
            self._counted = ((self.version, [s.id for s in samples]), self._load_of_all(loads))
        self.num_recomputed += sum(sample.num_trained for sample in samples)
        out = self._by_row(samples, parts)
        if column is not None:
            _keep(samples, out, column)
        return out

    def measure(
        self, samples: Sequence[Sample], *, column: str | None = None, is_checking: bool = False
    ) -> MismatchReport:
        """The mismatch of `rollout_logprobs` and the policy as it stands. No gradient.

        `column`: the log-probs that were compared are kept in the samples under this name.
        is_checking: a token that breaks the contract is refused, as in an update.
        """
        with torch.no_grad():
            parts = [
                (batch, self._log_probs(batch, routing_of(batch))[0])
                for batch in self.pack(samples)
            ]
        let_go(self.model)
        if is_checking:
            self._check_contract(samples, parts)
        report = MismatchReport.empty(self.device)
        for batch, logprobs in parts:
            if not batch.is_filler:
                report = report.merge(measure_batch(batch, logprobs, self.version))
        if column is not None:
            _keep(samples, self._by_row(samples, parts), column)
        return report if self.ranks is None else report.all_reduced(self.ranks.data_group)

    def measure_after(self, samples: Sequence[Sample]) -> Metrics:
        """`mismatch_after/...`: how far the update has moved the policy from the rollout's."""
        return self.measure(samples).to_metrics("mismatch_after", by_part=False)

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        *,
        aggregate: Aggregate = "token_mean",
        fixed_length: int = 0,
        denominator: float | None = None,
        correction: Correction | None = None,
        column: str | None = None,
        is_measuring: bool = False,
        is_fixed: bool = False,
    ) -> Metrics:
        """Adds the gradient of the loss over `samples` to what the next `optim_step` will use.

        The token losses are weighed over all samples of the call, whatever its micro-batches:
        see `ObjectiveConfig.aggregate`. `denominator` replaces the number of trained tokens
        (token_mean) or of rows (the others), for a batch that comes in several calls or a sum of
        loss weights. The mismatch is measured in the same forward where the samples have
        `rollout_logprobs`. `column`: the log-probs are kept in the samples under this name. A loss
        that is not finite is remembered; `optim_step` then skips.

        correction: what each token's policy loss is multiplied by, and what is left out, judged by
        this forward, or by the samples' `importance_weights` where a whole batch was weighed
        before. None trains every token as it is, with the samples' own `old_logprobs`. Raises
        ConfigError if it must see the whole batch first and has not: `update` does that.
        is_measuring: the mismatch is measured in this forward, though the rows are weighed already.
        is_fixed: the loss's gradient by the log-probs does not depend on them, as of a loss that is
        linear in them or whose ratio is fixed at 1. Then, and under a contract on rows of the
        version in training, a large head forms its gradients in the forward, which saves a product
        of four; what was said is checked, and at worst costs a second forward.
        """
        is_weighed = bool(samples) and WEIGHTS in samples[0].columns
        if correction is not None and correction.needs_whole_batch and not is_weighed:
            raise ConfigError(
                "this correction depends on the whole batch (normalize, kl_penalty_coef or "
                "denominator=kept), which one forward_backward cannot see before it trains. Use "
                "Trainer.update, or fill the column importance_weights first."
            )
        is_weighing = correction is not None and correction.changes_tokens and not is_weighed
        batches = self.pack(samples, is_updating=True)
        weigh = loss_weights(
            samples, aggregate, fixed_length=fixed_length, denominator=denominator,
            is_kept_only=correction is not None and correction.denominator == "kept" and is_weighed,
        )  # fmt: skip
        call = _Call(
            samples=samples, weigh=weigh, loss_fn=loss_fn, correction=correction,
            is_measuring=is_measuring, load=self._load_to_balance(samples, batches),
            is_fixed=is_fixed,
        )  # fmt: skip
        self._calls.append(call)
        totals = Totals(self.device)
        losses: list[tuple[PackedBatch, Tensor]] = []
        logprobs: list[tuple[PackedBatch, Tensor]] = []
        weights: list[tuple[PackedBatch, Tensor]] = []
        for batch in batches:
            done = self._backward(batch, call)
            logprobs.append((batch, done.logprobs_N))
            if batch.is_filler:
                continue
            if is_weighing:
                weights.append((batch, done.kept.weights_of_all(len(done.logprobs_N))))
            losses.append((batch, done.loss_N))
            totals.add(done)
        self._check_contract(samples, logprobs)
        if column is not None:
            _keep(samples, self._by_row(samples, logprobs), column)
        if is_weighing:
            _keep(samples, self._by_row(samples, weights, fill=0.0), WEIGHTS)
        if self.ranks is not None:
            totals = reduce(Totals.merge, self.ranks.gather_data(totals.on_host()))
        self._num_kept += totals.num_kept
        metrics = totals.to_metrics()
        if totals.load is not None:
            metrics |= totals.load.to_metrics()
        if call.load is not None:
            metrics["moe/aux_loss"] = float(totals.balance_loss) / self.config.router_aux_coef
        if not np.isfinite(metrics["train/loss"]):
            found = self._by_row(samples, losses, fill=0.0)
            self._bad_loss = self._bad_loss or _name_bad_losses(samples, found)
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
            norm = self._gradient_norm()
            while not np.isfinite(norm) and self.loss_scale.lower():
                norm = self._gradient_norm_again()
            if not self._num_kept:
                reason = "no token was trained since the last update: none sampled, or all rejected"
            elif not np.isfinite(norm):
                reason = self._name_bad_gradients()
        self.last_skip = reason
        if reason:
            self.num_skipped += 1
            _log.warning("update %d skipped: %s", self.num_updates, reason)
        else:
            clip = self.config.grad_clip
            share = clip / norm if 0 < clip < norm else 1.0
            self.optimizer.step(lr=lr, gradient_scale=share / self.loss_scale.value)
            self.loss_scale.made_update()
            self.version += 1
        self.num_updates += 1
        self._drop_gradients()
        metrics = {
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped_updates": float(bool(reason)),
        }
        return metrics | self.loss_scale.to_metrics("train")

    def update(
        self,
        samples: Sequence[Sample],
        objective: ObjectiveConfig,
        correction: Correction | None = None,
    ) -> Metrics:
        """All updates of one batch, `updates_per_batch` of them, by `objective`.

        correction: what is done about the gap between sampler and trainer; None is
        `Correction.bypass()`. One pass where the training forward itself can tell each token's
        weight; otherwise a forward over the whole batch first, which fills `old_logprobs` and
        `importance_weights`. Both give the same bits. The mismatch reported is that before the
        first update. Other metrics are means over the updates (maxima of `*_max`, sums of counts).
        """
        correction = correction or Correction.bypass()
        for sample in samples:
            sample.columns.pop(WEIGHTS, None)  # of an earlier update, by another policy
            sample.columns.pop(OLD_ROUTES, None)
        loss_fn, num_updates = make_loss(objective), self.config.updates_per_batch
        self._check_correction(samples, objective, correction)
        if objective.reads_reference_logprobs:
            self._score_by_reference(samples)
        rows, before = list(samples), Reports()
        num_recomputed = self.num_recomputed
        is_measured = all(BEHAVIOUR[correction.behaviour] in s.columns for s in samples)
        is_recomputing = self.config.routing_replay == "recompute"
        is_two_pass = (
            correction.needs_forward(num_updates=num_updates)
            or (num_updates > 1 and is_measured)
            or is_recomputing
        )
        is_known = is_two_pass and not is_recomputing and self._knows_old_logprobs(samples)
        if is_known:
            for sample in samples:
                sample.set("old_logprobs", sample.columns["rollout_logprobs"])
            # What needs no other row is weighed where it is measured, in the training forward.
            is_two_pass = num_updates > 1 or correction.needs_whole_batch
        elif is_two_pass:
            _keep(samples, self.forward(samples, column="old_logprobs"), "logprobs")
        if is_two_pass:
            rows, before = correct_samples(
                samples, correction, version=self.version, device=self.device
            )
        is_kept_by_update = is_known or not is_two_pass
        if is_kept_by_update and num_updates > 1:
            # What a later update computes is of another policy than the one that sampled.
            for sample in samples:
                sample.set("logprobs", np.full(len(sample), np.nan, np.float32))
        parts: list[Metrics] = []
        for number, part in enumerate(split_updates(rows, num_updates) or [[]]):
            metrics = self.forward_backward(
                part, loss_fn,
                aggregate=objective.aggregate, fixed_length=objective.fixed_length,
                correction=correction,
                column="logprobs" if is_kept_by_update and number == 0 else None,
                is_measuring=is_known and is_two_pass and number == 0,
                is_fixed=_is_fixed(objective, correction),
            )  # fmt: skip
            parts.append(metrics | self.optim_step())
        metrics = merge_metrics(parts)
        # Under the contract the first update's own forward compares; nothing was before it.
        out = before.to_metrics() | metrics if is_known else metrics | before.to_metrics()
        return out | {"tokens/recomputed": float(self.num_recomputed - num_recomputed)}

    def save(self, directory: str | Path) -> None:
        """Writes policy, optimizer and counters into `directory`. The policy is in Hugging Face's
        form; of a model with an adapter it is the adapter alone, in PEFT's.

        `CheckpointStore` makes this atomic and checks it when it is read. The same files whatever
        the number of ranks; rank 0 writes them.
        """
        directory = Path(directory)
        if self.is_writer:
            directory.mkdir(parents=True, exist_ok=True)
        save_policy(self.model, directory / POLICY, like=self.like, is_writer=self.is_writer)
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.optimizer.stream_state():
            if self.is_writer:
                tensors[name] = tensor.contiguous().cpu()
        if not self.is_writer:
            return
        save_file(tensors, str(directory / OPTIMIZER))
        counters = {
            "num_updates": self.num_updates, "num_skipped": self.num_skipped,
            "version": self.version, **self.loss_scale.state(),
        }  # fmt: skip
        write_json(directory / STATE, counters)

    def load(self, directory: str | Path, *, weights_only: bool = False) -> None:
        """Continues what `save` wrote: the next update gives the same bits as without a stop.

        weights_only: the policy alone, with a fresh optimizer and counters at 0: a new run from an
        old one. Raises CheckpointError listing everything that does not fit this model; another
        architecture or shape is refused before anything is changed.
        """
        directory = Path(directory)
        check_policy(self.model, directory / POLICY, like=self.like)
        if self.model.lora is None:
            check_same_shapes(directory / POLICY, self.model.config)
        if not weights_only:
            counters = read_counters(directory / STATE)
            tensors = read_optimizer(directory / OPTIMIZER)
            self.optimizer.load_state_tensors(tensors, where=str(directory / OPTIMIZER))
        load_policy(self.model, directory / POLICY)
        self.optimizer.read_parameters()
        if weights_only:
            self.optimizer = Optimizer(self.model.named_parameters(), self.config)
            counters = {"num_updates": 0, "num_skipped": 0, "version": 0}
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.version = counters["version"]
        self.loss_scale.load(counters)
        self.last_skip = ""
        self._drop_gradients()

    # -- mechanism ------------------------------------------------------------------------------

    @property
    def num_trained(self) -> tuple[int, int]:
        """(numbers that are trained, all of the model)."""
        trained = sum(p.numel() for p in self.optimizer.parameters.values())
        return trained, sum(p.numel() for p in self.model.parameters())

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one whose `save` writes."""
        return self.ranks is None or self.ranks.is_leader

    @property
    def device(self) -> torch.device:
        return self.model.embedding.device

    def pack(
        self,
        samples: Sequence[Sample],
        *,
        is_replaying: bool = True,
        is_updating: bool = False,
    ) -> list[PackedBatch]:
        """This rank's micro-batches of `samples`: always the same for the same samples.

        is_replaying: with the routes that `TrainerConfig.routing_replay` asks for. is_updating: for
        a forward that trains, which replays recomputed routes and does not make them.

        Raises TokenError for a row that the model cannot read, and RoutingReplayError for routes
        that it cannot replay, besides what `packing` raises.
        """
        check_readable(
            samples,
            vocab_size=self.model.config.vocab_size,
            max_positions=self.model.config.max_positions,
        )
        rank, num_ranks = 0, 1
        if self.ranks is not None:
            rank, num_ranks = self.ranks.data_rank, self.ranks.data_size
        max_tokens = self.config.max_tokens_per_microbatch
        plan = plan_microbatches(samples, budget_for_ranks(samples, max_tokens, num_ranks))
        replay, routes = self.config.routing_replay, None
        has_own = replay == "recompute" and any(OLD_ROUTES in s.columns for s in samples)
        if is_replaying and (replay == "rollout" or has_own or (replay != "none" and is_updating)):
            routes = routes_to_replay(
                samples, replay, self.model.config, is_partial=self.config.partial_routes
            )
        return pack(
            samples, plan, device=self.device, routes=routes, rank=rank, num_ranks=num_ranks
        )

    def _log_probs(
        self,
        batch: PackedBatch,
        routing: Routing | None = None,
        *,
        model: Decoder | None = None,
        coefficients: Coefficients | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), each [N] float32, of the trained tokens."""
        model = model or self.model
        score = model.score if self._sequence is None else partial(self._sequence.score, model)
        if coefficients is not None:
            score = partial(model.score, coefficients=coefficients)
        return score(
            batch.ids,
            batch.positions,
            batch.context,
            predictors_N=batch.predictors,
            targets_N=batch.targets,
            temperature=self.temperature,
            support=batch.support,
            routing=routing,
        )

    def _load_of(self, batch: PackedBatch, chosen_TLA: Tensor) -> ExpertLoad:
        return ExpertLoad.of(chosen_TLA, batch, self.model.config.num_experts)

    def _load_of_all(self, loads: Sequence[ExpertLoad]) -> ExpertLoad:
        """The sum of micro-batches', of all ranks."""
        shape = (len(self.model.config.routed_layers), self.model.config.num_experts)
        total = torch.zeros(shape, dtype=torch.float64, device=self.device)
        total = reduce(add, loads, ExpertLoad(total))
        if self.ranks is not None:
            self.ranks.sum_data(total.counts_LE)
        return total

    def _load_to_balance(
        self, samples: Sequence[Sample], batches: Sequence[PackedBatch]
    ) -> ExpertLoad | None:
        """The load of all samples, which the auxiliary loss needs before the first backward: by
        the routes that will be replayed, by a forward that has just been made, or by one more."""
        if not (self.config.router_aux_coef and batches):
            return None
        which = (self.version, [s.id for s in samples])
        if self._counted is not None and self._counted[0] == which:
            return self._counted[1]
        loads: list[ExpertLoad] = []
        is_known = not self.config.partial_routes  # on all ranks alike
        with torch.no_grad():
            for batch in batches:
                chosen = batch.routes
                if chosen is None or not is_known:
                    routing = routing_of(batch) or Routing()
                    if self.ranks is None:
                        self.model(batch.ids, batch.positions, batch.context, routing)
                    else:
                        self._log_probs(batch, routing)  # in step with the others
                    chosen = routing.stacked()
                if not batch.is_filler:
                    loads.append(self._load_of(batch, chosen))
        let_go(self.model)
        return self._load_of_all(loads)

    def _known_gradient(self, batch: PackedBatch, call: _Call) -> Coefficients | None:
        """The loss's gradient before the forward, where it can be known and would spare forming
        logits twice; None elsewhere. Ranks take the plain way: what one of them has to repeat would
        leave the others waiting."""
        if self.ranks is not None or call.is_refuted:
            return None
        if len(batch.targets) <= chunk_rows(self.model.config.vocab_size):
            return None
        logprobs = torch.zeros(len(batch.targets), device=batch.ids.device)
        if self.contract is not None:
            versions = batch.columns.get("policy_version")
            recorded = batch.columns.get("rollout_logprobs")
            if versions is not None and recorded is not None and (versions == self.version).all():
                return self._gradient_at(recorded, torch.zeros_like(recorded), batch, call)
        return self._gradient_at(logprobs, logprobs, batch, call) if call.is_fixed else None

    def _gradient_at(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, call: _Call
    ) -> Coefficients | None:
        """Of the loss by log-probs and entropy, at these values; None if nothing is trained."""
        logprobs, entropy = (x.detach().clone().requires_grad_() for x in (logprobs, entropy))
        kept = keep_tokens(batch, logprobs, entropy, call.correction, version=self.version)
        if not len(kept.tokens.logprobs):
            return None
        loss = _weighed(call.loss_fn(kept.tokens), kept) * kept.select(call.weigh(batch))
        total = loss.sum() * self.loss_scale.value
        grads = torch.autograd.grad(total, (logprobs, entropy), allow_unused=True)
        of_logprobs = torch.zeros_like(logprobs) if grads[0] is None else grads[0]
        return Coefficients(of_logprobs, grads[1])

    def _routing_for(self, batch: PackedBatch, call: _Call) -> Routing | None:
        """What is replayed, balanced and kept in a training forward: for one of them."""
        routing = routing_of(batch)
        if self.model.config.routed_layers:
            routing = routing or Routing()  # keeps what is chosen, for `moe/...`
        if routing is not None and call.load is not None and not batch.is_filler:
            routing.balancing = call.load.balancing(
                batch, num_active=self.model.config.num_active_experts,
                coef=self.config.router_aux_coef,
            )  # fmt: skip
        return routing

    def _backward(self, batch: PackedBatch, call: _Call) -> Done:
        routing, known = self._routing_for(batch, call), self._known_gradient(batch, call)
        logprobs, entropy = self._log_probs(batch, routing, coefficients=known)
        if known is not None:
            found = self._gradient_at(logprobs, entropy, batch, call)
            if found is None or not known.equals(found):
                call.is_refuted = True
                del logprobs, entropy  # and with them what that forward has kept
                routing = self._routing_for(batch, call)
                logprobs, entropy = self._log_probs(batch, routing)
        kept = keep_tokens(
            batch, logprobs, entropy, call.correction, version=self.version,
            is_measuring=call.is_measuring,
        )  # fmt: skip
        weight_N = call.weigh(batch)
        done = Done(
            batch=batch, kept=kept, logprobs_N=logprobs.detach(), weight_N=weight_N,
            routing=routing,
        )  # fmt: skip
        if routing is not None and not batch.is_filler and routing.chosen:
            done.load = self._load_of(batch, routing.stacked())
        if batch.is_filler or not len(kept.tokens.logprobs):
            # Other ranks wait for its part in their gradients; routers are balanced by it too.
            if self.ranks is not None or call.load is not None:
                logprobs.backward(torch.zeros_like(logprobs))
                self.optimizer.collect_gradients()
            return done
        out = call.loss_fn(kept.tokens)
        loss = _weighed(out, kept)
        ((loss * kept.select(weight_N)).sum() * self.loss_scale.value).backward()
        self.optimizer.collect_gradients()
        done.out, done.loss_N = out, kept.spread(loss.detach(), len(logprobs))
        return done

    def _by_row(
        self,
        samples: Sequence[Sample],
        parts: Sequence[tuple[PackedBatch, Tensor]],
        *,
        fill: float = float("nan"),
    ) -> list[npt.NDArray[np.float32]]:
        return unpack_over_ranks(samples, parts, ranks=self.ranks, fill=fill)

    def _share_routes(self, samples: Sequence[Sample], batches: Sequence[PackedBatch]) -> None:
        """Gives the captured routes of this rank's rows to the others, and takes theirs."""
        assert self.ranks is not None, "there is nobody to share with"
        mine = {row for batch in batches if not batch.is_filler for row in batch.rows}
        for theirs in self.ranks.gather_data({i: samples[i].columns[OLD_ROUTES] for i in mine}):
            for row, routes in theirs.items():
                samples[row].set(OLD_ROUTES, routes)

    def _check_contract(
        self, samples: Sequence[Sample], parts: Sequence[tuple[PackedBatch, Tensor]]
    ) -> None:
        """Raises UnequalTokenError, on all ranks, if any token breaks the contract; whatever
        gradients were collected by then are gone."""
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

    def _drop_gradients(self) -> None:
        """What the calls since the last update have left."""
        self.optimizer.zero_gradients()
        self._bad_loss, self._num_kept = "", 0
        self._calls.clear()

    def _gradient_norm(self) -> float:
        """Of the gradients that the ranks have together, which they all have afterwards."""
        if self.ranks is not None:
            self.optimizer.sum_gradients(self.ranks)
        return float(self.optimizer.gradient_norm()) / self.loss_scale.value

    def _gradient_norm_again(self) -> float:
        """After an overflow: the same calls backward once more, under the factor of now."""
        self.optimizer.zero_gradients()
        for call in self._calls:
            for batch in self.pack(call.samples, is_updating=True):
                self._backward(batch, call)
        return self._gradient_norm()

    def _knows_old_logprobs(self, samples: Sequence[Sample]) -> bool:
        """Whether the contract says that the trainer's log-probs are those recorded: all of them
        sampled by the version in training."""
        if self.contract is None:
            return False
        versions = [s.columns["policy_version"][s.loss_mask] for s in samples]
        return all((found == self.version).all() for found in versions)

    def _score_by_reference(self, samples: Sequence[Sample]) -> None:
        if self.reference is None and self.model.lora is not None:
            with adapter_off(self.model):
                self.forward(samples, column="reference_logprobs", model=self.model)
            return
        if self.reference is None:
            raise ConfigError(
                "objective.kl_coef is above 0, and this trainer has no reference policy: give "
                "Trainer(reference=...), a frozen copy of the policy."
            )
        self.forward(samples, column="reference_logprobs", model=self.reference)

    def _check_correction(
        self, samples: Sequence[Sample], objective: ObjectiveConfig, correction: Correction
    ) -> None:
        correction.check_updates(self.config.updates_per_batch)
        if self.contract is not None:
            check_rows(self.contract, ((s.id, s.fingerprints) for s in samples if s.num_trained))
        if correction.anchor == "on_policy":
            check_versions(samples, self.version)
        column = BEHAVIOUR[correction.behaviour]
        reads = correction.changes_tokens or (
            correction.anchor == "rollout" and objective.reads_old_logprobs
        )
        for sample in samples:
            if reads and column not in sample.columns:
                raise AlignmentError(
                    f"sample {sample.id} has no {column}, which correction.anchor="
                    f"{correction.anchor} with level={correction.level} reads. "
                    "Correction(anchor='recomputed') needs no log-probs of the sampler."
                )

    def _name_bad_gradients(self) -> str:
        """Looks for the rows whose own gradient is not finite, halving the batch; costs up to two
        more passes over it, once in a bad while."""
        found = "the gradient is not finite"
        parts = [local_part(p.detach()) for p in self.model.parameters()]
        has_bad_weights = not all(bool(torch.isfinite(p).all()) for p in parts)
        if self.ranks is not None:
            has_bad_weights = any(self.ranks.gather(has_bad_weights))
        if has_bad_weights:
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
        for batch in self.pack(chosen, is_updating=True):
            self._backward(batch, call)
        return not np.isfinite(self._gradient_norm())


def check_same_shapes(directory: Path, expected: ModelConfig | FallbackConfig) -> None:
    """Raises CheckpointError naming every setting in which the model saved there differs."""
    saved = type(expected).from_directory(directory)
    differing = [
        f"{f.name} is {getattr(saved, f.name)} there and {getattr(expected, f.name)} here"
        for f in fields(expected)
        if getattr(saved, f.name) != getattr(expected, f.name)
    ]
    if differing:
        raise CheckpointError(f"{directory} holds another model: {'; '.join(differing)}.")


def _is_fixed(objective: ObjectiveConfig, correction: Correction) -> bool:
    """Whether the loss's gradient is the same at any log-probs: without a ratio, or with one that
    is 1 by definition; with the entropy, whose coefficient is constant, but no reference KL."""
    is_one = not objective.has_ratio or correction.anchor == "on_policy"
    return is_one and not objective.kl_coef and not correction.changes_tokens


def _weighed(out: TokenLoss, kept: Kept) -> Tensor:
    """[K]: the correction's weights on the policy loss, and the regularizer."""
    if out.loss.shape != kept.tokens.logprobs.shape:
        raise AlignmentError(
            f"the loss gave {list(out.loss.shape)} values for "
            f"{list(kept.tokens.logprobs.shape)} trained tokens: a loss gives one per token, and "
            "the trainer sums them."
        )
    loss = out.loss if kept.weights is None else out.loss * kept.weights
    return loss if out.regularizer is None else loss + out.regularizer


def _keep(
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


def read_counters(path: Path) -> Mapping[str, Any]:
    """What `save` left in JSON. Raises CheckpointError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). A torn copy?") from error


def read_optimizer(path: Path) -> dict[str, Tensor]:
    """`Optimizer.state_tensors` of a checkpoint. Raises CheckpointError."""
    try:
        return load_file(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}). A torn copy?") from error
