"""Facts and hypotheses beside the training of any trainer: some rows of every step, no model.

    watch = lockstep.watch(trainer)            a GRPOTrainer of TRL: that is all
    watch = lockstep.watch("runs/doctor")      any other trainer hands over its batches:
    watch.verl(batch, step=step)               or slime, prime_rl, tinker, rows
    watch.page()                               the page of `lockstep doctor --out`

Rows are made of a batch by the reader of the trainer's dumps. A run of Lockstep is watched by the
same class (monitor.py).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep.doctor.diagnose import diagnose, make_setting
from lockstep.doctor.diagnosis import Diagnosis
from lockstep.doctor.examine import Examination, examine
from lockstep.doctor.html_page import write_page
from lockstep.doctor.inputs.assemble import BY_NAME, in_chunks
from lockstep.doctor.inputs.base import HOW_TO_GET, Facts
from lockstep.doctor.inputs.lines import RowDump, numbers_in
from lockstep.doctor.inputs.native import RowsDump, hint, write_rows
from lockstep.doctor.inputs.trainers import PrimeRlDump, SlimeDump, TinkerDump, TrlDump, VerlDump
from lockstep.doctor.rows import SIDES, Rows
from lockstep.doctor.tokenization import Tokenization, find_tokenization, why_beyond
from lockstep.errors import ConfigError, LockstepError, MismatchError, named
from lockstep.observe.alarms import CRITICAL_LIMIT
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.store.files import write_atomically

MAX_KEPT = 8
"""Steps whose rows are kept for each cause: more of the same prove no more."""
MIN_ROWS = 8
"""Fewest rows of a look: below it most of the time is the same for any number of rows."""
PAGE, VOCABULARY = "doctor.html", "tokenizer.json"
UNEXPLAINED = "unexplained"
"""Told of a gap beyond the critical alarm that has no cause."""

OnCause = Literal["warn", "raise"] | Callable[[MismatchError], object]
Metrics = dict[str, float]
"""Name of a metric -> its value."""
MakeRows = Callable[[int], Rows | None]
"""Limit -> at most this number of rows of a step; None if it has no rows."""
_log = logging.getLogger(__name__)


class Watch:
    """Examines some rows of each step, reports a cause, and keeps its rows.

    Each look begins with another group of rows. It takes about 20 ms, and more for more tokens.
    When a look has taken more than `max_share` of the time since, the next look has fewer rows, and
    waits until the share is kept.

    Rows that show a cause are kept in the directory as Parquet, at most MAX_KEPT steps of each.
    After a restart, the rows of repeated steps are removed. Each process looks at its own rows and
    waits for no other. The names of its files have its rank, and rank 0 writes the page. An error
    of the watch itself is reported once, and ends the watch. Training goes on.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        tokenizer: Any = None,
        renderer: Renderer | str | None = None,
        facts: Facts | None = None,
        rows: int = 32,
        every: int = 1,
        on_cause: OnCause = "warn",
        max_share: float = 0.02,
        warn: Callable[[str], object] = _log.warning,
        clock: Callable[[], float] = time.perf_counter,
        has_page: bool = True,
    ) -> None:
        """tokenizer: an object, also one of transformers, or a name as for `diagnose`. renderer: as
        for `diagnose`. facts: about the run; missing ones are taken from the batches.
        rows: examined of each step, whole groups where groups are known. every: number of
        batches from one look to the next. on_cause: "warn" reports each cause once; "raise" raises
        the MismatchError of a cause; a function gets it. max_share: of the time between looks.
        warn: reports a sentence. has_page: writes the page also when a cause is first found.

        Raises ConfigError for options that cannot be, RendererError for an unusable tokenizer.
        """
        is_known = callable(on_cause) or on_cause in ("warn", "raise")
        is_facts = facts is None or isinstance(facts, Facts)
        for name, value, is_right, expected in (
            ("rows", rows, isinstance(rows, int) and rows >= 1, "a whole number from 1"),
            ("every", every, isinstance(every, int) and every >= 1, "a whole number from 1"),
            ("max_share", max_share, max_share > 0, "above 0: 0.02 is 2 % of the time"),
            ("on_cause", on_cause, is_known, '"warn", "raise" or a function'),
            ("facts", facts, is_facts, "Facts of lockstep.doctor.inputs.base, as Facts(top_p=1.0)"),
        ):
            if not is_right:
                raise ConfigError(f"watch({name}={value!r}): expected {expected}.")
        self.directory = Path(directory)
        self.num_rows, self.every, self.max_share = rows, every, max_share
        self.on_cause, self.warn, self.has_page = on_cause, warn, has_page
        self.facts = facts or Facts()
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        self._words, self._vocabulary = _words(self.facts, tokenizer, renderer)
        """And a tokenizer of transformers as JSON, which is kept beside the rows."""
        self._setting = make_setting(self.facts, self._words)
        if self._vocabulary:
            self.learn(tokenizer=str((self.directory / VOCABULARY).absolute()))
        elif isinstance(tokenizer, str):
            self.learn(tokenizer=tokenizer)
        if tokenizer is not None and (why := self._words.lacks.get("tokenizer")):
            warn(f"doctor: checks of text are not made: {why}")
        self._clock = clock
        self._ended: float | None = None
        """Time of the end of the last look."""
        self._spent = 0.0
        """Seconds of the last look."""
        self._limit, self._num_batches = rows, 0
        self._is_waiting = self._is_off = False
        self._columns: frozenset[str] = frozenset()
        """Columns of the first rows, which all kept rows have."""
        self._kept: dict[int, list[str]] = {}
        """Step whose rows are kept -> its causes, as in a file beside the rows; empty for the
        newest rows of a page."""
        self._told: set[str] = set()
        self._latest: Rows | None = None
        """Rows of the last look, unless they are kept."""
        self._sequences = _Sequences()

    # -- batches of trainers ------------------------------------------------------------------

    def trl(self, batch: Any, *, step: int, group_size: int = 0) -> Metrics:
        """Looks at the value of a GRPOTrainer's `_generate_and_score_completions`.

        group_size: rows of one prompt, one after the other; 0 if it is unknown."""
        return self._look_at(TrlDump, step, batch, group_size=group_size)

    def verl(self, batch: Any, *, step: int, tags: Any = None, keys: Any = None) -> Metrics:
        """Looks at a `DataProto` that has all its columns, or at the TensorDict of the v1 trainer's
        queue: tags and keys are then of its batch."""
        return self._look_at(VerlDump, step, batch, tags=tags, keys=keys)

    def slime(self, batch: Any, *, step: int) -> Metrics:
        """Looks at the `rollout_data` of a rank (with the trainer's log-probs), or at a list of
        samples (without)."""
        return self._look_at(SlimeDump, step, batch, rank=_rank())

    def tinker(self, datums: Sequence[Any], training_logprobs: Any = None, *, step: int) -> Metrics:
        """Looks at the datums of a step, and the log-probs of its forward pass, one tensor each."""
        return self._look_at(TinkerDump, step, datums, training_logprobs)

    def prime_rl(
        self, micro_batch: Mapping[str, Any], output: Any, lengths: Sequence[int], *, step: int
    ) -> Metrics:
        """Takes a micro batch, with arguments of `token_exporter.export`; looks at the sequences of
        a step when the next begins, or the page is written.

        output: the model's, with `logprobs`. lengths: of the sequences that are packed."""
        found: dict[str, float] = {}
        if step != self._sequences.step:
            found = self._look_at_sequences()
            before = self._sequences.num_seen
            self._sequences = _Sequences(step=step, limit=self._rows_of_look(), num_before=before)
        began, taken = self._clock(), self._sequences
        try:
            if taken.wants(len(lengths)):
                made = PrimeRlDump.exported(micro_batch, output["logprobs"], lengths, step=step)
                taken.lines += islice(made, taken.limit - len(taken.lines))
        except Exception as error:
            self._end(step, error)
        taken.seconds += self._clock() - began
        return found

    def _look_at_sequences(self) -> Metrics:
        """Looks at what `prime_rl` took of the step that is over."""
        taken, self._sequences.lines = replace(self._sequences), []
        if not taken.lines or self._is_off:
            return {}
        rows = partial(self._rows_of, PrimeRlDump, taken.step, (taken.lines,), {})
        return self.look(taken.step, rows, taken.limit, taken.seconds)

    def rows(self, rows: Sequence[Mapping[str, Any]], *, step: int) -> Metrics:
        """Looks at rows of your own: mappings with `token_ids`, `loss_mask` and any other columns
        of docs/doctor-dumps.md, as lists, arrays or tensors. A step without rows is passed over."""
        return self._look_at(RowsDump, step, list(rows))

    def _look_at(self, kind: type[RowDump], step: int, *batch: Any, **more: Any) -> Metrics:
        return self.look(step, partial(self._rows_of, kind, step, batch, more))

    def _rows_of(
        self, kind: type[RowDump], step: int, batch: Any, more: Any, limit: int
    ) -> Rows | None:
        """Rows as the dumps of a trainer give them. batch, more: arguments of `RowDump.live`."""
        groups, rows_at, facts = kind.live(*batch, step=step, **more)
        made = list(rows_at(choose(groups, limit, step=step)))
        if not made:
            return None
        found = frozenset({"row_ids", "token_ids", "loss_mask"}).union(*(r.columns for r in made))
        self.learn(**facts | kind.facts_in(found))
        lost = next((row.unread for row in made if row.unread), "")
        if lost:
            self._warn_once("messages", f"step {step}: doctor: messages are left out: {lost}")
        if not self._columns:
            for side, name in ((s, name) for s, name in SIDES.items() if name not in found):
                self.warn(
                    f"step {step}: doctor: the rows have no log-probs of the {side}, so checks "
                    "that compare the two sides are not made. To get them: "
                    f"{kind.why.get(name) or HOW_TO_GET[name] + '.'}"
                    f"{hint(BY_NAME[name], batch[0][0]) if kind is RowsDump else ''}"
                )
            self._columns = found
        [joined] = in_chunks(made, found | self._columns, max_tokens=sys.maxsize)
        return joined

    # -- a look -------------------------------------------------------------------------------

    def look(
        self, step: int, make_rows: MakeRows, limit: int | None = None, seconds_before: float = 0.0
    ) -> Metrics:
        """The metrics `doctor/...` of one step; empty if it is not looked at.

        Each cause is reported once, when it is first found; the rows that show it are kept. limit:
        of the rows; None: by the time that looks may take. seconds_before: spent for it already.
        """
        limit = self._rows_of_look() if limit is None else limit
        if not limit:
            return {}
        began = self._clock()
        found: dict[str, float] = {}
        new: list[MismatchError] = []
        try:
            if self._ended is None:
                self._kept = self._kept_before(step)
            if (rows := make_rows(limit)) is None:
                return {}
            rows = self._named(step, rows)
            examined = examine(lambda: [rows], self._setting, has=rows.has, is_live=True)
            differs = [f.cause for f in examined.findings if f.verdict == "differs"]
            causes = list(dict.fromkeys(differs))
            new = self._keep(step, rows, examined, causes) if causes else []
            self._latest = None if causes else rows
            left = examined.after.total.means()["k2"]
            if not causes and left > CRITICAL_LIMIT:
                self._warn_once(
                    UNEXPLAINED,
                    f"step {step}: doctor: {UNEXPLAINED}: k2 is {left:.2g}, beyond what numerics "
                    f"make. `lockstep doctor {self.directory} --model DIR` tries more hypotheses.",
                )
            if not rows.loss_mask.any():
                self._warn_once("loss_mask", f"step {step}: doctor: loss_mask is 0 at every token.")
            found = {"doctor/rows": len(rows), "doctor/causes": len(causes)}
            found |= {f"doctor/{cause}": 1.0 for cause in causes}
        except Exception as error:  # of a batch, a check, a disk: training must not end by it
            self._end(step, error)
            return {}
        finally:
            self._ended = self._clock()
            self._spent = self._ended - began + seconds_before
        self._tell(new)
        return {**found, "time/doctor_seconds": self._spent}

    def _rows_of_look(self) -> int:
        """Rows to look at now; 0 waits."""
        self._num_batches += 1
        if self._is_off or (self._num_batches - 1) % self.every:
            return 0
        if self._ended is None:
            return self._limit
        allowed = self.max_share * (self._clock() - self._ended)
        if self._spent > allowed:
            if self._limit > MIN_ROWS and not self._is_waiting:
                self._limit = max(int(self._limit * allowed / self._spent), MIN_ROWS)
            self._is_waiting = True
            return 0
        if self._spent * 2 < allowed and not self._is_waiting:
            self._limit = min(self._limit * 2, self.num_rows)
        self._is_waiting = False
        return self._limit

    def learn(self, **known: Any) -> None:
        """Takes facts that are unknown so far from a batch."""
        no = Facts()
        left = [name for name in known if getattr(self.facts, name) == getattr(no, name)]
        fresh = {name: known[name] for name in left if known[name] != getattr(no, name)}
        if fresh:
            self.facts = replace(self.facts, **fresh)
            self._setting = make_setting(self.facts, self._words)

    def _named(self, step: int, rows: Rows) -> Rows:
        """`rows` with their step, and the rank in their names; reports a foreign tokenizer."""
        rank, words = _rank(), self._words
        if rank:
            rows = rows.with_(row_ids=tuple(f"rank{rank}/{name}" for name in rows.row_ids))
        if words.tokenizer is not None and (why := why_beyond(words.tokenizer, rows)):
            why += " Give the tokenizer of the model that trains: tokenizer=..."
            self.warn(f"step {step}: doctor: {why} Checks of text are not made.")
            self._words = Tokenization(lacks={"tokenizer": why, "renderer": why})
            self._setting = make_setting(self.facts, self._words)
        return rows.with_(steps=np.full(len(rows), step, np.int64))

    # -- causes -------------------------------------------------------------------------------

    def _keep(
        self, step: int, rows: Rows, examined: Examination, causes: Sequence[str]
    ) -> list[MismatchError]:
        """Writes rows that show a cause of too few kept rows, and returns the new causes."""
        num_kept = Counter(cause for known in self._kept.values() for cause in known)
        if all(num_kept[cause] >= MAX_KEPT and cause in self._told for cause in causes):
            return []
        dump = RowsDump(self._write(step, rows, causes))
        diagnosis = Diagnosis(dump=dump, setting=self._setting, examination=examined, seconds=0.0)
        new: list[MismatchError] = []
        for cause, finding in diagnosis.causes:
            if cause.name in self._told:
                continue
            self._told.add(cause.name)
            sure, _ = diagnosis.certainty_of(cause, finding)
            share, remedy = diagnosis.share_of(cause.name), diagnosis.remedy_for(cause)
            explained = f"{share:.0%} of k2, " if share >= 0.001 else ""
            shown = "".join(
                f" Row {e.row}, tokens {e.begin} to {e.end - 1}: {e.note}."
                for e in finding.evidence[:1]
            )
            text = (
                f"step {step}: doctor: {cause.name} ({explained}{sure}): {cause.title} "
                f"{finding.measured}.{shown} Remedy: {remedy.rstrip('.')}. "
                f"`lockstep doctor {self.directory}` shows the tokens."
            )
            proof = finding.evidence
            new += [MismatchError(text, cause=cause.name, step=step, evidence=proof, remedy=remedy)]
        return new

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self.warn(text)

    def _tell(self, new: Sequence[MismatchError]) -> None:
        for error in new:
            if callable(self.on_cause):
                self.on_cause(error)
            else:
                self.warn(str(error))
        if new and self.has_page:
            self.try_page()
        if new and self.on_cause == "raise":
            raise new[0]

    def _kept_before(self, step: int) -> dict[int, list[str]]:
        """Earlier steps that are kept, with their causes. Rows of this process from `step` on are
        removed: the run is played again from there."""
        for path in self.directory.glob(f"step-*-rank-{_rank()}.parquet"):
            if numbers_in(path.name)[0] >= step:
                path.unlink()
        if not (index := self._index()).exists():
            return {}
        kept = json.loads(index.read_text())
        return {int(number): causes for number, causes in kept.items() if int(number) < step}

    def _index(self) -> Path:
        return self.directory / f"causes-rank-{_rank()}.json"

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}-rank-{_rank()}.parquet"

    def _write(self, step: int, rows: Rows, causes: Sequence[str]) -> Path:
        """Keeps rows. All files of a directory have the columns of its first."""
        self._columns = self._columns or rows.has
        more = dict.fromkeys(rows.has - self._columns - {"steps"})
        self.directory.mkdir(parents=True, exist_ok=True)
        vocabulary = self.directory / VOCABULARY
        if self._vocabulary and not vocabulary.exists():
            staged = self.directory / f"tokenizer-rank-{_rank()}.json"  # of several processes
            write_atomically(staged, lambda file: file.write(self._vocabulary.encode()))
            staged.replace(vocabulary)
        write_rows(self._path(step), [rows.with_(**more)], self.facts)
        self._kept[step] = list(causes)
        index = json.dumps(self._kept).encode()
        write_atomically(self._index(), lambda file: file.write(index))
        return self._path(step)

    def _end(self, step: int, error: Exception) -> None:
        """Reports an error of the watch itself, and looks at nothing from then on."""
        self._is_off = True
        self.warn(f"step {step}: doctor: the watch ends here, training goes on: {words_of(error)}")

    # -- the page -----------------------------------------------------------------------------

    def page(self) -> Path | None:
        """Writes the page of `lockstep doctor --out`, of all kept rows and the newest ones.

        Returns its path; None where nothing was looked at, and on other ranks than 0. Raises
        DataError or ConfigError if the rows cannot be read, or the page not be written.
        """
        self._look_at_sequences()
        if _rank() or not (self._kept or self._latest):
            return None
        for step in [step for step, causes in self._kept.items() if not causes]:
            self._path(step).unlink(missing_ok=True)
            del self._kept[step]
        if self._latest is not None and self._latest.steps is not None:
            self._write(int(self._latest.steps[0]), self._latest, ())
        words = self._words
        diagnosis = diagnose(
            self.directory, format="rows", tokenizer=words.tokenizer, renderer=words.renderer
        )
        return write_page(diagnosis, self.directory / PAGE)

    def try_page(self) -> None:
        """Writes the page, or reports why it cannot."""
        try:
            self.page()
        except MismatchError:
            raise
        except Exception as error:
            self.warn(f"doctor: the page {self.directory / PAGE} is not written: {words_of(error)}")


