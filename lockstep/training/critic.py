"""The critic in training: `values`, `forward_backward`, `optim_step`, `update`, `save`, `load`.

    critic = Critic(load_value_model(path), CriticConfig(lr=1e-3), TrainerConfig(), like=path)
    rows = rows_for_training(groups, GAE(), critic=critic)     # fills values, advantages, returns
    metrics = critic.update(rows)

A value stands at the token that follows its state: `values[t]` is what the critic says before token
t is drawn, at the place where the policy predicts it.

# T packed tokens  N trained tokens  R rows
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, CheckpointError
from lockstep.models.critic import ValueModel, load_value_weights, save_value_model
from lockstep.models.sequence_parallel import SequenceParallel
from lockstep.models.sharding import let_go
from lockstep.objectives.values import explained_variance, value_loss
from lockstep.store.files import write_json
from lockstep.training.config import CriticConfig, TrainerConfig
from lockstep.training.loss_scale import LossScale
from lockstep.training.optimizer import Optimizer, freeze, lr_share
from lockstep.training.packing import (
    PackedBatch,
    budget_for_ranks,
    check_readable,
    pack,
    plan_microbatches,
    unpack_over_ranks,
)
from lockstep.training.trainer import check_same_shapes, read_counters, read_optimizer
from lockstep.types import Float32Array, Sample

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

Tensor = torch.Tensor
Metrics = dict[str, float]

CRITIC = "critic"
"""The directory of a checkpoint that holds the critic, with these in it:"""
MODEL, OPTIMIZER, STATE = "model", "optimizer.safetensors", "critic.json"

_log = logging.getLogger(__name__)


class Critic:
    """One model of values, its optimizer and their counters. It shares nothing with the policy."""

    def __init__(
        self,
        model: ValueModel,
        config: CriticConfig,
        trainer: TrainerConfig,
        *,
        like: str | Path,
        total_updates: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """trainer: the policy's settings, which hold where `config` says nothing else.

        like: the checkpoint directory whose config and tokenizer files `save` copies.
        total_updates: of the run; a schedule that falls needs it. Raises ConfigError without.
        ranks: the processes that train together; every method is then called by all of them, with
        the same rows. The model's `body` may be sharded over them (`models.sharding.shard`).
        """
        self.model = model
        self.ranks = ranks
        self._sequence = None
        if ranks is not None and ranks.sequence_group is not None:
            self._sequence = SequenceParallel(ranks.sequence_group)
        self.clip = config.clip
        self.config = config.trainer(trainer)
        model.body.recomputes_blocks = self.config.recompute == "blocks"
        self.like = Path(like)
        self.total_updates = total_updates
        model.body.recomputes_blocks = trainer.recompute == "blocks"
        freeze(model.named_parameters(), config.freeze, setting="critic.freeze")
        self.optimizer = Optimizer(model.named_parameters(), self.config)
        self.loss_scale = LossScale.for_training(self.config.loss_scale, model.body.embedding.dtype)
        self._calls: list[Sequence[Sample]] = []
        """Rows whose gradients were collected since the last update."""
        self.num_updates = 0
        """Updates asked for, the skipped ones included: the place in the schedule."""
        self.num_skipped = 0
        self.last_skip = ""
        """Why the last update was skipped; empty if it was made."""
        self._is_bad = False
        self._num_tokens = 0
        lr_share(config.warmup_updates, self.config, total_updates=total_updates)

    # -- the verbs ------------------------------------------------------------------------------

    def values(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """[T] float32 per sample: the value before each trained token, NaN where none is trained.

        Kept in the samples as `values`. No gradient. The micro-batches are those of
        `forward_backward` on the same samples, so the first update begins from the same bits.
        """
        with torch.no_grad():
            parts = [(batch, self._values(batch)) for batch in self.pack(samples)]
        let_go(self.model.body)
        out = unpack_over_ranks(samples, parts, ranks=self.ranks)
        for sample, values in zip(samples, out, strict=True):
            sample.set("values", values)
        return out

    def values_at_end(self, samples: Sequence[Sample]) -> npt.NDArray[np.float32]:
        """[R] float32: the value of the state after each sample's last token. No gradient."""
        # One more token to be predicted at the last one; what it is, is never read.
        ends = [
            Sample(
                id=sample.id,
                token_ids=np.append(sample.token_ids, np.int32(0)),
                loss_mask=np.append(np.zeros(len(sample), np.bool_), True),
            )
            for sample in samples
        ]
        with torch.no_grad():
            parts = [(batch, self._values(batch)) for batch in self.pack(ends, num_unread=1)]
        let_go(self.model.body)
        out = unpack_over_ranks(ends, parts, ranks=self.ranks)
        return np.array([row[-1] for row in out], np.float32)

    def forward_backward(self, samples: Sequence[Sample]) -> Metrics:
        """Adds the gradient of the value loss over `samples` to what `optim_step` will use.

        Reads the columns `values` (before the batch) and `returns`. The mean is over all trained
        tokens of the call, whatever its micro-batches.
        """
        for name in ("values", "returns"):
            for sample in samples:
                if name not in sample.columns:
                    raise AlignmentError(
                        f"sample {sample.id} has no {name}: the critic learns from rows that "
                        "rows_for_training(..., critic=...) has made with advantage=gae."
                    )
        self._calls.append(samples)
        num_trained = sum(sample.num_trained for sample in samples)
        num_tokens = max(num_trained, 1)
        sums = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        for batch in self.pack(samples):
            values = self._values(batch)
            if batch.is_filler:  # the others wait for its part in their gradients
                values.backward(torch.zeros_like(values))
                self.optimizer.collect_gradients()
                continue
            out = value_loss(
                values, batch.columns["values"], batch.columns["returns"], clip=self.clip
            )
            (out.loss.sum() / num_tokens * self.loss_scale.value).backward()
            self.optimizer.collect_gradients()
            sums += torch.stack(
                [
                    out.loss.detach().sum(dtype=torch.float64),
                    out.mean["clip_fraction"].sum(dtype=torch.float64),
                ]
            )
        if self.ranks is not None:
            self.ranks.sum_data(sums)
        self._num_tokens += num_trained
        loss, clipped = (sums / num_tokens).tolist()
        self._is_bad |= not np.isfinite(loss)
        return {"critic/loss": loss, "critic/clip_fraction": clipped}

    def optim_step(self) -> Metrics:
        """One update by the gradients collected so far, or none if any of it is not finite.

        A skipped update leaves weights and optimizer state as they are and says why in `last_skip`.
        """
        lr = self.config.lr * lr_share(
            self.num_updates, self.config, total_updates=self.total_updates
        )
        norm = self._gradient_norm()
        while not (self._is_bad or np.isfinite(norm)) and self.loss_scale.lower():
            norm = self._gradient_norm_again()
        self.last_skip = ""
        if not self._num_tokens:
            self.last_skip = "no token to learn a value of since the last update"
        elif self._is_bad or not np.isfinite(norm):
            self.last_skip = "the value loss or its gradient is not finite"
        if self.last_skip:
            self.num_skipped += 1
            _log.warning("critic update %d skipped: %s", self.num_updates, self.last_skip)
            self.optimizer.zero_gradients()
        else:
            clip = self.config.grad_clip
            share = clip / norm if 0 < clip < norm else 1.0
            self.optimizer.step(lr=lr, gradient_scale=share / self.loss_scale.value)
            self.loss_scale.made_update()
        self.num_updates += 1
        self._is_bad, self._num_tokens = False, 0
        self._calls.clear()
        metrics = {
            "critic/grad_norm": norm,
            "critic/lr": lr,
            "critic/skipped_updates": float(bool(self.last_skip)),
        }
        return metrics | self.loss_scale.to_metrics("critic")

    def update(self, samples: Sequence[Sample]) -> Metrics:
        """All updates of one batch, each on all of its rows.

        Metrics are means over the updates (sums of counts). What is said of values and returns is
        said of the values before the first, which the advantages were made of.
        """
        parts = [
            self.forward_backward(samples) | self.optim_step()
            for _ in range(self.config.updates_per_batch)
        ]
        out = {name: float(np.mean([part[name] for part in parts])) for name in parts[0]}
        for name in {"critic/skipped_updates", "critic/overflows"} & out.keys():
            out[name] = sum(part[name] for part in parts)
        return out | _describe_values(samples)

    def save(self, directory: str | Path) -> None:
        """Writes model (Hugging Face form), optimizer and counters into `directory`: the same files
        whatever the number of ranks. Rank 0 writes them."""
        directory = Path(directory)
        is_writer = self.ranks is None or self.ranks.is_leader
        if is_writer:
            directory.mkdir(parents=True, exist_ok=True)
        save_value_model(self.model, directory / MODEL, like=self.like, is_writer=is_writer)
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.optimizer.stream_state():
            if is_writer:
                tensors[name] = tensor.contiguous().cpu()
        if not is_writer:
            return
        save_file(tensors, str(directory / OPTIMIZER))
        counters = {"num_updates": self.num_updates, "num_skipped": self.num_skipped}
        write_json(directory / STATE, counters | self.loss_scale.state())

    def load(self, directory: str | Path, *, weights_only: bool = False) -> None:
        """Continues what `save` wrote: the next update gives the same bits as without a stop.

        weights_only: the model alone, with a fresh optimizer. Raises CheckpointError if there is no
        critic, or one of another shape, before anything is changed.
        """
        directory = Path(directory)
        if not (directory / MODEL).is_dir():
            raise CheckpointError(
                f"{directory.parent} has no critic: it was not written with advantage=gae."
            )
        check_same_shapes(directory / MODEL, self.model.config)
        counters = {"num_updates": 0, "num_skipped": 0}
        if not weights_only:
            counters = read_counters(directory / STATE)
            tensors = read_optimizer(directory / OPTIMIZER)
            self.optimizer.load_state_tensors(tensors, where=str(directory / OPTIMIZER))
        load_value_weights(self.model, directory / MODEL)
        self.optimizer.read_parameters()
        if weights_only:
            self.optimizer = Optimizer(self.model.named_parameters(), self.config)
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.loss_scale.load(counters)
        self.last_skip, self._is_bad, self._num_tokens = "", False, 0

    # -- mechanism ------------------------------------------------------------------------------

    def _gradient_norm(self) -> float:
        if self.ranks is not None:
            self.optimizer.sum_gradients(self.ranks)
        return float(self.optimizer.gradient_norm()) / self.loss_scale.value

    def _gradient_norm_again(self) -> float:
        """After an overflow: the same rows backward once more, under the factor of now."""
        self.optimizer.zero_gradients()
        calls, self._calls = self._calls, []
        for samples in calls:
            self.forward_backward(samples)
        return self._gradient_norm()

    def pack(self, samples: Sequence[Sample], *, num_unread: int = 0) -> list[PackedBatch]:
        """This rank's micro-batches of `samples`, as the policy's trainer cuts them.

        num_unread: tokens at each row's end that are no input, and take no room.
        """
        check_readable(
            samples,
            vocab_size=self.model.config.vocab_size,
            max_positions=self.model.config.max_positions + num_unread,
        )
        rank, num_ranks = 0, 1
        if self.ranks is not None:
            rank, num_ranks = self.ranks.data_rank, self.ranks.data_size
        max_tokens = self.config.max_tokens_per_microbatch + num_unread
        plan = plan_microbatches(samples, budget_for_ranks(samples, max_tokens, num_ranks))
        return pack(samples, plan, device=self.model.device, rank=rank, num_ranks=num_ranks)

    def _values(self, batch: PackedBatch) -> Tensor:
        """[N] float32: the value at each place where a trained token is predicted."""
        run = self.model if self._sequence is None else partial(self._sequence.values, self.model)
        return run(batch.ids, batch.positions, batch.context, states_N=batch.predictors)


def _describe_values(samples: Sequence[Sample]) -> Metrics:
    values, returns = (
        torch.from_numpy(np.concatenate([s.columns[name][s.loss_mask] for s in samples]))
        for name in ("values", "returns")
    )
    out = {
        "critic/value_mean": float(values.double().mean()),
        "critic/return_mean": float(returns.double().mean()),
    }
    explained = explained_variance(values, returns, Layout.one_row(len(values)))
    return out if explained is None else out | {"critic/explained_variance": explained}
