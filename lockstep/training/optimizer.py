"""AdamW over float32 masters, its schedule, and its state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from lockstep.errors import CheckpointError, ConfigError
from lockstep.training.config import TrainerConfig

Tensor = torch.Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


def lr_share(update: int, config: TrainerConfig, *, total_updates: int | None) -> float:
    """The share of the peak learning rate at `update`, counted from 0.

    Rises over the warm-up, then stays, or falls to `min_lr_share` at `total_updates`, which the
    last update (total_updates - 1) comes one step short of.
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
    """Weight decay pulls towards 0, which means something for a projection, and nothing for a
    norm's scale, a bias or a sink's logit."""
    return not name.endswith(("norm", "bias", "sinks"))


class Optimizer:
    """Decoupled AdamW (Loshchilov and Hutter 2019) on the trainable parameters of a model.

    Parameters are updated in their own memory, which an engine in this process may share. Those
    that are not float32 have a float32 master, in which gradients add up and updates are made: the
    last bit of a bfloat16 weight is more than most updates.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: TrainerConfig
    ) -> None:
        self.parameters = {n: p for n, p in named_parameters if p.requires_grad}
        if not self.parameters:
            raise ConfigError("the model has no trainable parameter.")
        self.masters: dict[str, Tensor] = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self.parameters.items()
        }
        groups = [
            {
                "params": [m for n, m in self.masters.items() if is_decayed(n) == decays],
                "weight_decay": config.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr, betas=config.betas, eps=config.eps, fused=True,
        )  # fmt: skip

    def collect_gradients(self) -> None:
        """Adds the gradients of the last backward to the masters', in float32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def zero_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    def gradients(self) -> dict[str, Tensor]:
        """name -> float32 gradient, of the parameters that have one."""
        return {n: m.grad for n, m in self.masters.items() if m.grad is not None}

    def gradient_norm(self) -> Tensor:
        """[] the global L2 norm; not finite if any gradient is not."""
        gradients = list(self.gradients().values())
        if not gradients:
            return torch.zeros(())
        return torch.nn.utils.get_total_norm(gradients, foreach=True)

    def step(self, *, lr: float, gradient_scale: float = 1.0) -> None:
        """One update by the collected gradients times `gradient_scale`; then they are gone."""
        if gradient_scale != 1.0:
            for gradient in self.gradients().values():
                gradient.mul_(gradient_scale)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])
        self.zero_gradients()

    # -- state ----------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """`exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`, and `master/NAME` where there is one."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                out[f"master/{name}"] = master.detach()
            for key, value in self._adam.state.get(master, {}).items():
                out[f"{key}/{name}"] = value.detach().reshape(1 if key == "step" else value.shape)
        return out

    def load_state_tensors(self, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Raises CheckpointError listing every tensor that is missing, extra or misshapen, and then
        changes nothing."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                shapes[f"master/{name}"] = tuple(master.shape)
            if any(f"{key}/{name}" in tensors for key in (*_MOMENTS, "step")):
                shapes |= {f"{key}/{name}": tuple(master.shape) for key in _MOMENTS}
                shapes[f"step/{name}"] = (1,)
        problems = [f"missing {key}" for key in shapes if key not in tensors]
        problems += [f"unexpected {key}" for key in tensors if key not in shapes]
        problems += [
            f"{key}: expected {list(shape)}, found {list(tensors[key].shape)}"
            for key, shape in shapes.items()
            if key in tensors and tuple(tensors[key].shape) != shape
        ]
        if problems:
            raise CheckpointError(
                f"{where} does not fit the model's trainable parameters: {'; '.join(problems)}."
            )
        self.zero_gradients()
        self._adam.state.clear()
        for name, master in self.masters.items():
            if (kept := tensors.get(f"master/{name}")) is not None:
                with torch.no_grad():
                    master.copy_(kept)
            if f"step/{name}" in tensors:
                self._adam.state[master] = {
                    # The fused kernel keeps its count beside the parameter, in float32.
                    "step": tensors[f"step/{name}"].reshape(()).to(master.device).clone(),
                    **{k: tensors[f"{k}/{name}"].to(master.device).clone() for k in _MOMENTS},
                }
