"""Several adapters over one base model: decoders to train them, and stacks to sample them together.

# T tokens  G adapters of one shape  E experts
"""

from __future__ import annotations

import numpy as np
import torch

from lockstep.models.adapter_rows import (
    AdapterRows,
    AdaptersOfShape,
    Groups,
    IntArray,
    StackedFactors,
)
from lockstep.models.decoder import Decoder
from lockstep.models.lora import Adapter, LowRank, adapted, place_of
from lockstep.models.lora_config import LoraShape
from lockstep.models.variants import sharing
from lockstep.ops.transfer import to_device

Tensor = torch.Tensor


def decoder_over(base: Decoder) -> Decoder:
    """A second decoder over the very parameters of `base`, which are frozen from now on.

    It has modules of its own, so `lora.add_adapter` gives it an adapter that neither `base` nor
    other decoders over it have. It starts with the ops of `base`, and without its adapter. Its
    memory is that adapter and a few small objects per layer: the table of rotary angles is shared.

    >>> one, other = decoder_over(base), decoder_over(base)         # doctest: +SKIP
    >>> add_adapter(one, shape, seed=0)                             # doctest: +SKIP
    """
    twin = sharing(base, has_adapter=False)
    twin.rope_tables = base.rope_tables
    return twin.requires_grad_(False)


class AdapterStacks:
    """Adapters of one base model, each under a number. Adapters of one shape share one tensor.

    Keeps copies in the base's dtype, on its device. Number 0 is for rows without an adapter here:
    they get the base's own adapter, if it has one.
    """

    def __init__(self) -> None:
        self._stacks: dict[object, _Stack] = {}
        self._last: tuple[Decoder, bytes, AdapterRows] | None = None

    def put(self, number: int, model: Decoder, base: Decoder, *, replacing: int = 0) -> None:
        """Copies the adapter of `model`. replacing: number of the adapter that it replaces."""
        shape = model.lora
        assert shape is not None, "the model has no adapter: `lora.add_adapter` puts one"
        key = shape.rank, shape.scale, shape.sites
        stack = self._stacks.get(key)
        if stack is None or replacing not in stack.numbers:
            self.drop(replacing)
            stack = self._stacks.setdefault(key, _Stack(shape))
            stack.append(number, model, base)
        else:
            stack.write(replacing, number, model)
        self._last = None

    def drop(self, number: int) -> None:
        """Frees an adapter's memory. A number that is not there is ignored."""
        for key, stack in list(self._stacks.items()):
            if number in stack.numbers:
                stack.remove(number)
                if not stack.numbers:
                    del self._stacks[key]
        self._last = None

    def rows(self, base: Decoder, numbers_T: IntArray) -> AdapterRows:
        """For a forward of `base` over rows of these adapters. Kept until the rows change."""
        content = numbers_T.tobytes()
        if self._last is not None and self._last[0] is base and self._last[1] == content:
            return self._last[2]
        device, present = base.embedding.device, set(np.unique(numbers_T).tolist())
        shapes: list[AdaptersOfShape] = []
        for stack in self._stacks.values():
            chosen = [i for i, number in enumerate(stack.numbers) if number in present]
            if chosen:
                numbers = [stack.numbers[i] for i in chosen]
                shapes.append(_of_shape(numbers_T, numbers, stack.factors(base, chosen), device))
        own = _own_factors(base) if 0 in present else {}
        if own:
            shapes.append(_of_shape(numbers_T, [0], own, device))
        rows = AdapterRows(shapes, device)
        # The base's own adapter may be scaled, or off, in the next step.
        self._last = None if own else (base, content, rows)
        return rows

    def can_be_captured(self, base: Decoder, numbers_T: IntArray) -> bool:
        """True if fixed tensors can say which adapter each row has: not where experts or heads have
        factors, for which the host sorts rows, nor for the base's own, whose scale may change."""
        has_own = base.lora is not None and not numbers_T.all()
        is_by_row = all(stack.is_by_row for stack in self._stacks.values())
        return is_by_row and not has_own and base.config.latent is None

    def allocations(self) -> list[object]:
        """An object for each shape, which is another once the place of its factors is."""
        return [stack.allocation for stack in self._stacks.values()]

    def of_every_shape(self, base: Decoder) -> list[tuple[list[int], Factors]]:
        """(numbers, which `put` may replace, their factors where they lie) of each shape."""
        found = self._stacks.values()
        return [(x.numbers, x.factors(base, list(range(len(x.numbers))))) for x in found]


