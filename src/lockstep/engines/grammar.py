"""Grammars of replies: which ids may come next, by llguidance.

A grammar is text in llguidance's dialect of Lark. `<[7]>` means token 7. Everything else is matched
on the bytes of text tokens, in any spelling, and never on a control token's name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import EngineError, require_package


def _llguidance() -> Any:
    needed_for = "a constrained reply (response_format, a forced tool)"
    require_package("llguidance", extra="grammar", needed_for=needed_for)
    return import_module("llguidance")


def grammar_problem(grammar: str) -> str:
    """Error in a grammar, in words; empty if there is none. Raises MissingExtraError."""
    return _llguidance().LLMatcher.validate_grammar(grammar, None)


class Vocabulary:
    """The tokens that grammars are matched on.

    token_bytes: bytes of each id; for a control token its name. control_ids: ids that no text may
    spell, including ids without bytes and the padding up to `vocab_size`.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], control_ids: Collection[int], vocab_size: int
    ) -> None:
        padding = [b""] * (vocab_size - len(token_bytes))
        self.tokens = [
            spelled or f"<|unused:{id_}|>".encode()
            for id_, spelled in enumerate([*token_bytes, *padding])
        ]
        unused = [id_ for id_, known in enumerate([*token_bytes, *padding]) if not known]
        self.special_token_ids = sorted({*control_ids, *unused})
        # llguidance wants an id that ends a text. Grammars name the ids that end a turn.
        self.eos_token_id = next(iter(self.special_token_ids), 0)
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Would encode bytes that the grammar forces. They are sampled here, in any spelling."""
        return []

    @cached_property
    def _indexed(self) -> Any:
        library = _llguidance()
        return library.LLTokenizer(library.TokenizerWrapper(self))

    def begin(self, grammar: str) -> GrammarState:
        """Raises EngineError for a grammar that cannot be read."""
        unforced = '%llguidance {"no_forcing": true}\n'
        matcher = _llguidance().LLMatcher(self._indexed, unforced + grammar, log_level=0)
        if matcher.is_error():
            raise EngineError(f"the grammar cannot be read: {matcher.get_error()}")
        return GrammarState(matcher, len(self.tokens))


class GrammarState:
    """One reply's place in its grammar.

    >>> words = Vocabulary([b"a", b"b", b"ab", b"<end>"], {3}, vocab_size=4)     # doctest: +SKIP
    >>> state = words.begin('start: "ab" <[3]>')                                 # doctest: +SKIP
    >>> state.allowed().tolist()                                                 # doctest: +SKIP
    [True, False, True, False]
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[V]: the ids that may come next."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").astype(np.bool_)

    def advance(self, id_: int) -> str:
        """Takes the id that was drawn. Returns what went wrong, or nothing."""
        is_taken = self._matcher.consume_token(id_)
        return "" if is_taken else self._matcher.get_error() or f"id {id_} is not allowed"
