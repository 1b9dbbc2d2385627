"""One model in training, as a client of Tinker's API drives it.

A call adds the gradient of a loss to those before it, and `optim_step` applies them. A target may
be any id, or several ids for one position, so rows are packed here by their own targets;
`training/trainer.py` has the same forward. Under the ops of a contract, log-probs of sampled tokens
equal the log-probs that the embedded engine recorded, bit for bit.

# T distinct tokens of a micro-batch  D model width  P positions of its datums, shared or not
# K most targets of a position  M targets that count, in the order of the datums
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import CheckpointError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora_config import GROUPS, Group, LoraConfig, lora_sites
from lockstep.models.peft_io import check_policy, load_policy, save_policy
from lockstep.models.tensor_file import read_header, write_tensors
from lockstep.objectives.losses import TokenBatch
from lockstep.ops.context import PackedContext, take_rows
from lockstep.store.files import write_json
from lockstep.tinker.graph import GraphLoss
from lockstep.tinker.losses import (
    Loss,
    Sums,
    check_datum,
    has_gradient,
    loss_of,
    sum_loss,
)
from lockstep.tinker.requests import (
    TARGETS,
    Datum,
    ForwardBackward,
    ForwardBackwardResult,
    ModelSpec,
    OptimStep,
    TinkerError,
    invalid,
)
from lockstep.training.config import TrainerConfig
from lockstep.training.forest import plan_forest, share_beginnings
from lockstep.training.learner import check_same_shapes
from lockstep.training.optimizer import Optimizer

Tensor = torch.Tensor

ALPHA = 32.0
"""Scale of an adapter times its rank. The wire does not carry it; other servers take the same."""

STATE = "training"
"""Folder of a checkpoint with what only training reads: the optimizer's state and counters."""
OPTIMIZER, COUNTERS = "optimizer.safetensors", "counters.json"