class _Stack:
    """Adapters of one shape."""

    def __init__(self, shape: LoraShape) -> None:
        self.numbers: list[int] = []
        self.is_by_row = not any(site.num_experts for site in shape.sites)
        self.allocation = object()
        self._scale = shape.scale
        self._columns: dict[str, tuple[slice, ...]] = {}
        self._tensors: dict[str, list[Tensor]] = {}
        """Projection -> A [G, ...], and B [G, ...] of each part."""
        self._chosen: tuple[Decoder, list[int], Factors] | None = None

    def append(self, number: int, model: Decoder, base: Decoder) -> None:
        for projection, _, adapter in adapted(model):
            found = [x.detach()[None].to(base.embedding, copy=True) for x in _parts(adapter)]
            if self.numbers:
                before = self._tensors[projection]
                found = [torch.cat(pair) for pair in zip(before, found, strict=True)]
            self._tensors[projection], self._columns[projection] = found, _columns(adapter)
        self.numbers.append(number)
        self._chosen, self.allocation = None, object()

    def write(self, replaced: int, number: int, model: Decoder) -> None:
        at = self.numbers.index(replaced)
        self.numbers[at] = number
        with torch.no_grad():
            for projection, _, adapter in adapted(model):
                for stacked, part in zip(self._tensors[projection], _parts(adapter), strict=True):
                    stacked[at].copy_(part)
        self._chosen = None

    def remove(self, number: int) -> None:
        at = self.numbers.index(number)
        del self.numbers[at]
        for projection, parts in self._tensors.items():
            self._tensors[projection] = [torch.cat([x[:at], x[at + 1 :]]) for x in parts]
        self._chosen, self.allocation = None, object()

    def factors(self, base: Decoder, chosen: list[int]) -> Factors:
        """Factors of the adapters at these places, kept until others are chosen. Only a part of the
        stack is copied; all of it is read where it lies."""
        if self._chosen is not None and self._chosen[0] is base and self._chosen[1] == chosen:
            return self._chosen[2]
        self._chosen = None
        index = to_device(np.array(chosen), base.embedding.device)
        is_all = len(chosen) == len(self.numbers)
        found: Factors = {}
        for projection, parts in self._tensors.items():
            taken = parts if is_all else [x.index_select(0, index) for x in parts]
            columns = self._columns[projection]
            found[place_of(base, projection)[:2]] = _stacked(taken, columns, self._scale)
        self._chosen = base, chosen, found
        return found


Factors = dict[tuple[object, str], StackedFactors]


def _of_shape(
    numbers_T: IntArray, numbers: list[int], factors: Factors, device: torch.device
) -> AdaptersOfShape:
    group_T = group_of(numbers_T, numbers)
    groups = Groups.of(group_T, len(numbers), device)
    return AdaptersOfShape(group_T, len(numbers), groups, factors)


def group_of(numbers_T: IntArray, numbers: list[int]) -> IntArray:
    """[T]: index in `numbers` of each row's adapter, -1 for one that is not there."""
    is_one_TG = numbers_T[:, None] == np.array(numbers)
    return np.where(is_one_TG.any(1), is_one_TG.argmax(1), -1)


def _own_factors(model: Decoder) -> Factors:
    """The model's own adapter, as a stack of one: views of its parameters."""
    return {
        place_of(model, projection)[:2]: _stacked(
            [x.detach()[None] for x in _parts(adapter)], _columns(adapter), adapter.scale
        )
        for projection, _, adapter in adapted(model)
        if adapter.is_on
    }


def _parts(adapter: Adapter) -> list[Tensor]:
    return [adapter.A, *adapter.B] if isinstance(adapter, LowRank) else [adapter.A, adapter.B]


def _columns(adapter: Adapter) -> tuple[slice, ...]:
    """Outputs that each B of the adapter is for."""
    return tuple(adapter.outputs) if isinstance(adapter, LowRank) else (slice(None),)


def _stacked(parts: list[Tensor], columns: tuple[slice, ...], scale: float) -> StackedFactors:
    """parts: A [G, ...], then each B [G, ...]; experts, [G, E, ...], become groups of their own."""
    A, *B = (x.flatten(0, 1) if x.dim() == 4 else x for x in parts)
    return StackedFactors(A, tuple(B), columns, scale)
