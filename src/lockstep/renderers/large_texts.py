"""Encoding of large texts beside the event loop.

A tokenizer takes 10 ms for an ordinary text of 50,000 characters and minutes for a megabyte that is
one word, and nothing else runs on the event loop meanwhile. `encoded` bounds both: a text that
cannot fit is refused by its length, and a large one is encoded in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

from lockstep.errors import LockstepError

T = TypeVar("T")

LOOP_CHARS = 1 << 15
"""Characters that one call may encode on the event loop: a few milliseconds."""

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="encode")
"""Threads of their own: large texts delay each other, and nothing else."""


class TextTooLargeError(LockstepError, ValueError):
    """A text has more tokens than a path may have, whatever they are."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"a text of at least {num_tokens} tokens")
        self.num_tokens = num_tokens
        """Tokens that the text has at least."""


class _Large(BaseException):  # not an Exception: a renderer may catch those
    """A text is too large to be encoded on the event loop."""


class Call:
    """The texts that one call encodes."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_chars, self._is_beside = max_tokens, 0, False
        self.known: dict[str, list[int]] = {}

    def run(self, make: Callable[[], T], *, is_beside: bool) -> T:
        """Calls `make`, whose texts are looked up here first."""
        self._num_chars, self._is_beside = 0, is_beside
        token = CURRENT.set(self)
        try:
            return make()
        finally:
            CURRENT.reset(token)

    def encode(self, text: str, encode: Callable[[str], list[int]], *, longest: int) -> list[int]:
        """longest: bytes of the tokenizer's longest token."""
        if (known := self.known.get(text)) is not None:
            return known
        self._num_chars += len(text)
        if self._num_chars > longest * self._max_tokens:
            raise TextTooLargeError(self._num_chars // longest)
        if self._num_chars <= LOOP_CHARS:
            return encode(text)
        if not self._is_beside:
            raise _Large
        self.known[text] = encode(text)
        return self.known[text]


CURRENT: ContextVar[Call | None] = ContextVar("CURRENT", default=None)
"""The call whose texts `Tokenizer.encode` encodes; None outside of `encoded`."""


async def encoded(make: Callable[[], T], *, max_tokens: int) -> T:
    """Returns `make()`, which encodes text, without keeping the event loop from other work.

    `make` has no effects. If the texts are large, it runs in a thread first, where it may see a
    state that changes meanwhile. It then runs on the event loop and finds the ids; nothing else
    runs before its result is returned. max_tokens: tokens that a path may have. Raises
    TextTooLargeError by the length alone if they cannot fit, and what `make` raises.
    """
    call = Call(max_tokens)
    while True:
        try:
            return call.run(make, is_beside=False)
        except _Large:
            pass
        num_known = len(call.known)
        rehearsal = partial(call.run, make, is_beside=True)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(_THREADS, copy_context().run, rehearsal)
        except RuntimeError:
            if len(call.known) == num_known:
                raise
            # The state changed under the rehearsal. What it encoded is kept.
