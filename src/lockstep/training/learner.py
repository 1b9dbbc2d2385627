"""A model, its optimizer and their counters: what the policy and the critic share in training."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from lockstep.config import read_json
from lockstep.errors import CheckpointError
from lockstep.launch.place import handling_interrupts
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.models.critic import ValueModel
from lockstep.models.decoder import Decoder
from lockstep.models.peft_io import check_policy, load_policy, save_policy
from lockstep.models.sharding import local_part
from lockstep.models.tensor_file import read_header, write_tensors
from lockstep.store.files import write_json
from lockstep.training.config import TrainerConfig
from lockstep.training.expert_load import balance_experts
from lockstep.training.loss_scale import LossScale
from lockstep.training.optimizer import Optimizer, freeze, lr_share
from lockstep.training.packing import PackedBatch, check_readable, pack, plan_microbatches
from lockstep.types import Sample

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

Tensor = torch.Tensor
Metrics = dict[str, float]

OPTIMIZER = "optimizer.safetensors"

MAX_NAMED_ROWS = 3  # rows named as the cause of a skipped update; more would hide the first

_log = logging.getLogger(__name__)


Pass = tuple[Sequence[Sample], Callable[[PackedBatch], object]]
"""One `forward_backward`, so that it can be repeated: its rows, and a function that runs one
micro-batch forward and backward and collects its gradients."""


class Learner:
    """Base of `Trainer` (the policy), `Critic` and `TinkerLearner`: gradients add up call by call,
    and `optim_step` applies them.

    Parameters are updated in place, so an engine in this process can run the same ones.
    """

    role: ClassVar[str]
    """First part of the metric names."""
    setting: ClassVar[str]
    """Name of the settings, for errors."""
    model_folder: ClassVar[str] = ""
    """Folder of a checkpoint with the model; empty: the checkpoint's own."""
    state_folder: ClassVar[str] = ""
    """Folder with the optimizer's state and the counters; empty: the checkpoint's own."""
    state_file: ClassVar[str]
    """JSON file with the counters."""
    why_untrained: ClassVar[str] = "none sampled, or all rejected"
    """Possible reasons why no token was trained, for errors."""
    scales_loss: ClassVar[bool] = True
    """True if the loss has a factor where the dtype needs one."""

    def __init__(
        self,
        model: Decoder | ValueModel,
        config: TrainerConfig,
        *,
        like: str | Path,
        total_updates: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """like: the checkpoint directory whose config and tokenizer files `save` copies.

        total_updates: updates of the whole run; needed by a schedule that falls.
        ranks: the processes that train together. All of them call every method with the same rows;
        only forward and backward are divided.
        """
        self._module = model
        self.decoder = model.body if isinstance(model, ValueModel) else model
        self.decoder.recomputes_blocks = config.recompute == "blocks"
        self.config, self.like = config, Path(like)
        self.total_updates, self.ranks = total_updates, ranks
        self._split_over = None if ranks is None else ranks.sequence_group
        """Ranks that share each micro-batch; None: one rank computes it."""
        freeze(model.named_parameters(), config.freeze, setting=f"{self.setting}.freeze")
        self.optimizer = Optimizer(model.named_parameters(), config)
        dtype = self.decoder.embedding.dtype if self.scales_loss else torch.float32
        self.loss_scale = LossScale.for_training(dtype)
        self.num_updates = 0
        """Updates asked for, skipped ones included: the place in the schedule."""
        self.num_skipped = 0
        self.last_skip = ""
        """Why the last update was skipped and which row caused it; empty if it was made."""
        self._bad_loss = ""
        self._num_kept = 0
        """Tokens trained since the last update."""
        self._expert_load: Tensor | float = 0.0
        """[L, E] tokens per layer and expert since the last update, of a policy that balances them;
        otherwise 0."""
        self._passes: list[Pass] = []
        """Calls whose gradients are collected and not yet applied."""
        lr_share(config.warmup_updates, config, total_updates=total_updates)

    @property
    def version(self) -> int:
        """Updates made so far: the version of the policy."""
        return self.num_updates - self.num_skipped

    @property
    def is_writer(self) -> bool:
        """True if this process writes the files of `save`."""
        return self.ranks is None or self.ranks.is_leader

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.device

    # -- update ---------------------------------------------------------------------------------

    def optim_step(self) -> Metrics:
        """One update by the gradients collected so far, or none if a loss or gradient is not
        finite.

        A skipped update leaves weights and optimizer state as they are and counts in
        `ROLE/skipped_updates`; `last_skip` and the log say why and name the row. The schedule moves
        on either way. An interrupt takes effect after the update, never within it.
        """
        lr = self.config.lr * lr_share(
            self.num_updates, self.config, total_updates=self.total_updates
        )
        norm = self._update(lr=lr, clip=self.config.grad_clip)
        skipped = float(bool(self.last_skip))
        metrics = {"grad_norm": norm, "lr": lr, "skipped_updates": skipped}
        named = {f"{self.role}/{name}": value for name, value in metrics.items()}
        return named | self.loss_scale.to_metrics(self.role)

    def _update(self, *, lr: float, clip: float) -> float:
        """Makes or skips an update. Returns the norm of its gradients, NaN if a loss was not
        finite."""
        reason, norm = self._bad_loss, float("nan")
        if not reason:
            norm = self._gradient_norm()
            while not np.isfinite(norm) and self.loss_scale.lower():
                norm = self._norm_of(self._passes)  # after an overflow
            if not self._num_kept:
                reason = f"no token was trained since the last update: {self.why_untrained}"
            elif not np.isfinite(norm):
                reason = self._name_bad_gradients()
        self.last_skip = reason
        if reason:
            _log.warning("%s update %d skipped: %s", self.setting, self.num_updates, reason)
        with uninterrupted():
            if reason:
                self.num_skipped += 1
            else:
                share = clip / norm if 0 < clip < norm else 1.0
                self.optimizer.step(lr=lr, gradient_scale=share / self.loss_scale.value)
                if isinstance(self._expert_load, Tensor):
                    rate = self.config.expert_bias_rate
                    balance_experts(self.decoder, self._expert_load, rate=rate)
                self.loss_scale.made_update()
            self.num_updates += 1
            self._drop_gradients()
        return norm

    def _run_backward(self, loss: Tensor | None, outputs: Tensor) -> None:
        """Backward of a micro-batch's loss. None: no loss; then its gradients of 0 are still made,
        since other ranks wait for them."""
        if loss is not None:
            (loss * self.loss_scale.value).backward()
        elif self.ranks is not None:
            outputs.backward(torch.zeros_like(outputs))
        self.optimizer.collect_gradients()

    def _drop_gradients(self) -> None:
        """Forgets the calls since the last update."""
        self.optimizer.zero_gradients()
        self._bad_loss, self._num_kept, self._expert_load = "", 0, 0.0
        self._passes.clear()

    def _gradient_norm(self) -> float:
        """Norm of the gradients summed over all ranks; every rank holds the sum afterwards."""
        if self.ranks is not None:
            self.optimizer.sum_gradients(self.ranks)
        return float(self.optimizer.gradient_norm()) / self.loss_scale.value

    def _norm_of(self, passes: Sequence[Pass]) -> float:
        """Norm of the gradients of these calls alone, which are repeated."""
        self.optimizer.zero_gradients()
        for samples, backward in passes:
            for batch in self.pack(samples):
                backward(batch)
        return self._gradient_norm()

    # -- micro-batches --------------------------------------------------------------------------

    def pack(self, samples: Sequence[Sample]) -> Iterator[PackedBatch]:
        """This rank's micro-batches of `samples`: always the same for the same samples.

        Raises TokenError for a row that the model cannot read, besides what `packing` raises.
        """
        return self._pack(samples)

    def _pack(
        self,
        samples: Sequence[Sample],
        *,
        routes: Sequence[npt.NDArray[np.int16]] | None = None,
        num_unread: int = 0,
        apart: Collection[int] = (),
    ) -> Iterator[PackedBatch]:
        """routes: experts to replay, per sample. num_unread: tokens at each row's end that the
        model does not read. apart: see `plan_microbatches`."""
        model = self.decoder.config
        check_readable(
            samples, vocab_size=model.vocab_size, max_positions=model.max_positions + num_unread
        )
        ranks = self.ranks
        rank, num_ranks = (0, 1) if ranks is None else (ranks.data_rank, ranks.data_size)
        max_tokens = self.config.max_tokens_per_microbatch + num_unread
        plan = plan_microbatches(
            samples, max_tokens, routes=routes, num_ranks=num_ranks, apart=apart
        )
        return pack(
            samples, plan, device=self.device, routes=routes, rank=rank, num_ranks=num_ranks
        )

    # -- checkpoints ----------------------------------------------------------------------------

    def save(self, directory: str | Path, *, weights_only: bool = False) -> None:
        """Writes the model in Hugging Face's form (an adapter alone in PEFT's), the optimizer and
        the counters into `directory`. weights_only: the model alone.

        The files are the same for any number of ranks; rank 0 writes them. `CheckpointStore` makes
        the write atomic and checks it on reading.
        """
        directory = Path(directory)
        place = directory / self.state_folder
        if self.is_writer:
            directory.mkdir(parents=True, exist_ok=True)
        self._save_model(directory)
        if weights_only:
            return
        if self.is_writer:
            place.mkdir(exist_ok=True)  # after the model, which replaces its folder
        tensors = self.optimizer.state_tensors()
        write_tensors(place / OPTIMIZER, tensors, is_writer=self.is_writer)
        if not self.is_writer:
            return
        counters = {"num_updates": self.num_updates, "num_skipped": self.num_skipped}
        state = {**counters, "version": self.version, **self.loss_scale.state()}
        write_json(place / self.state_file, state)

    def load(self, directory: str | Path, *, weights_only: bool = False) -> None:
        """Continues from a `save`: the next update gives the same bits as without a stop.

        weights_only: loads the model alone; optimizer and counters begin anew. Raises
        CheckpointError listing everything that does not fit this model, before anything is changed.
        """
        directory = Path(directory)
        place = directory / self.state_folder
        self._check_saved(directory)
        counters: Mapping[str, Any] = {"num_updates": 0, "num_skipped": 0}
        if not weights_only:
            counters = read_json(place / self.state_file, CheckpointError)
            tensors = read_header(place / OPTIMIZER)
            self.optimizer.load_state_tensors(tensors, where=str(place / OPTIMIZER))
        self._load_model(directory)
        self.optimizer.read_parameters()
        if weights_only:
            self.optimizer = Optimizer(self._module.named_parameters(), self.config)
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]
        self.loss_scale.load(counters)
        self.last_skip = ""
        self._drop_gradients()

    def _save_model(self, directory: Path) -> None:
        place = directory / self.model_folder
        save_policy(self.decoder, place, like=self.like, is_writer=self.is_writer)

    def _check_saved(self, directory: Path) -> None:
        check_policy(self.decoder, directory / self.model_folder, like=self.like)
        if self.decoder.lora is None:
            check_same_shapes(directory / self.model_folder, self.decoder.config)

    def _load_model(self, directory: Path) -> None:
        load_policy(self.decoder, directory / self.model_folder)

    # -- the cause of a bad gradient ------------------------------------------------------------

    def _name_bad_gradients(self) -> str:
        """Finds the rows whose own gradient is not finite, by another backward of each."""
        found = "the gradient is not finite"
        parts = [local_part(p.detach()) for p in self._module.parameters()]
        has_bad_weights = not all(bool(torch.isfinite(p).all()) for p in parts)
        if self.ranks is not None:
            has_bad_weights = any(self.ranks.gather(has_bad_weights))
        if has_bad_weights:
            return f"{found}, because the weights are not: an earlier state must be loaded"
        bad: list[str] = []
        for samples, backward in self._passes:
            for row, sample in enumerate(samples):
                own = [([sample], backward)]
                if len(bad) < MAX_NAMED_ROWS and not np.isfinite(self._norm_of(own)):
                    bad.append(f"{sample.id} (row {row})")
        if not self._passes:
            return found
        if not bad:
            return f"{found}, but each row's own is: their sum is too large for float32"
        return f"{found}; it comes from {', '.join(bad)}"


@contextmanager
def uninterrupted() -> Generator[None]:
    """Delays Ctrl-C until the block has ended: an update is made whole or not at all."""
    is_interrupted = False

    def note() -> None:
        nonlocal is_interrupted
        is_interrupted = True

    try:
        with handling_interrupts(note):
            yield
    finally:
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)


def check_same_shapes(directory: Path, expected: ModelConfig | FallbackConfig) -> None:
    """Raises CheckpointError naming every setting that differs in the saved model."""
    saved = type(expected).from_directory(directory)
    if isinstance(expected, ModelConfig):
        expected = expected.with_vocabulary(None)
    differing = [
        f"{f.name} is {getattr(saved, f.name)} there and {getattr(expected, f.name)} here"
        for f in fields(expected)
        if getattr(saved, f.name) != getattr(expected, f.name)
    ]
    if differing:
        raise CheckpointError(f"{directory} holds another model: {'; '.join(differing)}.")
