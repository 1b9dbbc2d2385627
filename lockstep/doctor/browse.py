"""All rows of a run or a dump, a page at a time: the content of `lockstep report --serve`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.doctor.checks.attribution import SPELLINGS, Spellings, is_touched
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.diagnosis import Diagnosis
from lockstep.doctor.html_page import MAX_ROW_TOKENS, page_frame, row_document, vocabulary
from lockstep.doctor.inputs.run_dump import RunDump
from lockstep.doctor.row_choice import fetch, largest_gaps
from lockstep.doctor.stored_paths import path_as_rows
from lockstep.report.page import Template, render_page
from lockstep.report.selection import to_document
from lockstep.store.files import encode_number
from lockstep.store.run import Run, TrajectoryAddress, load_run
from lockstep.store.trajectories import TrajectoryRecord
from lockstep.types import FORCED_LOGPROB

TEMPLATE = Template(
    page="served.html",
    styles=("style.css", "doctor.css"),
    scripts=("base.js", "charts.js", "trajectories.js", "evidence.js", "served.js"),
    label="Lockstep rows",
    is_served=True,
)
PAGE_ROWS = 50
MAX_CACHED = 32
"""Rows that stay in memory after they were read, so that going back and forth is quick."""
MAX_CACHED_TOKENS = 4_000_000
"""Tokens of these rows: some 40 bytes each."""
SORTS: Mapping[str, tuple[str, str]] = {
    "mismatch": ("largest", "descending"),
    "order": ("number", "ascending"),
    "long": ("num_tokens", "descending"),
    "low": ("reward", "ascending"),
    "high": ("reward", "descending"),
}
"""Order of a list -> column of the index, direction. Rows without a value come last."""


class BrowsedRows:
    """The rows of a diagnosed input, with an index of some hundred bytes per row.

    A run has every stored trajectory, evaluations and failed ones too. A row of a dump is read from
    the beginning of its file each time that it is opened, unless it was just shown.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._run = load_run(diagnosis.dump.path) if isinstance(diagnosis.dump, RunDump) else None
        self._evidence = diagnosis.evidence_by_row()
        shown = [f.check for f in diagnosis.examination.findings if f.evidence]
        causes = [check.cause for check in diagnosis.examination.repairs]
        self._checks = list(dict.fromkeys([*causes, *shown]))[:64]
        """Bits of the column `marks`."""
        self._cache: OrderedDict[int, Rows | TrajectoryRecord] = OrderedDict()
        self._addresses: list[TrajectoryAddress] = []
        if self._run is None:
            parts = [_index_of(columns) for columns in self._looks()]
            index = pa.concat_tables([_COLUMNS.empty_table(), *parts])
        else:
            index, self._addresses = _index_of_run(self._run, self._looks())
        self._index = index.append_column("number", pa.array(np.arange(len(index))))

    def _looks(self) -> Iterator[dict[str, Any]]:
        """Columns of the index for each chunk of the dump."""
        tokenizer = self._diagnosis.setting.tokenizer
        spellings = None if tokenizer is None else Spellings(tokenizer)
        for rows in self._diagnosis.dump.chunks():
            yield {"id": rows.row_ids, **_worst_tokens(rows, spellings), "marks": self._marks(rows)}

    def _marks(self, rows: Rows) -> np.ndarray[Any, Any]:
        """[R] bits: causes whose repair changes the row, and checks with evidence in it."""
        marks = np.zeros(len(rows), np.uint64)
        repaired = rows
        for check in self._diagnosis.examination.repairs:
            after = check.repair(repaired)
            if len(after) == len(rows) and check.cause in self._checks:
                bit = np.uint64(self._checks.index(check.cause))
                marks |= is_touched(repaired, after).astype(np.uint64) << bit
                repaired = after
        for i, name in enumerate(rows.row_ids):
            for piece in self._evidence.get(name, ()):
                if piece["check"] in self._checks:
                    marks[i] |= np.uint64(1 << self._checks.index(piece["check"]))
        return marks

    # -- content of the server ----------------------------------------------------------------

    def page(self) -> str:
        diagnosis, index = self._diagnosis, self._index

        def seen(name: str) -> list[Any]:
            return sorted(value for value in index[name].unique().to_pylist() if value is not None)

        frame = page_frame(
            title=Path(diagnosis.name).resolve().name,
            rows=(),
            tokenizer=diagnosis.setting.tokenizer,
        )
        document = {
            **frame,
            "input": diagnosis.name,
            "outcome": diagnosis.outcome,
            "num_rows": len(index),
            "checks": self._checks,
            "kinds": seen("kind"),
            "turns": seen("turn")[:100],
            "splits": seen("split"),
            "statuses": seen("status"),
        }
        return render_page(document, TEMPLATE)

    def list(self, query: Mapping[str, str]) -> dict[str, Any]:
        """query: sort, page, text, turn, kind, check, split, status; an empty value is any.

        turn, kind: of the token with the row's largest |d|. check: a cause whose repair changes the
        row, or a check with evidence in it.
        """
        sort = query.get("sort") or "mismatch"
        if sort not in SORTS:
            raise ValueError(f"sort={sort}: one of {', '.join(SORTS)}")
        found = self._index
        if turn := query.get("turn"):
            found = found.filter(pc.equal(found["turn"], int(turn)))
        for name in ("kind", "split", "status"):
            if wanted := query.get(name):
                found = found.filter(pc.equal(found[name], wanted))
        if check := query.get("check"):
            bit = 1 << self._checks.index(check) if check in self._checks else 0
            marks = found["marks"].to_numpy()
            found = found.filter(pa.array((marks & np.uint64(bit)) > 0))
        if text := query.get("text"):
            words = pc.binary_join_element_wise(found["id"], found["task"], " ")
            found = found.filter(pc.match_substring(words, text, ignore_case=True))
        column, direction = SORTS[sort]
        order = pc.sort_indices(found, sort_keys=[(column, direction)])
        number = max(int(query.get("page") or 0), 0)
        shown = found.take(order[number * PAGE_ROWS : (number + 1) * PAGE_ROWS])
        return {
            "total": len(found),
            "page": number,
            "pages": -(-len(found) // PAGE_ROWS),
            "rows": [self._summary(row) for row in shown.to_pylist()],
        }

    def _summary(self, row: dict[str, Any]) -> dict[str, Any]:
        marks = row.pop("marks")
        row["checks"] = [name for bit, name in enumerate(self._checks) if marks >> bit & 1]
        row["reward"] = None if row["reward"] is None else encode_number(row["reward"])
        return row

    def read(self, number: int, query: Mapping[str, str]) -> dict[str, Any] | None:
        """query: first, the token to begin with in a row that is too long to show at once."""
        if number >= len(self._index):
            return None
        first = int(query["first"]) if query.get("first") else None
        (summary,) = self._index.slice(number, 1).to_pylist()
        checks = self._summary(summary)["checks"]
        found = self._read(number)
        if isinstance(found, Rows):
            proof = self._evidence.get(found.row_ids[0], [])
            row = row_document(found, why=checks, evidence=proof, first=first)
        else:
            row = to_document(found, run=0, split=summary["split"], why=checks)
        row["number"] = number
        expected = [i for piece in row.get("evidence", ()) for i in piece["expected_ids"]]
        tokenizer = self._diagnosis.setting.tokenizer
        return {"row": row, "vocabulary": vocabulary([row], tokenizer, expected)}

    def _read(self, number: int) -> Rows | TrajectoryRecord:
        """A row of a dump, or a trajectory of a run; of a long one, the path to a leaf as a row."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        sizes = self._index["num_tokens"]
        if self._run is None:
            found = fetch(self._diagnosis.dump, numbers=[number])[number]
        else:
            found = self._run.read(self._addresses[number])
            if sizes[number].as_py() > MAX_ROW_TOKENS:
                found = path_as_rows(found)
        self._cache[number] = found
        cached = [sizes[i].as_py() for i in self._cache]
        while len(cached) > 1 and (len(cached) > MAX_CACHED or sum(cached) > MAX_CACHED_TOKENS):
            self._cache.popitem(last=False)
            cached.pop(0)
        return found


# -- the index ------------------------------------------------------------------------------------

_COLUMNS = pa.schema(
    {
        "id": pa.string(),
        "task": pa.string(),
        "step": pa.int64(),
        "split": pa.string(),
        "status": pa.string(),
        "reward": pa.float64(),
        "num_tokens": pa.int64(),
        "largest": pa.float64(),
        "turn": pa.int64(),
        "kind": pa.string(),
        "marks": pa.uint64(),
    }
)
"""largest: the row's largest |d|. turn, kind: of that token."""


def _worst_tokens(rows: Rows, spellings: Spellings | None) -> dict[str, Any]:
    """Columns of the rows of a chunk."""
    size = len(rows)
    largest = largest_gaps(rows)
    turns, kinds = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    # The last token of each row whose |d| is the row's largest.
    worst = np.flatnonzero(np.abs(rows.gap) == largest[rows.row_of])
    of = rows.row_of[worst]
    turns[of] = rows.turns[worst]
    if spellings is not None:
        kinds[of] = spellings.of(rows.token_ids[worst])
    names = np.array([*SPELLINGS, "forced", None], object)
    if rows.rollout_logprobs is not None:
        # A forced token is named so, unless it is a control token, as most of them are.
        is_text = kinds[of] != SPELLINGS.index("control")
        is_forced = rows.rollout_logprobs[worst] > FORCED_LOGPROB
        kinds[of[is_text & is_forced]] = len(SPELLINGS)
    return {
        "step": [None] * size if rows.steps is None else pa.array(rows.steps, mask=rows.steps < 0),
        "reward": [None] * size if rows.rewards is None else _or_none(rows.rewards),
        "num_tokens": rows.sizes,
        "largest": _or_none(np.where(largest < 0, np.nan, largest)),
        "turn": pa.array(turns, mask=turns < 0),
        "kind": names[kinds].tolist(),
    }


def _or_none(values: np.ndarray[Any, Any]) -> pa.Array:
    """NaN as null."""
    return pa.array(values, from_pandas=True)


def _index_of(columns: Mapping[str, Any]) -> pa.Table:
    size = len(columns["id"])
    constant = {"task": "", "split": "train", "status": "finished"}
    known = {name: [value] * size for name, value in constant.items()} | dict(columns)
    return pa.table({name: known[name] for name in _COLUMNS.names}, schema=_COLUMNS)


def _index_of_run(
    run: Run, looks: Iterator[dict[str, Any]]
) -> tuple[pa.Table, list[TrajectoryAddress]]:
    """Every stored trajectory with the worst token of its rows, and all their marks."""
    stored = [(s, a, split) for split in run.splits() for s, a in run.summaries(split=split)]
    places = {s.id: i for i, (s, _, split) in enumerate(stored) if split == "train"}
    worst = np.full(len(stored), -1.0)
    turns: list[int | None] = [None] * len(stored)
    kinds: list[str | None] = [None] * len(stored)
    marks = np.zeros(len(stored), np.uint64)
    for found in looks:
        per_row = zip(
            found["id"],
            found["largest"].to_pylist(),
            found["turn"].to_pylist(),
            found["kind"],
            found["marks"],
            strict=True,
        )
        for name, largest, turn, kind, bits in per_row:
            i = places.get(name.rpartition("/")[0])
            if i is None:
                continue
            marks[i] |= bits
            if (size := -1.0 if largest is None else largest) >= worst[i]:
                worst[i], turns[i], kinds[i] = size, turn, kind
    columns = {
        "id": [s.id for s, _, _ in stored],
        "task": [s.task_id for s, _, _ in stored],
        "step": [s.step for s, _, _ in stored],
        "split": [split for _, _, split in stored],
        "status": [s.status for s, _, _ in stored],
        "reward": _or_none(np.array([s.reward for s, _, _ in stored], np.float64)),
        "num_tokens": [s.num_tokens for s, _, _ in stored],
        "largest": [s.max_abs_logprob_diff for s, _, _ in stored],
        "turn": turns,
        "kind": kinds,
        "marks": marks,
    }
    return _index_of(columns), [address for _, address, _ in stored]