_log = logging.getLogger(__name__)


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
    return LoraConfig(rank=spec.rank, alpha=ALPHA, targets=targets, seed=spec.seed or 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Batch:
    """The whole datums of one micro-batch; common beginnings are computed once."""

    rows: list[int]
    """Index of each datum in the call."""
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
    """[M] int64: index into `rows`."""
    sizes: list[int]
    """Targets of each datum, M in all."""
    columns: Mapping[str, Tensor]
    """[M] float32 each: the inputs of the loss."""


class TinkerLearner:
    """A decoder, its optimizer and the gradients collected since the last update.

    What the decoder trains is what requires a gradient: an adapter, or all of it. Parameters are
    updated in place, so an engine in this process can run the same ones.
    """

    def __init__(
        self, decoder: Decoder, *, like: str | Path, config: TrainerConfig | None = None
    ) -> None:
        """like: directory of the base model, whose config and tokenizer `save` refers to.

        config: its micro-batches, recompute and offload are read; what an update needs is on the
        wire.
        """
        self.decoder, self.like = decoder, Path(like)
        self.config = config or TrainerConfig()
        self.config.check_device(decoder.embedding.device.type)
        decoder.recomputes_blocks = self.config.recompute == "blocks"
        self.optimizer = Optimizer(decoder.named_parameters(), self.config)
        self.num_updates = 0
        """Updates made: the version of the model."""
        self.num_skipped = 0
        self.last_skip = ""
        """Why the last update was not made; empty if it was."""
        self._drop_gradients()

    def forward_backward(
        self, request: ForwardBackward, *, custom: GraphLoss | None = None
    ) -> ForwardBackwardResult:
        """Adds the gradient of a summed loss to what the next `optim_step` applies.

        custom: the loss that the setting `loss_id` names, with loss=custom. Every target is scored,
        in every request; only targets with a weight or an advantage reach the backward pass. A
        request is checked whole before anything is computed. If computing it fails all the same,
        the collected gradients are dropped, and the next update is not made.
        """
        loss = self._check(request, custom)
        totals, outputs = Sums(), list[Mapping[str, npt.NDArray[Any]]]([{}] * len(request.data))
        inputs = {i: datum.token_ids for i, datum in enumerate(request.data)}
        lengths = {i: len(datum) for i, datum in enumerate(request.data)}
        plan = plan_forest(inputs, lengths, self.config.max_tokens_per_microbatch)
        try:
            for rows in plan.rows:
                batch = self._pack(request.data, rows, loss)
                logprobs_M = self._run(batch, request, loss, custom, totals)
                parts = logprobs_M.cpu().numpy()
                for row, part in zip(
                    rows, np.split(parts, np.cumsum(batch.sizes)[:-1]), strict=True
                ):
                    shape = request.data[row].inputs[TARGETS].shape
                    outputs[row] = {"logprobs": part.reshape(shape)}
                    self._note_bad(row, part, request)
        except BaseException as error:
            self._drop_gradients()
            self._fault = f"a forward_backward failed before it had ended ({error})"
            raise
        return ForwardBackwardResult(outputs=tuple(outputs), metrics=totals.to_metrics())

    def optim_step(self, step: OptimStep) -> dict[str, float]:
        """One update of AdamW by the collected gradients, which are then dropped.

        No update is made if a gradient is not finite or there is none; the log and `last_skip` say
        why, and `skipped:sum` is 1.
        """
        norm = float(self.optimizer.gradient_norm())
        self.last_skip = self._fault
        if not self._fault and not self._num_trained:
            self.last_skip = "no token has had a weight or an advantage since the last update"
        elif not self._fault and not math.isfinite(norm):
            self.last_skip = "the gradient is not finite"
        metrics = {"skipped:sum": float(bool(self.last_skip))}
        if math.isfinite(norm):
            metrics["grad_norm:mean"] = norm
        if self.last_skip:
            _log.warning("update %d is not made: %s", self.num_updates, self.last_skip)
            self.num_skipped += 1
        else:
            betas, clip = (step.beta1, step.beta2), step.grad_clip_norm
            self.optimizer.configure(betas=betas, eps=step.eps, weight_decay=step.weight_decay)
            scale = clip / norm if 0 < clip < norm else 1.0
            self.optimizer.step(lr=step.learning_rate, gradient_scale=scale)
            self.num_updates += 1
        self._drop_gradients()
        return metrics

    def save(self, directory: str | Path, *, with_optimizer: bool) -> None:
        """Writes the adapter in PEFT's form, or the whole model in Hugging Face's.

        with_optimizer: and, in the folder `training`, the optimizer's state and the counters.
        Gradients that were not applied are not kept.
        """
        root = Path(directory)
        save_policy(self.decoder, root, like=self.like)
        if with_optimizer:
            (root / STATE).mkdir()
            write_tensors(root / STATE / OPTIMIZER, self.optimizer.state_tensors())
            counters = {"num_updates": self.num_updates, "num_skipped": self.num_skipped}
            write_json(root / STATE / COUNTERS, counters)

    def load(self, directory: str | Path, *, with_optimizer: bool) -> None:
        """Takes what `save` wrote, and drops the collected gradients.

        with_optimizer: the next update gives the same bits as without a stop. Otherwise optimizer
        and counters begin anew. Raises TinkerError, before anything is changed, for a checkpoint of
        another model or shape, and for one without the optimizer if that is asked for.
        """
        root = Path(directory)
        if with_optimizer and not (root / STATE / COUNTERS).is_file():
            raise TinkerError(
                "the checkpoint has weights alone, as save_weights_for_sampler writes them. Load "
                "it without the optimizer, or load one of save_weights."
            )
        try:
            check_policy(self.decoder, root, like=self.like)
            if self.decoder.lora is None:
                check_same_shapes(root, self.decoder.config)
            counters = {"num_updates": 0, "num_skipped": 0}
            if with_optimizer:
                counters = json.loads((root / STATE / COUNTERS).read_text())
                tensors = read_header(root / STATE / OPTIMIZER)
                self.optimizer.load_state_tensors(tensors, where=str(root / STATE / OPTIMIZER))
            load_policy(self.decoder, root)
        except CheckpointError as error:
            raise TinkerError(str(error)) from error
        self.optimizer.read_parameters()
        if not with_optimizer:
            self.optimizer = Optimizer(self.decoder.named_parameters(), self.config)
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.last_skip = ""
        self._drop_gradients()

    # -- mechanism --------------------------------------------------------------------------------

    def _check(self, request: ForwardBackward, custom: GraphLoss | None) -> Loss | None:
        """The loss; None for a custom one. Raises TinkerError for a mistake in the request."""
        loss = None if custom is not None else loss_of(request.loss, request.config)
        for index, datum in enumerate(request.data):
            if loss is not None:
                check_datum(index, datum, loss, request.loss)
            elif custom is not None:
                custom.check(index, datum)
        return loss

    def _pack(self, data: Sequence[Datum], rows: list[int], loss: Loss | None) -> _Batch:
        chosen, device = [data[row] for row in rows], self.decoder.embedding.device
        index, ids, positions = share_beginnings([datum.token_ids for datum in chosen])
        targets = [datum.inputs[TARGETS].reshape(len(datum), -1) for datum in chosen]
        width = max(of_row.shape[1] for of_row in targets)
        is_own = np.concatenate(
            [np.broadcast_to(np.arange(width) < t.shape[1], (len(t), width)) for t in targets]
        )
        padded = np.zeros(is_own.shape, np.int64)
        padded[is_own] = np.concatenate([of_row.ravel() for of_row in targets])
        sizes = [of_row.size for of_row in targets]

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        columns: dict[str, Tensor] = {}
        if loss is not None:
            for name in (*loss.inputs, *loss.optional_inputs):
                if any(name in datum.inputs for datum in chosen):
                    found = [
                        datum.inputs[name].ravel()
                        if name in datum.inputs
                        else np.full(size, loss.config[name])
                        for datum, size in zip(chosen, sizes, strict=True)
                    ]
                    columns[name] = tensor(np.concatenate(found, dtype=np.float32))
        return _Batch(
            rows=rows,
            ids=tensor(ids).long(),
            positions=tensor(positions),
            context=PackedContext.of_rows(index, device=device),
            predictors=tensor(np.concatenate(index)),
            targets=tensor(padded),
            entries=tensor(np.flatnonzero(is_own)),
            row=tensor(np.repeat(np.arange(len(rows)), sizes)),
            sizes=sizes,
            columns=columns,
        )

    def _run(
        self,
        batch: _Batch,
        request: ForwardBackward,
        loss: Loss | None,
        custom: GraphLoss | None,
        totals: Sums,
    ) -> Tensor:
        """Forward of a micro-batch, and backward if it is wanted. [M] log-probs, no gradient."""
        is_live_M = torch.ones_like(batch.entries, dtype=torch.bool)
        if loss is not None:
            is_live_M = has_gradient(loss, batch.columns, like=batch.entries)
        is_trained = not request.is_forward_only and bool(is_live_M.any())
        with torch.set_grad_enabled(is_trained):
            logprobs_M, entropy_M = self._score(batch, is_live_M)
            if loss is not None:
                tokens = TokenBatch(
                    logprobs=logprobs_M,
                    entropy=entropy_M,
                    columns=batch.columns,
                    row=batch.row,
                    num_rows=len(batch.rows),
                )
                total = sum_loss(loss, tokens, totals)
            else:
                assert custom is not None, "the service lets no custom loss pass without its graph"
                # On the CPU: its tensors are small, and its operations many.
                total = logprobs_M.new_zeros(()).cpu()
                totals.add("tokens:sum", torch.ones_like(logprobs_M))
                parts = logprobs_M.cpu().split(batch.sizes)
                for row, of_row in zip(batch.rows, parts, strict=True):
                    inputs = request.data[row].inputs
                    found, metrics = custom(of_row.view(inputs[TARGETS].shape), inputs, index=row)
                    total = total + found
                    for name, value in ({"loss:sum": found} | metrics).items():
                        totals.add(name, value)
        if is_trained:
            if total.requires_grad:  # a custom loss may be a constant
                total.backward()
            self.optimizer.collect_gradients()
            self._num_trained += int(is_live_M.sum())
        return logprobs_M.detach()

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

    def _note_bad(
        self, row: int, logprobs: npt.NDArray[np.float32], request: ForwardBackward
    ) -> None:
        """Remembers the first datum whose gradient cannot be finite, for `optim_step`."""
        if not (self._fault or request.is_forward_only or np.isfinite(logprobs).all()):
            at = int(np.argmin(np.isfinite(logprobs)))
            self._fault = f"datum {row} of a forward_backward has the log-prob {logprobs[at]}"
            self._fault += f" at target {at}"

    def _drop_gradients(self) -> None:
        self.optimizer.zero_gradients()
        self._num_trained = 0
        """Targets with a gradient since the last update."""
        self._fault = ""
        """Why the collected gradients must not be applied; empty if they may."""
