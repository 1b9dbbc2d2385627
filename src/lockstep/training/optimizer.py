"""AdamW over float32 masters, its schedule, and its state by parameter name."""

from __future__ import annotations

import logging
import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.shapes import misfits
from lockstep.models.sharding import local_part, mesh_of, part_like, whole_like
from lockstep.models.tensor_file import Outgoing, StoredTensor
from lockstep.training.config import TrainerConfig, frozen_names
from lockstep.training.moments import PackedMoment, PackedSquare

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

Tensor = torch.Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")

_UNDECAYED = re.compile(r"(norm\d*|bias|sinks|A_log|\bD|\bln_\w+)(\.weight)?$")

SUMMED_ELEMENTS = 1 << 24  # of gradients that are summed over ranks at once: 64 MiB

_log = logging.getLogger(__name__)


def lr_share(update: int, config: TrainerConfig, *, total_updates: int | None) -> float:
    """Ratio of the learning rate at `update`, counted from 0, to its peak.

    It rises over the warm-up, then stays, or falls to `min_lr_share` at `total_updates`, one step
    after the last update.
    """
    warmup = config.warmup_updates
    if update < warmup:
        return (update + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    if total_updates is None:
        raise ConfigError(
            f"trainer.schedule={config.schedule} needs the number of updates of the run; give the "
            "trainer total_updates, or use schedule=constant."
        )
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_share + (1 - config.min_lr_share) * left


def is_decayed(name: str) -> bool:
    """True if weight decay applies: to projections, but not to a norm's scale, a bias, a sink's
    logit or the rates of a recurrence (A_log, D), which have no reason to be near 0. name: the
    decoder's, or transformers' in a model that it runs."""
    return _UNDECAYED.search(name) is None


def freeze(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    patterns: Sequence[str],
    *,
    setting: str = "trainer.freeze",
) -> None:
    """Turns off the gradient of every parameter whose name a pattern matches (`*`, `?`, `[ab]`).

    Raises ConfigError for a pattern that matches none and if nothing is left to train, before
    anything is changed.
    """
    parameters = dict(named_parameters)
    trainable = {name for name, p in parameters.items() if p.requires_grad}
    for name in frozen_names(list(parameters), patterns, trainable=trainable, setting=setting):
        parameters[name].requires_grad_(False)


class Optimizer:
    """Decoupled AdamW (Loshchilov and Hutter 2019) on the trainable parameters of a model.

    Parameters are updated in their own memory, which an engine in this process may share. Those
    that are not float32 have a float32 master that collects gradients and is updated: the last bit
    of a bfloat16 weight is larger than most updates. With trainer.offload=optimizer all parameters
    have a master, in the host's memory with its moments. A sharded parameter has only this rank's
    part of master and moments; saved and loaded tensors are whole.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainerConfig
    ) -> None:
        self.parameters = {n: p for n, p in named_parameters if p.requires_grad}
        if not self.parameters:
            raise ConfigError("the model has no trainable parameter.")
        self._config = config
        is_offloaded = config.offload == "optimizer"
        self.masters: dict[str, Tensor] = {
            name: _master(p, is_offloaded) for name, p in self.parameters.items()
        }
        meshes = {n: mesh for n, p in self.parameters.items() if (mesh := mesh_of(p)) is not None}
        self._sharded = list(meshes)
        self._sharded_over = next(iter(meshes.values()), None)
        self._state: dict[str, dict[str, Tensor | PackedMoment | PackedSquare]] = {}
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter and name not in meshes:
                # Adds the gradient to the master while backward runs, and frees its memory. A hook
                # keeps its arguments alive, and a cycle through a parameter is never collected.
                hook = partial(_call_while_alive, weakref.WeakMethod(self._collect), name)
                parameter.register_post_accumulate_grad_hook(hook)
        self.configure(betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    def collect_gradients(self) -> None:
        """Adds the gradients of the last backward to the masters', in float32."""
        for name, parameter in self.parameters.items():
            self._collect(name, parameter)

    def _collect(self, name: str, parameter: Tensor) -> None:
        master = self.masters[name]
        if master is parameter or parameter.grad is None:
            return
        gradient = local_part(parameter.grad)
        if master.grad is None:
            master.grad = gradient.to(master.device, torch.float32)
        else:
            master.grad.add_(gradient.to(master.device))
        parameter.grad = None

    def sum_gradients(self, ranks: Ranks) -> None:
        """Sums the collected gradients over the ranks; backward has done so for sharded
        parameters."""
        names = [n for n in self.masters if n not in self._sharded]
        masters = [self.masters[name] for name in names]
        has = torch.tensor([m.grad is not None for m in masters], dtype=torch.float32)
        ranks.sum(has)
        waiting: list[Tensor] = []
        for master, count in zip(masters, has.tolist(), strict=True):
            if not count:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            waiting.append(master.grad)
            if sum(gradient.numel() for gradient in waiting) >= SUMMED_ELEMENTS:
                _sum_together(waiting, ranks)
                waiting = []
        _sum_together(waiting, ranks)

    def zero_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    def gradients(self) -> dict[str, Tensor]:
        """name -> float32 gradient, for parameters that have one."""
        return {n: m.grad for n, m in self.masters.items() if m.grad is not None}

    def gradient_norm(self) -> Tensor:
        """[] the global L2 norm; not finite if any gradient is not. Collective where sharded."""
        gradients = self.gradients()
        if self._sharded_over is None:
            return _norm(gradients.values())
        squared = _norm(gradients[n] for n in self._sharded if n in gradients).double().square()
        dist.all_reduce(squared, group=self._sharded_over.get_group())
        whole = _norm(g for n, g in gradients.items() if n not in self._sharded)
        return (squared + whole.double().square()).sqrt()

    def configure(self, *, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Replaces the settings of the following updates; the moments stay."""
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay

    def step(self, *, lr: float, gradient_scale: float = 1.0) -> None:
        """One update by the collected gradients times `gradient_scale`, which are then dropped."""
        if gradient_scale != 1.0:
            for gradient in self.gradients().values():
                gradient.mul_(gradient_scale)
        with torch.no_grad():
            for is_decaying in (True, False):
                names = [n for n in self.gradients() if is_decayed(n) == is_decaying]
                # Packed moments are unpacked for one parameter at a time.
                together = [[n] for n in names] if self._config.moments == "float8" else [names]
                for group in together:
                    self._step(lr, group)
            for name, parameter in self.parameters.items():
                if not self._is_own_master(name):
                    local_part(parameter.detach()).copy_(self.masters[name])
        self.zero_gradients()

    def _step(self, lr: float, names: Sequence[str]) -> None:
        """AdamW as a function: the class would import torch's compiler, for half a second."""
        masters = [self.masters[name] for name in names]
        for name, master in zip(names, masters, strict=True):
            if name not in self._state:
                # The fused kernel keeps its count beside the parameter, in float32.
                self._state[name] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    **{key: torch.zeros_like(master) for key in _MOMENTS},
                }
        states = [{k: _numbers(x) for k, x in self._state[name].items()} for name in names]
        adamw(
            masters,
            [master.grad for master in masters if master.grad is not None],
            *([state[key] for state in states] for key in _MOMENTS),
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=self._weight_decay if names and is_decayed(names[0]) else 0.0,
            eps=self._eps,
            maximize=False,
        )
        if self._config.moments == "float8":
            for name, state in zip(names, states, strict=True):
                first = PackedMoment.of(state["exp_avg"])
                told = {"betas": self._betas, "step": state["step"]}
                second = PackedSquare.bounded_by(first, state["exp_avg_sq"], **told)
                self._state[name] |= {"exp_avg": first, "exp_avg_sq": second}

    def read_parameters(self) -> None:
        """Copies float32 parameters to those masters that are copies of them."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter.dtype == torch.float32 and not self._is_own_master(name):
                    self.masters[name].copy_(local_part(parameter.detach()))

    # -- state ----------------------------------------------------------------------------------

    def state_tensors(self) -> list[Outgoing]:
        """`exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`, and `master/NAME` where the parameter is
        not float32: whole, each gathered when it is written. Collective where sharded."""
        out: list[Outgoing] = []
        for name, master in self.masters.items():
            parameter, state = self.parameters[name], self._state.get(name, {})
            parts = {"master": master} if self._has_stored_master(name) else {}
            parts |= {key: state[key] for key in _MOMENTS if key in state}
            for key, part in parts.items():
                whole = partial(_gathered, part, parameter)
                shape = tuple(parameter.shape)
                out.append(Outgoing(f"{key}/{name}", shape, torch.float32, whole))
            if "step" in state:
                step = _numbers(state["step"]).reshape(1)
                out.append(Outgoing(f"step/{name}", (1,), step.dtype, lambda step=step: step))
        return out

    def load_state_tensors(
        self, tensors: Mapping[str, Tensor | StoredTensor], *, where: str
    ) -> None:
        """Takes tensors in memory, or in their file; from a file each is read by itself.

        Raises CheckpointError listing every tensor that is missing, extra or misshapen, before
        anything is changed.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in self.parameters.items():
            shape = tuple(parameter.shape)
            if self._has_stored_master(name):
                shapes[f"master/{name}"] = shape
            if f"step/{name}" in tensors or any(f"{key}/{name}" in tensors for key in _MOMENTS):
                shapes |= {f"step/{name}": (1,)} | {f"{key}/{name}": shape for key in _MOMENTS}
        problems = misfits(shapes, {key: tensor.shape for key, tensor in tensors.items()})
        if problems:
            raise CheckpointError(
                f"{where} does not fit the model's trainable parameters: {'; '.join(problems)}."
            )
        self.zero_gradients()
        self._state.clear()
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if (kept := tensors.get(f"master/{name}")) is not None:
                with torch.no_grad():
                    master.copy_(part_like(_numbers(kept), parameter))
            if (step := tensors.get(f"step/{name}")) is not None:
                kept = _numbers(step).reshape(()).to(master.device, copy=True)
                state: dict[str, Tensor | PackedMoment | PackedSquare] = {"step": kept}
                for key in _MOMENTS:
                    part = part_like(_numbers(tensors[f"{key}/{name}"]), parameter)
                    part = part.to(master.device, copy=True)
                    packed = PackedMoment if key == "exp_avg" else PackedSquare
                    is_packed = self._config.moments == "float8"
                    state[key] = packed.of(part) if is_packed else part
                self._state[name] = state

    def _is_own_master(self, name: str) -> bool:
        """True if the master is the parameter's own memory."""
        part = local_part(self.parameters[name].detach())
        return self.masters[name].data_ptr() == part.data_ptr() and part.dtype == torch.float32

    def _has_stored_master(self, name: str) -> bool:
        """True if the master is saved: a float32 parameter holds the same numbers as its master."""
        return self.parameters[name].dtype != torch.float32


def _call_while_alive(
    method: weakref.WeakMethod[Callable[[str, Tensor], None]], name: str, parameter: Tensor
) -> None:
    if (collect := method()) is not None:
        collect(name, parameter)


def _numbers(tensor: Tensor | StoredTensor | PackedMoment | PackedSquare) -> Tensor:
    if isinstance(tensor, PackedMoment | PackedSquare):
        return tensor.unpacked()
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor.detach()


def _gathered(part: Tensor | PackedMoment | PackedSquare, parameter: torch.nn.Parameter) -> Tensor:
    return whole_like(_numbers(part), parameter)


def _master(parameter: torch.nn.Parameter, is_offloaded: bool) -> Tensor:
    """The parameter itself or a view of its part if that is float32 and stays on its device."""
    is_own = parameter.dtype == torch.float32 and not is_offloaded
    if is_own and mesh_of(parameter) is None:
        return parameter
    part = local_part(parameter.detach())
    if not is_own:
        device = torch.device("cpu") if is_offloaded else part.device
        part = part.to(device, torch.float32, copy=True)
    return part.requires_grad_()


def _norm(gradients: Iterable[Tensor]) -> Tensor:
    found = list(gradients)
    return torch.nn.utils.get_total_norm(found, foreach=True) if found else torch.zeros(())


def _sum_together(gradients: list[Tensor], ranks: Ranks) -> None:
    """Sums the gradients in one collective: many small ones cost their latency each."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    ranks.sum(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
