"""Facts about text: what the messages say, against the ids of the row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.facts.base import Contradiction, Places, fact
from lockstep.doctor.findings import Setting
from lockstep.doctor.rows import Rows, given
from lockstep.doctor.tokenization import control_spelling
from lockstep.types import Message

SAYS_MORE = "post_processed", "the row says more than the message"


@fact(needs=("messages", "tokenizer"))
def control_in_text(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """Text of tools and users holds no control token."""
    tokenizer = given(setting.tokenizer)
    spelling = control_spelling(tokenizer)
    out = Places(moves=False)
    note = "the row contains text of a message as a control token"
    for row, tokens in enumerate(rows.slices):
        texts = [
            m.content
            for m in given(rows.messages)[row] or ()
            if m.role != "assistant" and spelling.search(m.content)
        ]
        if not texts:
            continue
        ids = rows.token_ids[tokens].tolist()
        pieces = [tokenizer.decode_bytes([i]) if i < tokenizer.vocab_size else b"?" for i in ids]
        spelt, ends = b"".join(pieces), np.cumsum([len(p) for p in pieces])
        places = set[int]()
        for text in texts:
            at = spelt.find(text.encode())
            for found in spelling.finditer(text) if at >= 0 else ():
                place = at + len(text[: found.start()].encode())
                token = int(np.searchsorted(ends, place, side="right"))
                if ids[token] == tokenizer.control_id(found[0]):
                    places.add(tokens.start + token)
        for at in sorted(places):
            out.add("injected_control", note, at, at + 1)
    yield from out.all()


@fact(needs=("messages", "tokenizer"))
def reply_text(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    """Replies say what their messages say."""
    out, after = Places(), Places()
    num_replies = num_after = 0
    for row, mine in enumerate(rows.replies):
        replies = [m for m in given(rows.messages)[row] or () if m.role == "assistant"]
        if len(replies) != len(mine):
            continue
        for message, (begin, end) in zip(replies, mine, strict=True):
            told = _compared(_text(setting, rows, begin, end), message, end != mine[-1][1])
            is_ended = int(rows.token_ids[end - 1]) in setting.stop_ids
            if told and told[0] == "post_processed" and not is_ended:
                told = ("missing_final", "the row lacks the end of what the message says")
            num_replies += 1
            if told == SAYS_MORE:
                num_after += 1
                after.add(*SAYS_MORE, begin, end)
            elif told:
                out.add(*told, begin, end)
    yield from out.all()
    # A template that writes more around every reply does not change replies.
    if num_after <= 0.5 * num_replies:
        yield from after.all()


def _text(setting: Setting, rows: Rows, begin: int, end: int) -> str:
    """The words of a reply, without the id that ends it."""
    tokenizer, ids = given(setting.tokenizer), rows.token_ids[begin:end].tolist()
    if ids and ids[-1] in setting.stop_ids:
        ids.pop()
    return "".join(tokenizer.decode(i for i in ids if i < tokenizer.vocab_size).split())


def _compared(spelt: str, message: Message, is_earlier: bool) -> tuple[str, str] | None:
    """(cause, note) of a reply whose text is not its message's; None where nothing is certain: a
    call, or a message that another program parsed."""
    thinking = "".join(message.thinking.split())
    if len(thinking) > 8 and thinking not in spelt and is_earlier:
        if thinking[:8] in spelt:
            return "post_processed", "the row holds a part of what the message says"
        return "thinking_dropped", "the thinking of an earlier reply is not in the row"
    said = "".join(message.content.split())
    if message.tool_calls or message.parse_error or thinking or len(said) < 4 or not spelt:
        return None
    if said.startswith(spelt) and len(spelt) < len(said):
        return "post_processed", "the row holds a part of what the message says"
    if spelt.startswith(said) and len(said) < len(spelt) <= len(said) + 2:
        return SAYS_MORE
    return None
