"""All rows of a run or a dump, a page at a time: what `lockstep report --serve` serves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.doctor.checks.attribution import SPELLINGS, Spellings, is_touched
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.diagnosis import Diagnosis, evidence_to_json
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
"""Rows that are kept when they have been read: going back and forth is quick."""
MAX_CACHED_TOKENS = 4_000_000
"""Of these rows: some 40 bytes each."""

NO_TURN = -1
SORTS = ("mismatch", "order", "long", "low", "high")
KINDS = (*SPELLINGS, "forced")


class BrowsedRows:
    """The rows of a diagnosed input, in an index of some hundred bytes a row, made in one pass.

    Of a run it has every stored trajectory, evaluations and failed ones too. A row of a dump is
    read from the beginning of its file each time that it is opened, unless it was just seen.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._run = load_run(diagnosis.dump.path) if isinstance(diagnosis.dump, RunDump) else None
        self._checks = [check.cause for check in diagnosis.examination.repairs]
        self._evidence: dict[str, list[dict[str, Any]]] = {}
        for finding in diagnosis.examination.findings:
            if finding.evidence and finding.check not in self._checks:
                self._checks.append(finding.check)
            for piece in finding.evidence:
                self._evidence.setdefault(piece.row, []).append(
                    {"check": finding.check, **evidence_to_json(piece)}
                )
        self._cache: OrderedDict[int, Rows | TrajectoryRecord] = OrderedDict()
        self._orders: dict[str, npt.NDArray[np.int64]] = {}
        if self._run is None:
            self._index = _Index.of(self._looks())
        else:
            self._index, self._addresses = _index_of_run(self._run, self._looks())

    def _looks(self) -> Iterable[tuple[Rows, dict[str, npt.NDArray[Any]]]]:
        """Chunks, each with what the index says of its rows."""
        tokenizer = self._diagnosis.setting.tokenizer
        spellings = None if tokenizer is None else Spellings(tokenizer)
        for rows in self._diagnosis.dump.chunks():
            yield rows, _look(rows, self._diagnosis, self._checks, self._evidence, spellings)

    # -- what is served -----------------------------------------------------------------------

    def page(self) -> str:
        diagnosis = self._diagnosis
        document = {
            **page_frame(
                title=Path(diagnosis.name).resolve().name,
                rows=(),
                tokenizer=diagnosis.setting.tokenizer,
            ),
            "input": diagnosis.name,
            "outcome": diagnosis.outcome,
            "num_rows": len(self._index),
            "checks": self._checks,
            "kinds": self._index.seen_kinds(),
            "turns": self._index.seen_turns(),
            "splits": self._index.seen_splits(),
            "statuses": self._index.seen_statuses(),
        }
        return render_page(document, TEMPLATE)

    def list(self, query: Mapping[str, str]) -> dict[str, Any]:
        """query: sort, page, text, turn, kind, check, split, status; an empty value is any.

        turn, kind: of the token with the row's largest |d|. check: a cause whose repair changes the
        row, or a check that shows it.
        """
        index = self._index
        sort = query.get("sort") or "mismatch"
        if sort not in SORTS:
            raise ValueError(f"sort={sort}: one of {', '.join(SORTS)}")
        keep = np.ones(len(index), np.bool_)
        if turn := query.get("turn"):
            keep &= index.turns == int(turn)
        for name, known, values in (
            ("kind", KINDS, index.kinds),
            ("split", index.split_names, index.splits),
            ("status", index.status_names, index.statuses),
        ):
            if wanted := query.get(name):
                keep &= values == (known.index(wanted) if wanted in known else -2)
        if check := query.get("check"):
            bit = self._checks.index(check) if check in self._checks else None
            keep &= False if bit is None else (index.marks >> np.uint64(bit)) & np.uint64(1) == 1
        order = self._order(sort)
        chosen = order[keep[order]]
        if text := query.get("text", "").lower():
            chosen = np.array([i for i in chosen.tolist() if text in index.words(i)], np.int64)
        number = max(int(query.get("page") or 0), 0)
        shown = chosen[number * PAGE_ROWS : (number + 1) * PAGE_ROWS]
        return {
            "total": len(chosen),
            "page": number,
            "pages": -(-len(chosen) // PAGE_ROWS),
            "rows": [index.summary(i, self._checks) for i in shown.tolist()],
        }

    def read(self, number: int, query: Mapping[str, str]) -> dict[str, Any] | None:
        """query: first, the token to begin with, of a row that is too long to be shown at once."""
        if number >= len(self._index):
            return None
        first = int(query["first"]) if query.get("first") else None
        checks = self._index.summary(number, self._checks)["checks"]
        found = self._read(number)
        if isinstance(found, Rows):
            proof = self._evidence.get(found.row_ids[0], [])
            row = row_document(found, why=checks, evidence=proof, first=first)
        else:
            split = self._index.split_names[int(self._index.splits[number])]
            row = to_document(found, run=0, split=split, why=checks)
        row["number"] = number
        expected = [i for piece in row.get("evidence", ()) for i in piece["expected_ids"]]
        tokenizer = self._diagnosis.setting.tokenizer
        return {"row": row, "vocabulary": vocabulary([row], tokenizer, expected)}

    def _read(self, number: int) -> Rows | TrajectoryRecord:
        """A row, or the whole trajectory of a run unless it is too long: then the path to a leaf,
        as a row."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        if self._run is None:
            found = fetch(self._diagnosis.dump, numbers=[number])[number]
        else:
            found = self._run.read(self._addresses[number])
            if self._index.num_tokens[number] > MAX_ROW_TOKENS:
                found = path_as_rows(found)
        self._cache[number] = found
        sizes = [int(self._index.num_tokens[i]) for i in self._cache]
        while len(sizes) > 1 and (len(sizes) > MAX_CACHED or sum(sizes) > MAX_CACHED_TOKENS):
            self._cache.popitem(last=False)
            sizes.pop(0)
        return found

    def _order(self, sort: str) -> npt.NDArray[np.int64]:
        if sort not in self._orders:
            index = self._index
            key = {
                "mismatch": -index.largest,
                "order": np.arange(len(index)),
                "long": -index.num_tokens,
                "low": np.nan_to_num(index.rewards, nan=np.inf),
                "high": np.nan_to_num(-index.rewards, nan=np.inf),
            }[sort]
            self._orders[sort] = np.argsort(key, kind="stable")
        return self._orders[sort]


class _Index:
    """What is known of each row without its tokens: arrays of one entry per row."""

    def __init__(self, names: Sequence[str], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self.names = names
        self.steps = columns["steps"]
        self.rewards = columns["rewards"]
        self.num_tokens = columns["num_tokens"]
        self.largest = columns["largest"]
        self.turns = columns["turns"]
        self.kinds = columns["kinds"]
        self.marks = columns["marks"]
        self.splits = np.zeros(len(names), np.int64)
        self.statuses = np.zeros(len(names), np.int64)
        self.split_names: list[str] = ["train"]
        self.status_names: list[str] = ["finished"]
        self.tasks: Sequence[str] = ()

    @classmethod
    def of(cls, looks: Iterable[tuple[Rows, dict[str, npt.NDArray[Any]]]]) -> _Index:
        names: list[str] = []
        parts: list[dict[str, npt.NDArray[Any]]] = []
        for rows, columns in looks:
            names += rows.row_ids
            parts.append(columns)
        joined = {
            name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0)
            for name in _COLUMNS
        }
        return cls(names, joined)

    def __len__(self) -> int:
        return len(self.names)

    def words(self, i: int) -> str:
        """What a search looks through."""
        return f"{self.names[i]} {self.tasks[i] if self.tasks else ''}".lower()

    def seen_splits(self) -> list[str]:
        return [self.split_names[i] for i in np.unique(self.splits).tolist()]

    def seen_statuses(self) -> list[str]:
        return [self.status_names[i] for i in np.unique(self.statuses).tolist()]

    def seen_kinds(self) -> list[str]:
        return [KINDS[i] for i in np.unique(self.kinds).tolist() if i >= 0]

    def seen_turns(self) -> list[int]:
        return [i for i in np.unique(self.turns).astype(int).tolist() if i >= 0][:100]

    def summary(self, i: int, checks: Sequence[str]) -> dict[str, Any]:
        marks, step = int(self.marks[i]), int(self.steps[i])
        reward, largest = float(self.rewards[i]), float(self.largest[i])
        return {
            "number": i,
            "id": self.names[i],
            "task": self.tasks[i] if self.tasks else "",
            "step": step if step >= 0 else None,
            "split": self.split_names[int(self.splits[i])],
            "status": self.status_names[int(self.statuses[i])],
            "reward": None if np.isnan(reward) else encode_number(reward),
            "num_tokens": int(self.num_tokens[i]),
            "largest": largest if largest >= 0 else None,
            "turn": int(self.turns[i]) if self.turns[i] >= 0 else None,
            "kind": KINDS[int(self.kinds[i])] if self.kinds[i] >= 0 else None,
            "checks": [name for bit, name in enumerate(checks) if marks >> bit & 1],
        }


_COLUMNS = ("steps", "rewards", "num_tokens", "largest", "turns", "kinds", "marks")


def _look(
    rows: Rows,
    diagnosis: Diagnosis,
    checks: Sequence[str],
    evidence: Mapping[str, Any],
    spellings: Spellings | None,
) -> dict[str, npt.NDArray[Any]]:
    """[R] of each column, of a chunk's rows."""
    size = len(rows)
    largest = largest_gaps(rows)
    turns, kinds = np.full(size, NO_TURN, np.int64), np.full(size, -1, np.int64)
    # The last token of each row whose |d| is the row's largest.
    gap = np.abs(rows.gap)
    worst = np.flatnonzero(gap == largest[rows.row_of])
    of = rows.row_of[worst]
    turns[of] = rows.turns[worst]
    if spellings is not None:
        kinds[of] = spellings.of(rows.token_ids[worst])
    if rows.rollout_logprobs is not None:
        # A forced token is told by that, unless it is one of the protocol, as most of them are.
        is_text = kinds[of] != SPELLINGS.index("control")
        is_forced = rows.rollout_logprobs[worst] > FORCED_LOGPROB
        kinds[of[is_text & is_forced]] = KINDS.index("forced")
    marks = np.zeros(size, np.uint64)
    repaired = rows
    for bit, check in enumerate(diagnosis.examination.repairs[:64]):
        after = check.repair(repaired)
        if len(after) == size:
            marks |= is_touched(repaired, after).astype(np.uint64) << np.uint64(bit)
            repaired = after
    for i, name in enumerate(rows.row_ids):
        for piece in evidence.get(name, ()):
            if piece["check"] in checks[:64]:
                marks[i] |= np.uint64(1 << checks.index(piece["check"]))
    nothing = np.full(size, np.nan)
    return {
        "steps": np.full(size, -1) if rows.steps is None else rows.steps,
        "rewards": nothing if rows.rewards is None else rows.rewards,
        "num_tokens": rows.sizes,
        "largest": largest,
        "turns": turns,
        "kinds": kinds,
        "marks": marks,
    }


def _index_of_run(
    run: Run, looks: Iterable[tuple[Rows, dict[str, npt.NDArray[Any]]]]
) -> tuple[_Index, list[TrajectoryAddress]]:
    """Every stored trajectory with what its rows say: the worst of them, and all their marks."""
    stored = [(s, a, split) for split in run.splits() for s, a in run.summaries(split=split)]
    size = len(stored)
    splits = sorted({split for _, _, split in stored})
    statuses = sorted({s.status for s, _, _ in stored})
    columns = {
        "steps": np.array([s.step for s, _, _ in stored], np.int64),
        "rewards": np.array([s.reward for s, _, _ in stored], np.float64),
        "num_tokens": np.array([s.num_tokens for s, _, _ in stored], np.int64),
        "largest": np.array(
            [-1.0 if (d := s.max_abs_logprob_diff) is None else d for s, _, _ in stored]
        ),
        "turns": np.full(size, NO_TURN, np.int64),
        "kinds": np.full(size, -1, np.int64),
        "marks": np.zeros(size, np.uint64),
    }
    index = _Index([s.id for s, _, _ in stored], columns)
    index.split_names, index.status_names = splits, statuses
    index.splits = np.array([splits.index(split) for _, _, split in stored], np.int64)
    index.statuses = np.array([statuses.index(s.status) for s, _, _ in stored], np.int64)
    index.tasks = [s.task_id for s, _, _ in stored]
    places = {s.id: i for i, (s, _, split) in enumerate(stored) if split == "train"}
    worst = np.full(size, -1.0)
    for rows, found in looks:
        for r, name in enumerate(rows.row_ids):
            i = places.get(name.rpartition("/")[0])
            if i is None:
                continue
            columns["marks"][i] |= found["marks"][r]
            if found["largest"][r] >= worst[i]:
                worst[i] = found["largest"][r]
                columns["turns"][i], columns["kinds"][i] = found["turns"][r], found["kinds"][r]
    return index, [address for _, address, _ in stored]
