"""The ids of a reply that an agent altered: sampled ones, but where its words are others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lockstep.renderers.base import Renderer
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer


def splice_reply(
    renderer: Renderer, sampled: Sequence[int], altered: Sequence[int], *, is_thinking_kept: bool
) -> tuple[list[int], int]:
    """Builds the ids of an altered reply, and counts the newly encoded ids.

    sampled: the turn. altered: the altered reply as `Renderer.render_reply` writes it.
    is_thinking_kept: the agent repeated the turn's thinking or left it out, so its sampled ids
    stay, however the model spelled the tags around it. If those ids are not one run before the
    rest, the thinking is treated like any other words.
    """
    sampled, altered = list(sampled), list(altered)
    thought: list[int] = []
    if is_thinking_kept:
        rest = renderer.without_thinking(sampled)
        size = len(sampled) - len(rest)
        if size >= 0 and sampled[size:] == rest:
            thought, sampled, altered = sampled[:size], rest, renderer.without_thinking(altered)
    head, tail = common_ends(renderer.tokenizer, sampled, altered)
    new = altered[head[1] : len(altered) - tail[1]]
    kept = sampled[len(sampled) - tail[0] :]
    return [*thought, *sampled[: head[0]], *new, *kept], len(new)


def common_ends(
    tokenizer: Tokenizer, left: Sequence[int], right: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Counts the ids that spell the same at the beginning, and at the end, of two sequences: up to
    the last place where both have a token border. The two ends do not overlap.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> common_ends(tokenizer, tokenizer.encode("it is 4. "), tokenizer.encode("it is 4."))
    ((8, 8), (0, 0))
    """
    units = [[_units(tokenizer, int(id_)) for id_ in ids] for ids in (left, right)]
    head = _common(*units)
    rest = [[each[::-1] for each in ids[at:][::-1]] for ids, at in zip(units, head, strict=True)]
    return head, _common(*rest)


def _common(left: list[list[int]], right: list[list[int]]) -> tuple[int, int]:
    flat = [[unit for token in tokens for unit in token] for tokens in (left, right)]
    same = first_difference(*flat)
    borders = [
        {0: 0, **{end: at for at, end in enumerate(accumulate(map(len, tokens)), start=1)}}
        for tokens in (left, right)
    ]
    end = max(at for at in borders[0].keys() & borders[1].keys() if at <= same)
    return borders[0][end], borders[1][end]


def _units(tokenizer: Tokenizer, id_: int) -> list[int]:
    """Bytes of text; one number that no byte has for a control token, and for an id that spells
    nothing: it is equal to itself alone."""
    spelled = b"" if id_ in tokenizer.control_ids else tokenizer.token_bytes(id_)
    return list(spelled) or [256 + id_]
