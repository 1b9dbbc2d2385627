"""Changes of a loaded model that a defect would make, for the decoder and for a model that
transformers runs. Each is made in place while a block runs, and then undone.

The doctor scores with each change to find which reproduces a deviating side (`doctor.numerics`).

# D model width  N outputs  K inputs  H heads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Literal

import torch
from torch import nn

from lockstep.models.attention import rope_tables
from lockstep.models.attention_config import YarnScaling
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.fallback import FallbackModel
from lockstep.models.lora import patched, place_of
from lockstep.models.lora_config import lora_sites
from lockstep.models.quantised import SCHEMES, Scheme
from lockstep.ops.base import Ops

Tensor = torch.Tensor
Kind = Literal["sinks", "window", "rope", "quantised"]
Made = Callable[[], AbstractContextManager[Any]]

DEFAULT_THETA = 10_000.0
"""Base of the rotary angles that a program takes if it does not read the model's."""
SELDOM = 1
"""Rank of changes that are tried last: a change per layer, or a change that copies all weights."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A model with one thing changed."""

    kind: Kind
    text: str
    """The changed model: "without its sinks"."""
    made: Made
    """The model has the change inside of this block."""
    rank: int = 0
    """Changes of a lower rank are tried first."""


def changes(model: Decoder | FallbackModel) -> Iterator[Change]:
    """Every change that may make a difference in this model, by rank within a kind."""
    inner = model if isinstance(model, Decoder) else model.inner
    yield from _sinks(inner)
    yield from _windows(model)
    for text, made in (_decoder_ropes if isinstance(model, Decoder) else _fallback_ropes)(model):
        yield Change(kind="rope", text=text, made=made)
    for scheme in SCHEMES:
        yield Change(
            kind="quantised",
            text=f"with {scheme.describe()}",
            made=partial(_quantised, model, scheme),
            rank=SELDOM,
        )


def _sinks(inner: nn.Module) -> Iterator[Change]:
    found = [p for name, p in inner.named_parameters() if name.rpartition(".")[2] == "sinks"]
    if not found:
        return
    # A logit of -inf takes no part in a softmax.
    gone = [(p, "data", torch.full_like(p, -torch.inf)) for p in found]
    yield Change(kind="sinks", text="without its sinks", made=partial(patched, *gone))
    if len(found) == 1:
        return
    for layer, one in enumerate(gone):
        text = f"without the sinks of layer {layer}"
        yield Change(kind="sinks", text=text, made=partial(patched, one), rank=SELDOM)


# -- windows --------------------------------------------------------------------------------------

Windows = tuple[int | None, ...]


def _windows(model: Decoder | FallbackModel) -> Iterator[Change]:
    own: Windows = model.config.windows if isinstance(model, Decoder) else model.windows
    widths = [w for w in own if w is not None]
    if not widths:
        return

    def change(text: str, windows: Sequence[int | None], rank: int = 0) -> Change:
        made = partial(with_windows, model, tuple(windows))
        return Change(kind="window", text=text, made=made, rank=rank)

    yield change("without its sliding window", [None] * len(own))
    if None in own:
        width = widths[0]
        swapped = [width if w is None else None for w in own]
        yield change("with windows in the layers that have none, and none in the others", swapped)
        yield change("with a sliding window in every layer", [w or width for w in own])
    for by, word in ((1, "longer"), (-1, "shorter")):
        moved = [w if w is None else max(w + by, 1) for w in own]
        yield change(f"with windows one token {word}", moved)
    if len(widths) > 1:
        for layer, width in enumerate(own):
            if width is not None:
                one = [None if i == layer else w for i, w in enumerate(own)]
                yield change(f"without the window of layer {layer}", one, SELDOM)


def with_windows(model: Decoder | FallbackModel, windows: Windows) -> AbstractContextManager[None]:
    """Each layer's attention has this window inside of the block."""
    if isinstance(model, FallbackModel):
        return model.with_windows(windows)
    layers: Any = model.layers
    return patched(*((b.attention, "window", w) for b, w in zip(layers, windows, strict=True)))


# -- rotary positions -----------------------------------------------------------------------------


