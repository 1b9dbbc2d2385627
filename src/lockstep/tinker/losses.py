"""The losses of Tinker's API, as it publishes them: sums over tokens, without any division.

A loss is one of the library's (`objectives/losses.py`) with the inputs, settings and defaults of
the wire. With lp the trainer's log-prob of a target, q the sampler's (`logprobs`), A its advantage
and r = exp(lp - q):

    cross_entropy        -weight lp
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A), the bounds .8 and 1.2
    cispo                -stop(clip(r, low, high)) lp A, the bounds 0 and 4
    dro                  -lp A + beta / 2 (lp - q)^2, beta .05
    gspo                 ppo with r = exp(mean of lp - q over the datum's sequence_ratio_mask)

# N positions of a datum  K targets of a position  M targets of a micro-batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.correction import kl
from lockstep.correction.layout import Layout
from lockstep.objectives import losses
from lockstep.objectives.losses import Clip, TokenBatch, TokenLoss
from lockstep.tinker.requests import TARGETS, Datum, TinkerError, invalid

Tensor = torch.Tensor
Config = Mapping[str, float | str]
Compute = Callable[[TokenBatch, Mapping[str, float]], TokenLoss]

BOUNDS = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss of the API: its inputs and its formula."""

    compute: Compute
    """(batch with the datums' inputs as columns, settings) -> loss."""
    inputs: tuple[str, ...]
    """Inputs that each datum must have, besides target_tokens."""
    optional_inputs: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    """Its settings; in LOSSES their defaults. An optional input has its setting at each target of a
    datum that lacks it."""
    gradient: str = ""
    """Input that is 0 where a token has no gradient; empty: every token may have one."""
    num_dims: int = 1
    """Dimensions that target_tokens may have: [N], or also [N, K]."""
    name: str = ""

    def check(self, index: int, datum: Datum) -> None:
        """Raises TinkerError naming the datum, by its index, and the field that the loss lacks or
        does not read."""
        targets, name = datum.inputs[TARGETS], self.name
        if targets.ndim > self.num_dims:
            text = f"its shape is {list(targets.shape)}, and the loss {name} has one target a token"
            raise wrong_input(index, TARGETS, text)
        known = {TARGETS, *self.inputs, *self.optional_inputs}
        if unknown := sorted(set(datum.inputs) - known):
            raise wrong_input(
                index,
                unknown[0],
                f"the loss {name} does not read it, so it would change nothing. Leave it out; the "
                f"loss reads {', '.join(sorted(known))}",
            )
        if missing := [key for key in self.inputs if key not in datum.inputs]:
            raise wrong_input(index, missing[0], f"it is missing, and the loss {name} reads it")

    def columns_of(self, data: Sequence[Datum]) -> dict[str, npt.NDArray[np.float32]]:
        """[M] each: the inputs that these datums have."""

        def values(name: str, datum: Datum) -> npt.NDArray[Any]:
            if name in datum.inputs:
                return datum.inputs[name].ravel()
            return np.full(datum.inputs[TARGETS].size, self.config[name])

        given = {name for datum in data for name in datum.inputs}
        names = [name for name in (*self.inputs, *self.optional_inputs) if name in given]
        parts = {name: [values(name, datum) for datum in data] for name in names}
        return {name: np.concatenate(part, dtype=np.float32) for name, part in parts.items()}

    def is_live(self, columns: Mapping[str, Tensor], *, like: Tensor) -> Tensor:
        """[M] bool: the targets whose log-prob the loss may have a gradient for."""
        if self.gradient:
            return columns[self.gradient] != 0
        return torch.ones_like(like, dtype=torch.bool)

    def summed(self, tokens: TokenBatch, data: Mapping[int, Datum], totals: Sums) -> Tensor:
        """[] the loss summed over the targets of whole datums; its figures go into `totals`.

        Means and extremes are over the targets that have a gradient: others may hold any log-prob
        of the sampler, such as 0 in a prompt.
        """
        out = self.compute(tokens, self.config)
        is_live = self.is_live(tokens.columns, like=tokens.logprobs)
        totals.add("loss:sum", out.loss)
        totals.add("tokens:sum", is_live)
        figures = {f"{key.removesuffix('_mean')}:mean": values for key, values in out.mean.items()}
        for key, values in out.maximum.items():
            figures[f"{key.removesuffix('_max')}:max"] = values
        figures["entropy:mean"] = tokens.entropy
        if "logprobs" in tokens.columns:
            ratio, _ = kl.log_ratio(tokens.logprobs, tokens.columns["logprobs"])
            figures["kl_sample_train_v1:mean"] = kl.k1(ratio)
            figures["kl_sample_train_v2:mean"] = kl.k2(ratio)
        for key, values in figures.items():
            totals.add(key, values[is_live])
        return out.loss.sum()


