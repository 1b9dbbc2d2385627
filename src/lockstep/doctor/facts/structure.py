"""Facts about what a row is made of: prompts twice, padding inside, versions of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.doctor.facts.base import MIN_EQUAL, Contradiction, fact
from lockstep.doctor.findings import Setting
from lockstep.doctor.rows import Rows


@fact("prompt_twice", claim="a row holds its prompt once")
def prompt_twice(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    begin = list[int]()
    end = list[int]()
    first = rows.firsts(np.flatnonzero(rows.sampled))
    for row, tokens in enumerate(rows.slices):
        size = min(int(first[row]), tokens.stop) - tokens.start
        prompt = rows.token_ids[tokens.start : tokens.start + size]
        half = size // 2
        if half >= 2 * MIN_EQUAL and np.array_equal(prompt[:half], prompt[half:]):
            begin.append(tokens.start + half)
            end.append(tokens.start + size)
    note = "the row contains the prompt twice"
    yield Contradiction("duplicated_prompt", note, begin, end, reaches_on=not setting.model)


@fact("padding", claim="no padding stands inside of a row, or before it")
def padding(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    ids, position = rows.token_ids, rows.position
    is_same = np.zeros(rows.num_tokens, np.bool_)
    is_same[1:] = (ids[1:] == ids[:-1]) & (position[1:] > 0)
    is_free = ~rows.sampled
    begin, end = rows.runs(is_same & is_free)
    size = end - begin + 1
    pad = -1 if setting.pad_id is None else setting.pad_id
    is_pad = (ids[np.maximum(begin, 0)] == pad) & (size >= MIN_EQUAL)
    if setting.pad_id is None and len(begin):
        # Nobody names the id: it opens rows, stands right before a reply, or is longer than text.
        is_near = rows.sampled[np.minimum(end, rows.num_tokens - 1)] | (position[begin] == 1)
        is_pad = (size >= 2 * MIN_EQUAL) & (is_near | (size >= 4 * MIN_EQUAL))
        control = setting.tokenizer.control_ids if setting.tokenizer is not None else frozenset()
        if control:
            is_pad |= np.isin(ids[begin], list(control)) & (size >= MIN_EQUAL)
    row_end = rows.offsets[rows.row_of[begin] + 1] if len(begin) else begin
    inside = is_pad & (end < row_end) & (begin > 0)
    sampled_after = rows.num_in(rows.sampled, begin, row_end) > 0
    chosen = inside & sampled_after
    note = "padding stands before or between tokens of a row"
    # A model scores the row without it (hypotheses/structure): what else is wrong then shows.
    yield Contradiction(
        "padding", note, begin[chosen] - 1, end[chosen], reaches_on=not setting.model
    )


@fact(
    "versions",
    claim="tokens are drawn by weights that the trainer has had",
    needs=("policy_version", "trainer_version"),
)
def versions(rows: Rows, setting: Setting) -> Iterator[Contradiction]:
    assert rows.policy_version is not None and rows.trainer_version is not None, "needed"
    trainer_version = rows.trainer_version[rows.row_of]
    known = rows.sampled & rows.loss_mask & (rows.policy_version >= 0) & (trainer_version >= 0)
    age = trainer_version - rows.policy_version
    begin, end = rows.runs(known & (age < 0))
    note = "a token's version is newer than the weights that trained on it"
    yield Contradiction("late_version", note, begin, end, moves=False)
    if setting.max_staleness is not None:
        begin, end = rows.runs(known & (age > setting.max_staleness))
        note = f"tokens are more than max_staleness={setting.max_staleness} updates old"
        yield Contradiction("stale", note, begin, end)