def _decoder_ropes(model: Any) -> Iterator[tuple[str, Made]]:
    config: ModelConfig = model.config

    def table(**changed: Any) -> Made:
        made = partial(rope_tables, replace(config, **changed), model.embedding.device)
        return lambda: patched((model, "rope_tables", made()))

    scaling = config.rope_scaling
    if scaling is not None:
        yield "without its rope scaling", table(rope_scaling=None)
    if config.rope_theta != DEFAULT_THETA:
        yield f"with rope_theta={DEFAULT_THETA:.0f}", table(rope_theta=DEFAULT_THETA)
    if isinstance(scaling, YarnScaling):
        yield (
            "without yarn's attention factor",
            table(rope_scaling=replace(scaling, attention_factor=1.0)),
        )
        yield (
            f"with yarn's truncate={not scaling.truncate}",
            table(rope_scaling=replace(scaling, truncate=not scaling.truncate)),
        )


def _fallback_ropes(model: Any) -> Iterator[tuple[str, Made]]:
    config = model.inner.config
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    is_by_kind = all(isinstance(v, dict | None) for v in parameters.values())
    of_kinds: dict[str, dict[str, Any]] = (
        {k: v for k, v in parameters.items() if v} if is_by_kind else {"": parameters}
    )

    def edited(edit: Callable[[dict[str, Any]], dict[str, Any]], rope_type: str = "") -> Made:
        """The model with an edit of its parameters; rope_type: of those of this type alone."""
        changed = {
            kind: edit(found) if rope_type in ("", found.get("rope_type")) else found
            for kind, found in of_kinds.items()
        }
        return lambda: patched(*_rebuilt(model.inner, changed if is_by_kind else changed[""]))

    types = {found.get("rope_type", "default") for found in of_kinds.values()}
    kept = ("rope_theta", "partial_rotary_factor")
    if types - {"default"}:
        plain = edited(
            lambda p: {"rope_type": "default", **{name: p[name] for name in kept if name in p}}
        )
        yield "without its rope scaling", plain
    if any(found.get("rope_theta", DEFAULT_THETA) != DEFAULT_THETA for found in of_kinds.values()):
        based = edited(lambda p: p | {"rope_theta": DEFAULT_THETA})
        yield f"with rope_theta={DEFAULT_THETA:.0f}", based
    if "yarn" in types:
        unscaled = edited(lambda p: p | {"attention_factor": 1.0}, "yarn")
        yield "without yarn's attention factor", unscaled
        other = edited(lambda p: p | {"truncate": not p.get("truncate", True)})
        yield f"with yarn's truncate={not parameters.get('truncate', True)}", other
    if "longrope" in types:
        for one, other in (("short", "long"), ("long", "short")):
            names = f"{one}_factor", f"{other}_factor"
            same = edited(lambda p, names=names: p | {names[1]: p[names[0]]}, "longrope")
            yield f"with longrope's {one} factors at every length", same
    if len(of_kinds) > 1:
        for kind, found in of_kinds.items():
            everywhere = edited(lambda _, found=found: found)
            yield f"with the rotary angles of its {kind} layers in all", everywhere


def _rebuilt(inner: nn.Module, parameters: Any) -> list[tuple[Any, str, Any]]:
    """The rotary modules as transformers makes them of these parameters, and the scales of
    attention, which yarn changes in some models."""
    patches: list[tuple[Any, str, Any]] = []
    device = next(inner.parameters()).device
    for parent in inner.modules():
        for name, child in parent.named_children():
            own: Any = getattr(child, "config", None)
            if own is None or not hasattr(own, "rope_parameters"):
                continue
            changed = copy(own)
            changed.rope_parameters = deepcopy(parameters)
            kind: Any = type(child)
            if kind.__name__.endswith("RotaryEmbedding"):
                patches.append((parent, name, kind(changed).to(device)))
            elif hasattr(child, "scaling") and hasattr(child, "layer_idx"):
                with torch.device("meta"):
                    scaling = kind(changed, child.layer_idx).scaling
                if scaling != child.scaling:
                    patches.append((child, "scaling", scaling))
    return patches


# -- quantised weights ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The weight of one linear map [..., N, K], which may be part of a decoder's fused weight."""

    weight: nn.Parameter
    rows: slice = field(default_factory=lambda: slice(None))
    """Range of its outputs within the parameter."""
    is_transposed: bool = False
    """True if it is stored as [..., K, N]."""

    @property
    def held(self) -> Tensor:
        whole = self.weight.data
        return whole.transpose(-1, -2) if self.is_transposed else whole[..., self.rows, :]

    def write(self, into: Tensor, new: Tensor) -> None:
        into[..., self.rows, :] = new.transpose(-1, -2) if self.is_transposed else new


