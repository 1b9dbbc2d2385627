"""One model in training, as a client of Tinker's API drives it.

A call adds the gradient of a loss to those before it, and an update applies them. A target may be
any id, or several ids for one position, so rows are packed here by their own targets;
`training/trainer.py` has the same forward. Under the ops of a contract, log-probs of sampled tokens
equal the log-probs that the embedded engine recorded, bit for bit.

# T distinct tokens of a micro-batch  D model width  P positions of its datums, shared or not
# K most targets of a position  M targets that count, in the order of the datums
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora_config import GROUPS, Group, LoraConfig, lora_sites
from lockstep.objectives.losses import TokenBatch
from lockstep.ops.context import PackedContext, take_rows
from lockstep.tinker.graph import GraphLoss
from lockstep.tinker.losses import Loss, Sums, loss_of
from lockstep.tinker.requests import (
    TARGETS,
    Datum,
    ForwardBackward,
    ForwardBackwardResult,
    ModelSpec,
    OptimStep,
    invalid,
)
from lockstep.training.config import TrainerConfig
from lockstep.training.forest import plan_forest, share_beginnings
from lockstep.training.learner import Learner

Tensor = torch.Tensor

ALPHA = 32.0
"""Scale of an adapter times its rank. The wire does not carry it; other servers take the same."""


def adapter_config(spec: ModelSpec, model: ModelConfig) -> LoraConfig | None:
    """Settings of the adapter that a client asks for; None trains the whole model (rank 0).

    The output projection has no adapter here, whatever `train_unembed` says: it is tied to the
    embedding in most small models, and the client asks for it by default. Raises TinkerError if
    nothing is left to train.
    """
    if not spec.rank:
        return None
    mlp = spec.train_mlp
    asked: dict[Group, bool] = {"attention": spec.train_attn, "mlp": mlp, "experts": mlp}
    present = {site.group for site in lora_sites(model)}
    targets = tuple(group for group in GROUPS if group in present and asked[group])
    if not targets:
        raise invalid(
            "train_attn and train_mlp are both false, and train_unembed alone adapts nothing here. "
            "Set one of them."
        )
    return LoraConfig(rank=spec.rank, alpha=ALPHA, targets=targets)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Batch:
    """The whole datums of one micro-batch; common beginnings are computed once."""

    data: Mapping[int, Datum]
    """Index in the call -> datum."""
    ids: Tensor
    positions: Tensor
    context: PackedContext
    predictors: Tensor
    """[P] int64 into T: datum after datum, each position."""
    targets: Tensor
    """[P, K] int64, 0 past a position's own targets."""
    entries: Tensor
    """[M] int64 into P * K: the targets that count."""
    row: Tensor
    """[M] int64: number of the datum within the micro-batch."""
    columns: Mapping[str, Tensor]
    """[M] float32 each: the inputs of the loss."""


