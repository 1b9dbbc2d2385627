"""The diagnosis as one HTML file that needs nothing else, drawn by the parts of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.doctor.diagnosis import MAX_EXPECTED, Diagnosis
from lockstep.doctor.rows import Rows
from lockstep.errors import ConfigError
from lockstep.observe.alarms import CRITICAL_LIMIT, WARNING_LIMIT
from lockstep.report.document import Template, render_page, to_document, to_vocabulary
from lockstep.store.files import encode_number, write_atomically
from lockstep.store.trajectories import TrajectoryRecord
from lockstep.types import Float32Array, Message, Segment, Task, Trajectory

TEMPLATE = Template(
    page="doctor.html",
    styles=("style.css", "doctor.css"),
    scripts=("base.js", "charts.js", "trajectories.js", "evidence.js", "doctor.js"),
    label="Lockstep doctor",
)

MAX_PAGE_BYTES = 30_000_000
MAX_ROW_TOKENS = 10_000
"""Tokens shown of a longer row, around its evidence: a browser lays them out in a second."""
DIVERGENCE = 0.1
"""Smallest |d| in nats that counts as the first divergence of a row: 10 % more or less likely. No
pair of precisions causes it at an ordinary token."""


NUM_ROWS, NUM_TOKENS = 200, 300_000
"""Rows and tokens of a page that opens at once: about 40 bytes a token, with two log-probs and an
advantage."""


def write_page(diagnosis: Diagnosis, out: str | Path, *, num_rows: int = NUM_ROWS) -> Path:
    """Writes `out`, an .html file of at most MAX_PAGE_BYTES, and returns it.

    It holds the diagnosis, the rows that prove it, the worst rows and a sample. Rows that would
    make it larger are left out and counted.
    """
    out = Path(out)
    rows, num_left_out = rows_to_show(diagnosis, num_rows, NUM_TOKENS)
    while True:
        page = render_page(build_document(diagnosis, rows, num_left_out), TEMPLATE).encode()
        if len(page) <= MAX_PAGE_BYTES or not rows:
            break
        num_left_out += len(rows) - len(rows) // 2
        rows = rows[: len(rows) // 2]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: file.write(page))
    except OSError as error:
        raise ConfigError(f"--out {out}: the page cannot be written there ({error}).") from error
    return out


def build_document(
    diagnosis: Diagnosis, rows: Sequence[Mapping[str, Any]], num_left_out: int
) -> dict[str, Any]:
    """The content of the page as JSON, in the form of a report of one run."""
    pieces = [piece for found in diagnosis.examination.findings for piece in found.evidence]
    used = {i for piece in pieces for i in piece.expected_ids[:MAX_EXPECTED]}
    used = used.union(*(s["token_ids"] for row in rows for s in row["segments"]))
    title = Path(diagnosis.name).resolve().name
    return {
        "document_version": 1,
        "title": title,
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "limits": {"warning": WARNING_LIMIT, "critical": CRITICAL_LIMIT},
        "runs": [{"name": title, "group": 0, "mismatch_band": None}],
        "groups": [{"label": title, "runs": [0], "seeds": [None]}],
        "metrics": {},
        "trajectories": rows,
        "vocabularies": [to_vocabulary(used, diagnosis.setting.tokenizer)],
        "num_stored_trajectories": diagnosis.examination.num_rows,
        "num_left_out_for_size": num_left_out,
        "diagnosis": diagnosis.to_json(),
    }


# -- rows ---------------------------------------------------------------------------------------


def rows_to_show(
    diagnosis: Diagnosis, num_rows: int, num_tokens: int
) -> tuple[list[dict[str, Any]], int]:
    """(documents of rows, how many were left out as too long): proof, then the worst, a sample."""
    evidence = diagnosis.evidence_by_row()
    chosen = dict(diagnosis.examination.choice.numbers)
    found = diagnosis.dump.find(numbers=chosen, names=evidence)
    order = [number for number, rows in found.items() if rows.row_ids[0] in evidence]
    order += [number for number in chosen if number in found and number not in order]
    out: list[dict[str, Any]] = []
    tokens = left_out = 0
    for number in order:
        rows = found[number]
        size = min(rows.num_tokens, MAX_ROW_TOKENS)
        if len(out) >= num_rows:
            break
        if out and tokens + size > num_tokens:
            left_out += 1
            continue
        tokens += size
        proof = evidence.get(rows.row_ids[0], [])
        why = [piece["check"] for piece in proof]
        why += [chosen[number]] if number in chosen else []
        out.append(row_document(rows, why=list(dict.fromkeys(why)), evidence=proof))
    return out, left_out


def row_document(
    rows: Rows, *, why: Sequence[str], evidence: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """One row (`rows` has no other) as the page's scripts read a trajectory: a chain of segments,
    each sampled or observed. `begin` is the place of a segment's first token in its row. Of a row
    with more than MAX_ROW_TOKENS tokens, those around the evidence, or the worst one.
    """
    gap = np.abs(rows.gap)
    apart = np.flatnonzero(gap > DIVERGENCE)
    first, last = _window(rows, evidence)
    spans = _segments(rows, first, last)

    def numbers(column: Float32Array | None) -> list[Float32Array | None]:
        """The column cut into segments; None for one without any number."""
        if column is None:
            return [None] * len(spans)
        parts = (column[begin:end] if rows.sampled[begin] else None for begin, end in spans)
        return [None if part is None or np.isnan(part).all() else part for part in parts]

    versions = np.full(rows.num_tokens, -1) if rows.policy_version is None else rows.policy_version
    parts = zip(spans, numbers(rows.rollout_logprobs), _messages_of(rows, spans), strict=True)
    segments = [
        Segment(
            parent=number - 1 if number else None,
            token_ids=rows.token_ids[begin:end],
            is_sampled=bool(rows.sampled[begin]),
            turn=max(int(rows.turns[begin]), 0),
            logprobs=logprobs,
            policy_version=None if versions[begin] < 0 else int(versions[begin]),
            messages=tuple(messages),
        )
        for number, ((begin, end), logprobs, messages) in enumerate(parts)
    ]
    record = TrajectoryRecord(
        step=-1,
        group=-1,
        task=Task(id=""),
        trajectory=Trajectory(id=rows.row_ids[0], status="finished", segments=segments),
        trainer_logprobs=tuple(numbers(rows.trainer_logprobs)),
        advantages=tuple(numbers(rows.advantages)),
        importance_weights=(None,) * len(spans),
    )
    document = to_document(record, run=0, split="train", why=why)
    for segment, (begin, _) in zip(document["segments"], spans, strict=True):
        segment |= {"begin": begin, "is_trained": bool(rows.loss_mask[begin])}
    is_whole = last - first == rows.num_tokens
    return document | {
        "step": None if rows.steps is None else int(rows.steps[0]),
        "group": None if rows.groups is None else int(rows.groups[0]),
        "reward": None if rows.rewards is None else encode_number(float(rows.rewards[0])),
        "cut": "" if is_whole else f"tokens {first} to {last - 1} of {rows.num_tokens}",
        "first_divergence": int(apart[0]) if len(apart) else None,
        "evidence": list(evidence),
    }


def _window(rows: Rows, evidence: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(first, last + 1) token to show: all, or MAX_ROW_TOKENS around the evidence."""
    size = rows.num_tokens
    if size <= MAX_ROW_TOKENS:
        return 0, size
    worst = int(np.nan_to_num(np.abs(rows.gap)).argmax())
    small = [piece for piece in evidence if piece["end"] - piece["begin"] <= MAX_ROW_TOKENS // 2]
    centre = int(small[0]["begin"]) if small else worst
    first = min(max(0, centre - MAX_ROW_TOKENS // 2), size - MAX_ROW_TOKENS)
    return first, first + MAX_ROW_TOKENS


def _segments(rows: Rows, first: int, last: int) -> list[tuple[int, int]]:
    """Stretches of tokens that are alike: sampled or not, trained or not, of one turn."""
    if first == last:
        return []
    state = np.stack([rows.sampled, rows.loss_mask, rows.turns], 1)[first:last]
    edges = first + 1 + np.flatnonzero((state[1:] != state[:-1]).any(1))
    edges = [first, *edges.tolist(), last]
    return list(pairwise(edges))


def _messages_of(rows: Rows, spans: Sequence[tuple[int, int]]) -> list[list[Message]]:
    """The dialogue cut at the model's replies, one for each sampled turn; none where their numbers
    are not the same: the row is then not the dialogue."""
    out: list[list[Message]] = [[] for _ in spans]
    dialogue = None if rows.messages is None else rows.messages[0]
    if not dialogue or not spans:
        return out
    turns: dict[int, int] = {}  # turn -> its first sampled stretch
    for number, (begin, _) in enumerate(spans):
        if rows.sampled[begin]:
            turns.setdefault(int(rows.turns[begin]), number)
    replies = [i for i, message in enumerate(dialogue) if message.role == "assistant"]
    if len(replies) != len(turns):
        return out
    before = 0
    for reply, number in zip(replies, turns.values(), strict=True):
        out[max(number - 1, 0)] += dialogue[before:reply]
        out[number].append(dialogue[reply])
        before = reply + 1
    out[-1] += dialogue[before:]
    return out