def _dro(tokens: TokenBatch, config: Mapping[str, float]) -> TokenLoss:
    logprobs, sampled, advantages = _policy(tokens)
    out = losses.reinforce(logprobs, advantages)
    # k2 is half the square; its logs of ratios are cut at 20, where tokens are misaligned.
    distance = losses.reference_kl(logprobs, sampled, estimator="k2")
    return TokenLoss(out.loss + config["beta"] * distance)


def _gspo(tokens: TokenBatch, config: Mapping[str, float]) -> TokenLoss:
    layout = tokens.layout
    averaged = Layout(layout.shape, layout.offsets, tokens.columns["sequence_ratio_mask"] != 0)
    return losses.gspo(*_policy(tokens), layout, clip=_clip(tokens, config), averaged=averaged)


_POLICY = ("logprobs", "advantages")


def _between_bounds(loss: Callable[..., TokenLoss]) -> Compute:
    """loss: takes the trainer's log-probs, the sampler's, advantages and the bounds."""
    return lambda tokens, config: loss(*_policy(tokens), clip=_clip(tokens, config))


def _clipped(compute: Compute, bounds: tuple[float, float], *inputs: str) -> Loss:
    """A loss of ratios between two bounds. inputs: in addition to `_POLICY`."""
    return Loss(
        compute=compute,
        inputs=(*_POLICY, *inputs),
        optional_inputs=BOUNDS,
        config=dict(zip(BOUNDS, bounds, strict=True)),
        gradient="advantages",
    )


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(
        compute=lambda tokens, _: losses.cross_entropy(tokens.logprobs, tokens.columns["weights"]),
        inputs=("weights",),
        gradient="weights",
        num_dims=2,
    ),
    "importance_sampling": Loss(
        # Its bounds cut nothing: r is never below 0.
        compute=lambda tokens, _: losses.ppo_clip(*_policy(tokens), clip=(1.0, math.inf)),
        inputs=_POLICY,
        gradient="advantages",
    ),
    "ppo": _clipped(_between_bounds(losses.ppo_clip), (0.8, 1.2)),
    "cispo": _clipped(_between_bounds(losses.cispo), (0.0, 4.0)),
    "dro": Loss(compute=_dro, inputs=_POLICY, config={"beta": 0.05}),
    "gspo": _clipped(_gspo, (0.8, 1.2), "sequence_ratio_mask"),
}


def loss_of(name: str, config: Config) -> Loss:
    """The loss of this name with these settings. Raises TinkerError for a setting that it does not
    have."""
    loss = LOSSES[name]
    for key, value in config.items():
        if key not in loss.config:
            known = ", ".join(loss.config) or "none"
            raise invalid(f"the loss {name} has no setting {key!r}; its settings are: {known}.")
        if isinstance(value, str):
            raise invalid(f"the setting {key} of the loss {name} is {value!r}; expected a number.")
    return replace(loss, name=name, config={**loss.config, **config})


class Sums:
    """The metrics of one call, over its micro-batches; `name:reduction` says how they add up.

    >>> totals = Sums()
    >>> totals.add("loss:sum", torch.tensor([1.0, 2.0]))
    >>> totals.add("loss:sum", torch.tensor([4.0]))
    >>> totals.add("ratio:mean", torch.tensor([1.0, 3.0]))
    >>> totals.to_metrics()
    {'loss:sum': 7.0, 'ratio:mean': 2.0}
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {"loss:sum": []}

    def add(self, name: str, values: Tensor) -> None:
        """values: of any shape, one for each token or datum."""
        self._parts.setdefault(name, []).append(values.detach().double().flatten().cpu())

    def to_metrics(self) -> dict[str, float]:
        """A mean or an extreme of nothing is left out."""
        out: dict[str, float] = {}
        for name, parts in self._parts.items():
            values = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
            reduction = name.partition(":")[2]
            if reduction == "sum" or len(values):
                out[name] = float(getattr(values, reduction)())
        return out


# -- mechanism ------------------------------------------------------------------------------------


def _policy(tokens: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    return tokens.logprobs, tokens.columns["logprobs"], tokens.columns["advantages"]


def _clip(tokens: TokenBatch, config: Mapping[str, float]) -> Clip:
    """The bounds as distances from 1: a datum's own bounds for each token, else the bounds of the
    settings."""
    low, high = (tokens.columns.get(key, config[key]) for key in BOUNDS)
    return 1.0 - low, high - 1.0


def wrong_input(index: int, field: str, text: str) -> TinkerError:
    return invalid(f"datum {index}, loss_fn_inputs[{field!r}]: {text}.")
