"""States of linear attention: a slot for each sequence that runs, and states that are kept.

A state takes the memory of many tokens' keys and values. So only the states at the last border of
each prompt and of each reply are kept for other requests. A kept state belongs to the last page of
the trie over tokens (`kv_cache`) before its border; the least recently used state makes room. A
sequence with the same beginning continues from the deepest kept border and computes the rest again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import fields

import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.models.attention_config import LinearShape
from lockstep.ops.chunks import States

Tensor = torch.Tensor


class StateCache:
    """Memory for states, and which of its slots are in use."""

    def __init__(self, shape: LinearShape, config: EmbeddedConfig, *, like: Tensor) -> None:
        """like: a tensor with the dtype and device of the states' tails."""
        self._shape, self._dtype, self._device = shape, like.dtype, like.device
        self._num_running = config.max_num_sequences
        self._num_kept = config.max_num_sequences if config.prefix_cache else 0
        self.unread_slot = self._num_running
        """For the rows that fill up the batch of a graph."""
        self._kept: OrderedDict[Hashable, int] = OrderedDict()
        """Key -> kept state, the least recently used first."""

    def allocate(self) -> None:
        """Allocates the memory as zeros."""
        at = self._shape
        self.states = States.zeros(
            len(at.layers),
            self._num_running + 1,
            heads=(at.key_heads, at.value_heads),
            widths=(at.key_dim, at.value_dim),
            tail=(at.conv_width - 1, at.channels),
            dtype=self._dtype,
            device=self._device,
        )
        of_kept = len(at.layers), self._num_kept
        self._kept_states, self._kept_tails = (
            of.new_zeros(*of_kept, *of.shape[2:]) for of in (self.states.state, self.states.tails)
        )
        self._free = list(range(self._num_running - 1, -1, -1))
        self.forget()

    def tensors(self) -> list[Tensor]:
        states = [getattr(self.states, field.name) for field in fields(States)]
        return [*states, self._kept_states, self._kept_tails]

    def deallocate(self) -> None:
        """Frees the memory. No slot may be in use."""
        self.forget()
        empty = torch.empty(0)
        self.states = States(**{field.name: empty for field in fields(States)})
        self._kept_states = self._kept_tails = empty

    def begin(self, key: Hashable | None) -> int:
        """A slot for a sequence that goes on from the state kept at `key`, or from none."""
        slot, states = self._free.pop(), self.states
        if key is not None:
            self._kept.move_to_end(key)
        every = states.state, states.tails, states.border_tails
        of_kept = self._kept_states, self._kept_tails, self._kept_tails
        for running, kept in zip(every, of_kept, strict=True):
            running[:, slot] = 0 if key is None else kept[:, self._kept[key]]
        return slot

    def end(self, slot: int) -> None:
        self._free.append(slot)

    def keep(self, slot: int, key: Hashable) -> None:
        """Keeps a running sequence's state at its last border."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        if self._idle:
            kept = self._idle.pop()
        elif self._kept:
            kept = self._kept.popitem(last=False)[1]
        else:
            return
        self._kept[key] = kept
        self._kept_states[:, kept] = self.states.state[:, slot]
        self._kept_tails[:, kept] = self.states.border_tails[:, slot]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def drop(self, key: Hashable) -> None:
        """Gives up the state at `key`, if one is kept."""
        if (kept := self._kept.pop(key, None)) is not None:
            self._idle.append(kept)

    def forget(self) -> None:
        """Gives up every kept state."""
        self._kept.clear()
        self._idle = list(range(self._num_kept))

    def clear_free_slots(self) -> None:
        """Zeroes the unused slots, after a sequence with values that were not finite."""
        free = torch.tensor([*self._free, self.unread_slot], dtype=torch.int64, device=self._device)
        for field in fields(States):
            getattr(self.states, field.name).index_fill_(1, free, 0)