def choose(groups: Sequence[Hashable], num_rows: int, *, step: int) -> list[int]:
    """Indices of at most `num_rows` rows, group by group: rows of one prompt tell the most about
    each other. Each step begins with another group. groups: of each row.

    >>> choose(["a", "a", "b", "b", "c", "c"], 3, step=1)
    [2, 3, 4]
    """
    known = list(dict.fromkeys(groups))
    place = {group: (i - step) % len(known) for i, group in enumerate(known)}
    return sorted(range(len(groups)), key=lambda i: place[groups[i]])[:num_rows]


@dataclass(kw_only=True)
class _Sequences:
    """Sequences of a step of prime-rl, whose trainer has one micro batch at a time."""

    step: int = -1
    limit: int = 0
    num_before: int = 0
    """Sequences of the step before."""
    num_seen: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    seconds: float = 0.0

    def wants(self, num_sequences: int) -> bool:
        """Counts sequences, and says whether they are to be taken: each step begins elsewhere."""
        self.num_seen += num_sequences
        first = self.step * self.limit % max(self.num_before - self.limit + 1, 1)
        return self.num_seen > first and len(self.lines) < self.limit


# -- pieces ----------------------------------------------------------------------------------------


def _words(
    facts: Facts, tokenizer: Any, renderer: Renderer | str | None
) -> tuple[Tokenization, str]:
    """Tokenizer and renderer; and the JSON of a tokenizer of transformers, which `tokenizer` may
    be."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return find_tokenization(facts, tokenizer=tokenizer, renderer=renderer), ""
    name, vocabulary = str(getattr(tokenizer, "name_or_path", "")), backend.to_str()
    try:
        whole = Tokenizer.from_json(vocabulary, where=name or "tokenizer of the trainer")
    except LockstepError as error:
        return Tokenization(lacks={"tokenizer": str(error), "renderer": "it needs a tokenizer"}), ""
    given = name if isinstance(renderer, str) else whole  # a renderer's name finds its settings
    return find_tokenization(facts, tokenizer=given, renderer=renderer), vocabulary


def words_of(error: Exception) -> str:
    return str(error) if isinstance(error, LockstepError) else named(error)


def _rank() -> int:
    """Rank of this process under torch.distributed, else 0. It does not import torch."""
    known: Any = sys.modules.get("torch.distributed")
    return known.get_rank() if known is not None and known.is_initialized() else 0