def rounded_weights(model: Any, scheme: Scheme) -> dict[nn.Parameter, Tensor]:
    """Parameter -> its weights rounded by this scheme. As in engines, the embedding, the head,
    routers, and gates of experts are not."""
    news: dict[nn.Parameter, Tensor] = {}
    with torch.no_grad():
        maps = _decoder_maps(model) if isinstance(model, Decoder) else _fallback_maps(model)
        for parts in maps:
            held = [part.held for part in parts]
            if scheme.is_fused:
                rounded = scheme.rounded(torch.cat(held, -2)).split([h.shape[-2] for h in held], -2)
            else:
                rounded = [scheme.rounded(one) for one in held]
            for part, new in zip(parts, rounded, strict=True):
                part.write(news.setdefault(part.weight, torch.empty_like(part.weight)), new)
    return news


def quantise(model: Decoder, scheme: Scheme) -> Decoder:
    """Rounds the weights of `model` itself."""
    for weight, new in rounded_weights(model, scheme).items():
        weight.data = new
    return model


@contextmanager
def _quantised(model: Any, scheme: Scheme) -> Iterator[None]:
    """The weights of linear maps rounded by this scheme: a second copy of them is in memory."""
    news = rounded_weights(model, scheme)
    with ExitStack() as stack:
        stack.enter_context(patched(*((weight, "data", new) for weight, new in news.items())))
        if scheme.has_inputs and isinstance(model, Decoder):
            stack.enter_context(patched((model, "ops", RoundingOps(scheme, set(map(id, news))))))
        elif scheme.has_inputs:
            for module in model.inner.modules():
                if isinstance(module, nn.Linear) and module.weight in news:
                    handle = module.register_forward_pre_hook(partial(_round_inputs, scheme))
                    stack.callback(handle.remove)
        yield


def _round_inputs(scheme: Scheme, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (scheme.rounded_inputs(inputs[0]), *inputs[1:])


class RoundingOps(Ops):
    """Ops whose linear maps by the chosen weights round their inputs."""

    def __init__(self, scheme: Scheme, chosen: set[int]) -> None:
        super().__init__()
        self._scheme, self._chosen = scheme, chosen

    def _inputs(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._scheme.rounded_inputs(x) if id(weight) in self._chosen else x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(self._inputs(x, weight), weight, bias)

    def expert_linear(self, x: Tensor, weight: Tensor, *inputs: Any) -> Tensor:
        return super().expert_linear(self._inputs(x, weight), weight, *inputs)


def _decoder_maps(model: Decoder) -> list[list[Slice]]:
    """The maps that engines quantise: attention, MLPs and experts. Maps that read the same input
    are grouped."""
    out: list[list[Slice]] = []
    for projection, group in groupby(lora_sites(model.config), lambda site: site.projection):
        weight: Any = place_of(model, projection)[2]
        sizes = [site.outputs for site in group]
        if weight.dim() == 3 and projection.endswith("gate_up_proj"):
            sizes = [sizes[0] // 2] * 2
        rows = [slice(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]
        out.append([Slice(weight=weight, rows=part) for part in rows])
    return out


_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _fallback_maps(model: FallbackModel) -> list[list[Slice]]:
    """As `_decoder_maps`."""
    width, kept = model.config.hidden_size, {id(model.embedding), id(model.head)}
    few = (1, model.config.num_experts)  # outputs of a router, or of a gate
    found: dict[tuple[str, ...], list[Slice]] = {}
    for path, module in model.inner.named_modules():
        parent, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear):
            weight = module.weight
            is_kept = id(weight) in kept or weight.shape[0] in few
            if isinstance(weight, nn.Parameter) and not is_kept:
                fused = next((names for names in _FUSED if name in names), (name,))
                found.setdefault((parent, *fused), []).append(Slice(weight=weight))
            continue
        for own, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and own in ("gate_up_proj", "down_proj"):
                is_up = own == "gate_up_proj"
                is_transposed = weight.shape[-1 if is_up else -2] != width
                found[path, own] = [Slice(weight=weight, is_transposed=is_transposed)]
    return list(found.values())