class TinkerLearner(Learner):
    """A decoder, its optimizer and the gradients collected since the last update.

    What the decoder trains is what requires a gradient: an adapter, or all of it. A checkpoint is
    the adapter in PEFT's form, or the whole model in Hugging Face's; its folder `training` has what
    only training reads.
    """

    role = setting = "tinker"
    state_folder, state_file = "training", "counters.json"
    why_untrained = "none had a weight or an advantage"
    scales_loss = False

    def __init__(
        self, decoder: Decoder, *, like: str | Path, config: TrainerConfig | None = None
    ) -> None:
        """like: directory of the base model, whose config and tokenizer `save` refers to.

        config: its micro-batches, recompute, offload and moments are read; what an update needs is
        on the wire.
        """
        own = replace(config or TrainerConfig(), freeze=(), schedule="constant", warmup_updates=0)
        own.check_device(decoder.embedding.device.type)
        super().__init__(decoder, own, like=like)

    def forward_backward(self, request: ForwardBackward) -> ForwardBackwardResult:
        """Adds the gradient of a summed loss to what the next update applies.

        Every target is scored, in every request; only targets with a weight or an advantage reach
        the backward pass. A request is checked whole before anything is computed. If computing it
        fails all the same, the collected gradients are dropped, and the next update is not made.
        """
        loss: Loss | GraphLoss = request.custom or loss_of(request.loss, request.config)
        for index, datum in enumerate(request.data):
            loss.check(index, datum)
        totals, logprobs = Sums(), dict[int, npt.NDArray[np.float32]]()
        inputs = {i: datum.token_ids for i, datum in enumerate(request.data)}
        lengths = {i: len(datum) for i, datum in enumerate(request.data)}
        parts = plan_forest(inputs, lengths, self.config.max_tokens_per_microbatch)
        try:
            for part in parts:
                batch = self._pack_data({row: request.data[row] for row in part.rows}, loss)
                logprobs |= self._run(batch, loss, totals, is_forward_only=request.is_forward_only)
        except BaseException as error:
            self._drop_gradients()
            self._bad_loss = f"a forward_backward failed before it had ended ({error})"
            raise
        scored = tuple(logprobs[i] for i in inputs)
        return ForwardBackwardResult(logprobs=scored, metrics=totals.to_metrics())

    def apply(self, step: OptimStep) -> dict[str, float]:
        """One update of AdamW by the collected gradients, which are then dropped.

        No update is made if a gradient is not finite or there is none; the log and `last_skip` say
        why, and `skipped:sum` is 1.
        """
        betas = step.beta1, step.beta2
        self.optimizer.configure(betas=betas, eps=step.eps, weight_decay=step.weight_decay)
        norm = self._update(lr=step.learning_rate, clip=step.grad_clip_norm)
        metrics = {"skipped:sum": float(bool(self.last_skip))}
        return metrics | ({"grad_norm:mean": norm} if math.isfinite(norm) else {})

    # -- mechanism --------------------------------------------------------------------------------

    def _pack_data(self, data: Mapping[int, Datum], loss: Loss | GraphLoss) -> _Batch:
        chosen = list(data.values())
        index, ids, positions = share_beginnings([datum.token_ids for datum in chosen])
        targets = [datum.inputs[TARGETS].reshape(len(datum), -1) for datum in chosen]
        width = max(of_row.shape[1] for of_row in targets)
        is_own = np.concatenate(
            [np.broadcast_to(np.arange(width) < t.shape[1], (len(t), width)) for t in targets]
        )
        padded = np.zeros(is_own.shape, np.int64)
        padded[is_own] = np.concatenate([of_row.ravel() for of_row in targets])

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

        return _Batch(
            data=data,
            ids=tensor(ids).long(),
            positions=tensor(positions),
            context=PackedContext.of_rows(index, device=self.device),
            predictors=tensor(np.concatenate(index)),
            targets=tensor(padded),
            entries=tensor(np.flatnonzero(is_own)),
            row=tensor(np.repeat(np.arange(len(chosen)), [of_row.size for of_row in targets])),
            columns={name: tensor(values) for name, values in loss.columns_of(chosen).items()},
        )

    def _run(
        self, batch: _Batch, loss: Loss | GraphLoss, totals: Sums, *, is_forward_only: bool
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Forward of a micro-batch, and backward if it is wanted. Returns the log-probs of each
        datum, in the shape of its targets."""
        is_live_M = loss.is_live(batch.columns, like=batch.entries)
        is_trained = not is_forward_only and bool(is_live_M.any())
        with torch.set_grad_enabled(is_trained):
            logprobs_M, entropy_M = self._score(batch, is_live_M)
            tokens = TokenBatch(
                logprobs=logprobs_M,
                entropy=entropy_M,
                columns=batch.columns,
                row=batch.row,
                num_rows=len(batch.data),
            )
            total = loss.summed(tokens, batch.data, totals)
        if is_trained:  # a custom loss may be a constant
            self._run_backward(total if total.requires_grad else None, logprobs_M)
            self._num_kept += int(is_live_M.sum())
        found, at = dict[int, npt.NDArray[np.float32]](), 0
        values = logprobs_M.detach().cpu().numpy()
        for row, datum in batch.data.items():
            targets = datum.inputs[TARGETS]
            part = values[at : (at := at + targets.size)]
            if not (is_forward_only or self._bad_loss or np.isfinite(part).all()):
                bad = int(np.argmin(np.isfinite(part)))
                self._bad_loss = f"datum {row} of a forward_backward has the log-prob {part[bad]}"
                self._bad_loss += f" at target {bad}"
            found[row] = part.reshape(targets.shape)
        return found

    def _score(self, batch: _Batch, is_live_M: Tensor) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy), each [M] float32. Positions without a live target are scored without
        a gradient: in a dialogue most of them belong to the prompt."""
        hidden_TD = self.decoder(batch.ids, batch.positions, batch.context)
        width = batch.targets.shape[1]
        is_live_P = torch.zeros(len(batch.targets), dtype=torch.bool, device=hidden_TD.device)
        is_live_P[batch.entries[is_live_M] // width] = True
        live, idle = is_live_P.nonzero()[:, 0], (~is_live_P).nonzero()[:, 0]
        found: list[tuple[Tensor, Tensor]] = []
        for places, has_grad in ((live, torch.is_grad_enabled()), (idle, False)):
            with torch.set_grad_enabled(has_grad):
                hidden = take_rows(hidden_TD, batch.predictors[places])
                found.append(self.decoder.log_probs(hidden, batch.targets[places]))
        order_P = torch.cat([live, idle]).argsort()
        logprobs_PK, entropy_P = (
            torch.cat(x).index_select(0, order_P) for x in zip(*found, strict=True)
        )
        entropy_M = entropy_P.detach().index_select(0, batch.entries // width)
        return logprobs_PK.flatten().index_select(0, batch.entries), entropy_M
