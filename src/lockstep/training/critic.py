"""The critic in training: `values`, `forward_backward`, `optim_step`, `update`, `save`, `load`.

    critic = Critic(load_value_model(path), CriticConfig(lr=1e-3), TrainerConfig(), like=path)
    rows = rows_for_training(groups, GAE(), critic=critic)     # fills values, advantages, returns
    metrics = critic.update(rows)

A value belongs to the token that follows its state: `values[t]` is the critic's estimate before
token t is drawn, at the place where the policy predicts it.

# N trained tokens  R rows
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction.layout import Layout
from lockstep.errors import AlignmentError, CheckpointError
from lockstep.models import sequence_parallel
from lockstep.models.critic import ValueModel, load_value_weights, save_value_model
from lockstep.models.sharding import reshard
from lockstep.objectives.losses import explained_variance, value_loss
from lockstep.training.config import CriticConfig, TrainerConfig
from lockstep.training.learner import Learner, Metrics, check_same_shapes
from lockstep.training.packing import PackedBatch, unpack_rows
from lockstep.training.totals import merge_metrics
from lockstep.types import Float32Array, Sample

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

Tensor = torch.Tensor

CRITIC = "critic"
"""Directory of a checkpoint that holds the critic."""
MODEL = "model"


class Critic(Learner):
    """One model of values in training. It shares nothing with the policy."""

    role, setting, state_file = "critic", "critic", "critic.json"

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
        """trainer: the policy's settings, used where `config` has none of its own. like,
        total_updates, ranks: see `Learner`. The model's `body` may be sharded over the ranks."""
        settings = config.trainer(trainer)
        super().__init__(model, settings, like=like, total_updates=total_updates, ranks=ranks)
        self.model, self.clip = model, config.clip

    # -- the verbs ------------------------------------------------------------------------------

    def values(self, samples: Sequence[Sample]) -> list[Float32Array]:
        """[T] float32 per sample: the value before each trained token, NaN where none is trained.

        The samples keep them as `values`. No gradient. `forward_backward` makes the same
        micro-batches from these samples, so the first update begins from the same bits.
        """
        out = self._values_of(samples)
        for sample, values in zip(samples, out, strict=True):
            sample.set("values", values)
        return out

    def values_at_end(self, samples: Sequence[Sample]) -> npt.NDArray[np.float32]:
        """[R] float32: the value of the state after each sample's last token. No gradient."""
        # One more token is predicted at the last one; its id is never read.
        ends = [
            Sample(
                id=sample.id,
                token_ids=np.append(sample.token_ids, np.int32(0)),
                loss_mask=np.append(np.zeros(len(sample), np.bool_), True),
            )
            for sample in samples
        ]
        return np.array([row[-1] for row in self._values_of(ends, num_unread=1)], np.float32)

    def forward_backward(self, samples: Sequence[Sample]) -> Metrics:
        """Adds the gradient of the value loss over `samples` to what `optim_step` will use.

        Reads the columns `values` (from before the batch) and `returns`. The mean is over all
        trained tokens of the call, whatever its micro-batches.
        """
        for name in ("values", "returns"):
            for sample in samples:
                if name not in sample.columns:
                    raise AlignmentError(
                        f"sample {sample.id} has no {name}: the critic learns from rows that "
                        "rows_for_training(..., critic=...) has made with advantage=gae."
                    )
        num_trained = sum(sample.num_trained for sample in samples)
        num_tokens = max(num_trained, 1)
        backward = partial(self._backward, num_tokens=num_tokens)
        self._passes.append((samples, backward))
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in self.pack(samples):
            sums += backward(batch)
        if self.ranks is not None:
            self.ranks.sum_data(sums)
        self._num_kept += num_trained
        loss, clipped = (sums / num_tokens).tolist()
        if not np.isfinite(loss):
            self._bad_loss = "the value loss is not finite"
        return {"critic/loss": loss, "critic/clip_fraction": clipped}

    def update(self, samples: Sequence[Sample]) -> Metrics:
        """All updates of one batch, each on all of its rows.

        Metrics are means over the updates (sums of counts). Those of values and returns describe
        the values before the first update, which the advantages were computed from.
        """
        parts = [
            self.forward_backward(samples) | self.optim_step()
            for _ in range(self.config.updates_per_batch)
        ]
        return merge_metrics(parts) | _describe_values(samples)

    # -- mechanism ------------------------------------------------------------------------------

    def _values_of(self, samples: Sequence[Sample], *, num_unread: int = 0) -> list[Float32Array]:
        with torch.no_grad():
            batches = self._pack(samples, num_unread=num_unread)
            parts = [(batch, self._values(batch)) for batch in batches]
        reshard(self.decoder)
        return unpack_rows(samples, parts, ranks=self.ranks)

    def _values(self, batch: PackedBatch) -> Tensor:
        """[N] float32: the value at each place where a trained token is predicted."""
        run = self.model
        if self._split_over is not None:
            run = sequence_parallel.SplitModel(self.model, self._split_over).values
        return run(batch.ids, batch.positions, batch.context, states_N=batch.predictors)

    def _backward(self, batch: PackedBatch, *, num_tokens: int) -> Tensor:
        """[2] float64: the sums of loss and clipped tokens. num_tokens: of the whole call."""
        values = self._values(batch)
        if batch.is_filler:
            self._run_backward(None, values)
            return torch.zeros(2, dtype=torch.float64, device=self.device)
        out = value_loss(values, batch.columns["values"], batch.columns["returns"], clip=self.clip)
        self._run_backward(out.loss.sum() / num_tokens, values)
        clipped = out.mean["clip_fraction"]
        return torch.stack([x.sum(dtype=torch.float64) for x in (out.loss.detach(), clipped)])

    def _save_model(self, directory: Path) -> None:
        save_value_model(self.model, directory / MODEL, like=self.like, is_writer=self.is_writer)

    def _check_saved(self, directory: Path) -> None:
        if not (directory / MODEL).is_dir():
            raise CheckpointError(f"{directory.parent} has no critic, which advantage=gae writes.")
        check_same_shapes(directory / MODEL, self.model.config)

    def _load_model(self, directory: Path) -> None:
        load_value_weights(self.model, directory / MODEL)


def _describe_values(samples: Sequence[Sample]) -> Metrics:
    values, returns = (
        torch.from_numpy(np.concatenate([s.columns[name][s.loss_mask] for s in samples]))
        for name in ("values", "returns")
    )
    out = {
        "critic/value_mean": float(values.double().mean()),
        "critic/return_mean": float(returns.double().mean()),
    }
    explained = explained_variance(values, returns, Layout.packed([len(values)]))
    return out if explained is None else out | {"critic/explained_variance": explained}
