"""The result of an examination: findings, shares, and one verdict."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lockstep.doctor.causes import CAUSES, Cause
from lockstep.doctor.examine import Examination, Share
from lockstep.doctor.explain import HYPOTHESES, MIN_SHARE
from lockstep.doctor.findings import FLOAT_NOISE, MIN_TOKENS, MOST, Evidence, Finding, Setting
from lockstep.doctor.gap import Gap, Place, Split
from lockstep.doctor.inputs.base import HOW_TO_GET, Dump
from lockstep.doctor.rows import SIDES, Rows
from lockstep.doctor.terminal import LABEL_WIDTH, as_html, proof_table, show_line
from lockstep.errors import printable
from lockstep.observe.alarms import CRITICAL_LIMIT, mismatch
from lockstep.observe.live import format_seconds
from lockstep.observe.metrics import PARTS
from lockstep.store.files import encode_number

Outcome = Literal["consistent", "differs", "not_judged"]
EXIT_CODES: Mapping[Outcome, int] = {"consistent": 0, "differs": 1, "not_judged": 2}

Certainty = Literal["proved", "likely", "possible"]
"""proved: records of the dump contradict each other, or other ids, scored again by the model, give
the recorded numbers. likely: it explains most of the gap. possible: it explains a part."""

MAX_EXPECTED = 2000
"""Expected ids that are given for one place: more tell nothing, and would fill a page."""
LESS_NOISE = "float32 on both sides"
"""Shows causes that a model can show, where these rows have more noise than the cause makes."""
MIN_RANGE = 0.1
"""Smallest width of an interval that is shown beside a share."""
NUM_SHOWN = 2
"""Causes that are shown with their tokens; each other cause gets a line."""
NUM_LINES = 4
"""Facts and hypotheses in each of the lists `ruled out` and `not checked`."""
_WORDS = {
    "consistent": ("CONSISTENT", "bold green"),
    "differs": ("DIFFERS", "bold red"),
    "not_judged": ("NOT JUDGED: exit code 2", "bold yellow"),
}
_CERTAINTY = {"proved": "red", "likely": "yellow", "possible": "dim"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """The result of one examination of one input."""

    dump: Dump
    setting: Setting
    examination: Examination
    seconds: float
    only: tuple[str, ...] = ()
    """Requested checks; empty: all."""
    options: tuple[str, ...] = ()
    """Options about the input on the command line: ("--tokenizer", DIR)."""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Data that the input and this machine lack -> why, and how to get it."""
    unjudged: tuple[str, ...] = ()
    """Reasons why the rows cannot be judged: a model that cannot be loaded, messages of others."""

    def __repr__(self) -> str:
        found = ", ".join(cause.name for cause, _ in self.causes)
        return f"Diagnosis({self.outcome}: {found or 'no cause found'}, {self.name!r})"

    def _repr_html_(self) -> str:
        """The output of the command, in its colours."""
        return as_html(self.show)

    @property
    def name(self) -> str:
        """The input, as commands take it."""
        return str(self.dump.path)

    @property
    def outcome(self) -> Outcome:
        if self.causes or self.is_unexplained or (self.dump.found_before and not self.only):
            return "differs"
        if self.only:
            told = any(f.verdict == "consistent" for f in self.examination.findings)
            return "consistent" if told else "not_judged"
        return "not_judged" if self.why_not_judged else "consistent"

    @property
    def is_unexplained(self) -> bool:
        """True if numerics cannot explain the remaining gap, or the run's metrics show one."""
        if self.only:
            return False
        left = self.examination.after.total
        too_large = bool(left.tokens) and not self.examination.is_numeric
        return too_large or (not self.causes and self.alarm > CRITICAL_LIMIT)

    @property
    def alarm(self) -> float:
        """Largest mismatch among the run's own metrics; 0 without any."""
        found = (mismatch(row) for row in self.setting.step_metrics)
        return max((value for value in found if not math.isnan(value)), default=0.0)

    @property
    def why_not_judged(self) -> list[str]:
        """Why nothing can be said; empty if both sides were compared."""
        out = list(self.unjudged)
        if not self.examination.gap.tokens:
            lost = [self.lacks.get(side) or HOW_TO_GET[side] for side in self._missing_sides]
            why = "; ".join(lost) or "no trained token has two finite log-probs"
            out.append(f"nothing is compared: {why}")
        return out

    @property
    def _missing_sides(self) -> list[str]:
        return [column for column in SIDES.values() if column not in self.dump.has]

    @property
    def notes(self) -> list[str]:
        """Sentences for the reader: about the dump, and about what was compared."""
        examined, setting = self.examination, self.setting
        out = [
            f"{num:,} of {examined.num_rows:,} rows, not scored by the {side}, are not compared"
            for side, num in examined.num_unscored.items()
            if num
        ]
        is_own = setting.is_one_process or setting.trainer == "lockstep"
        num_equal = examined.before.histogram()["equal"]
        if num_equal == examined.gap.tokens >= MIN_TOKENS and not is_own:
            out += ["all log-probs are equal in every bit: was one column copied from the other?"]
        return [*self.dump.notes, *out]

    @property
    def headline(self) -> str:
        """One sentence: the outcome, and for a gap without a cause its size."""
        left = self.examination.after.total.means()
        if self.outcome == "not_judged":
            return "; ".join(self.why_not_judged) or "nothing that was asked for can be tested"
        if self.is_unexplained and not self.causes:
            told = f"k2 {left['k2']:.2g} is left, beyond what numerics make"
            if self.alarm > CRITICAL_LIMIT and self.examination.is_numeric:
                told = f"a step of the run has a mismatch of {self.alarm:.3g}"
            return f"unexplained: {told}"
        records = Counter(by[0] for by in self.cannot_show.values()).most_common(2)
        more = " and ".join(record for record, _ in records)
        return f"as far as recorded; {more} would show more" if more else ""

    @property
    def cannot_show(self) -> dict[str, Sequence[str]]:
        """Cause -> records. Each of them shows the cause in rows that look consistent without it:
        the cause moves log-probs by less than numerics do, or not at all."""
        if self.outcome != "consistent":
            return {}
        has = self.dump.has | self.setting.has
        lost = {HYPOTHESES[name].cause for name in self.ruled_out if name in HYPOTHESES}
        if self.is_float_noise:
            lost |= CAUSES.keys()
        return {
            cause.name: cause.shown_by if has.isdisjoint(cause.shown_by) else (LESS_NOISE,)
            for cause in CAUSES.values()
            if has.isdisjoint(cause.shown_by)
            or ("model" in has.intersection(cause.shown_by) and cause.name not in lost)
        }

    @property
    def ruled_out(self) -> list[str]:
        """Facts that hold, and hypotheses that were tested and lost, if next to nothing is left
        unexplained."""
        is_open = self.is_unexplained and self.examination.unexplained_k2 >= MIN_SHARE
        found = [f.check for f in self.with_verdict("consistent")]
        return [c for c in found if c.startswith("facts") or not is_open]

    @property
    def next_steps(self) -> list[str]:
        """Records that would decide, the best first; empty if the diagnosis is complete."""
        if self.outcome != "not_judged" and (self.causes or not self.is_unexplained):
            return []
        if not self.examination.gap.tokens:
            steps = [HOW_TO_GET[side] for side in self._missing_sides]
            return steps or ["log both sides' log-probs as they are"]
        lacking = {name for finding in self.with_verdict("not_checkable") for name in finding.lacks}
        names = ("repeated_rows", "engine_ids", "model", "messages", "tokenizer", "renderer")
        steps = [HOW_TO_GET[name] for name in names if name in lacking]
        recorder = "or copy lockstep/doctor/recorder.py, which writes all of them"
        ladder = "play the rungs with your model and template: lockstep doctor --ladder"
        return [*steps[:2], *([recorder] if steps else []), ladder]

    # -- what was found -----------------------------------------------------------------------

    @property
    def causes(self) -> list[tuple[Cause, Finding]]:
        """The causes by their share of the gap. Causes that move no log-prob (a missing stop token)
        are last, in the order of the checks. A cause that two checks found is listed once, with
        the first finding."""
        first: dict[str, Finding] = {}
        for finding in self.with_verdict("differs"):
            first.setdefault(finding.cause, finding)
        found = sorted(first.values(), key=lambda finding: -self.share_of(finding.cause))
        return [(CAUSES[finding.cause], finding) for finding in found]

    def evidence_by_row(self) -> dict[str, list[dict[str, Any]]]:
        """Row -> its evidence as JSON, with the check that shows it."""
        out: dict[str, list[dict[str, Any]]] = {}
        for finding in self.examination.findings:
            for piece in finding.evidence:
                found = {"check": finding.check, **evidence_to_json(piece)}
                out.setdefault(piece.row, []).append(found)
        return out

    def with_verdict(self, verdict: str) -> list[Finding]:
        return [f for f in self.examination.findings if f.verdict == verdict]

    @property
    def is_float_noise(self) -> bool:
        """True if the log-probs of both sides agree to float32: then causes have no gap to share,
        whatever else is wrong with the rows."""
        return self.examination.gap.max_abs < FLOAT_NOISE

    def share_of(self, cause: str) -> float:
        """Share of the sum of k2 = d^2 / 2 that the cause explains; 0 if it moves no log-prob."""
        if self.is_float_noise:
            return 0.0
        return min(self.examination.shares.get(cause, Share()).k2, 1.0)

    def range_of(self, cause: str) -> tuple[float, float]:
        """The interval of that share: two standard errors over rows."""
        found = Share() if self.is_float_noise else self.examination.shares.get(cause, Share())
        return found.least, min(found.most, 1.0)

    def certainty_of(self, cause: Cause, finding: Finding) -> tuple[Certainty, str]:
        """How certain the cause is, and why."""
        share = finding.figures.get("share", self.share_of(cause.name))
        if finding.basis == "shown":
            return "proved", "the dump's own records contradict each other"
        if finding.basis == "repair" and share >= MOST:
            level, why = "proved", "the repaired ids, scored again, give the recorded numbers"
        else:
            is_learnt = finding.check.startswith("facts")
            level: Certainty = "likely" if share >= MOST and not is_learnt else "possible"
            why = f"it explains {share:.0%} of the remaining gap, beyond chance"
        others = set(self.examination.rivals.get(cause.name, ()))
        others |= {c.name for c in CAUSES.values() if c.kind and c.kind == cause.kind}
        others.discard(cause.name)
        if others:
            why += f"; these rows do not tell it from {', '.join(sorted(others))}"
        return level, why

    def remedy_for(self, cause: Cause) -> str:
        """The remedy, in the settings of the trainer that wrote the input, if it has one."""
        return cause.in_trainers.get(self.setting.trainer, cause.remedy)

    def command_for(self, finding: Finding) -> str:
        """The command that runs this check alone."""
        words = ["lockstep", "doctor", self.name, *self.options, "--only", finding.check]
        return shlex.join(words)

    def missing_for(self, finding: Finding) -> list[str]:
        """The data that a check lacks, each with how to get it."""
        return [
            f"{name}: {self.lacks.get(name) or HOW_TO_GET.get(name, 'not in this input')}"
            for name in finding.lacks
        ]

    @property
    def unexplained(self) -> list[Place]:
        """Places of the unexplained gap, if it is on few tokens; empty if it is even or small."""
        left = self.examination.after
        return [] if left.total.max_abs < FLOAT_NOISE else left.concentrations()

    # -- on a screen --------------------------------------------------------------------------

    def show(self, console: Console, *, page: str = "") -> None:
        """Prints the verdict, worst cause first. page: file of the HTML page, if it was written."""
        word, style = _WORDS[self.outcome]
        console.print(Text.assemble((word, style), f"  {printable(self.name)}"))
        self._show_head(console)
        shown = self.causes[:NUM_SHOWN]
        names = {finding.evidence[0].row for _, finding in shown if finding.evidence}
        rows = {rows.row_ids[0]: rows for rows in self.dump.find(names=names).values()}
        for number in range(len(shown)):
            self._show_cause(console, number, rows)
        console.print()
        for cause, finding in self.causes[NUM_SHOWN:]:
            share = self.share_of(cause.name)
            show_line(console, "also", f"{cause.name} ({share:.1%} of k2): {finding.measured}")
        self._show_rest(console)
        self._show_lists(console)
        if page:
            show_line(console, "page", page, "cyan")

    def _show_head(self, console: Console) -> None:
        examined, gap = self.examination, self.examination.gap
        text = (
            f"{self.dump.format}: {examined.num_rows:,} rows, {examined.num_tokens:,} tokens "
            f"({gap.tokens:,} compared), {format_seconds(self.seconds)}"
        )
        show_line(console, "input", text)
        if self.headline:
            show_line(console, "verdict", self.headline, "bold")
        for note in self.notes:
            show_line(console, "note", note)
        means = gap.means()
        figures = "  ".join(f"{name} {means[name]:.2e}" for name in ("k1", "k2", "k3"))
        measured = f"{figures}  largest {means['max_abs_diff']:.2e}"
        lost = "not measured: no token has both log-probs"
        show_line(console, "gap", measured if gap.tokens else lost)

    def _show_cause(self, console: Console, number: int, rows: dict[str, Rows]) -> None:
        cause, finding = self.causes[number]
        certainty, why = self.certainty_of(cause, finding)
        share = self.share_of(cause.name)
        least, most = self.range_of(cause.name)
        moves = f"  {share:.1%} of k2  " if share >= 0.001 else "  moves few log-probs, or none  "
        if most - least >= MIN_RANGE:
            moves = f"  {share:.1%} of k2 ({least:.0%} to {most:.0%})  "
        title = (f"\n{number + 1}. {cause.name}", "bold red")
        console.print(Text.assemble(title, (moves, "bold"), (certainty, _CERTAINTY[certainty])))
        show_line(console, "what", cause.title)
        show_line(console, "measured", finding.measured)
        show_line(console, "sure", why)
        for evidence in finding.evidence[:1]:
            if evidence.row in rows:
                last = evidence.end - 1
                to = f"s {evidence.begin} to {last}" if last > evidence.begin else f" {last}"
                show_line(console, "proof", f"row {evidence.row}, token{to}: {evidence.note}")
                table = proof_table(evidence, rows[evidence.row], self.setting.tokenizer)
                console.print(Padding(table, (0, 0, 0, LABEL_WIDTH)))
        show_line(console, "remedy", self.remedy_for(cause), "green")
        for name, text in cause.in_engines.items():
            show_line(console, f"in {name}"[: LABEL_WIDTH - 1], text, "green")
        show_line(console, "again", self.command_for(finding), "cyan")

    def _show_rest(self, console: Console) -> None:
        """The gap that no cause explains, and its places."""
        left = self.examination.after.total
        for step in self.next_steps:
            show_line(console, "next", step, "green")
        if not left.tokens:
            return
        means = left.means()
        text = f"k2 {means['k2']:.2e}, largest {means['max_abs_diff']:.2e}"
        if self.is_float_noise:
            show_line(console, "gap", f"both sides agree to float noise ({text})")
            return
        if self.causes:
            text = f"{max(self.examination.unexplained_k2, 0.0):.1%} of k2 ({text})"
        places = [
            f"{place.share_k2:.0%} of it in {place.part} {place.label} "
            f"({place.share_tokens:.0%} of the tokens)"
            for place in self.unexplained
        ]
        even = "float noise" if left.max_abs < FLOAT_NOISE else "spread over turns and positions"
        label = "unexplained" if self.causes or self.is_unexplained else "gap"
        show_line(console, label, "; ".join([text, *(places or [even])]))

    def _show_lists(self, console: Console) -> None:
        needs: dict[str, list[str]] = {}
        for finding in self.with_verdict("not_checkable"):
            lacks = "; ".join(self.missing_for(finding))
            why = f"needs {lacks}" if lacks else finding.measured
            needs.setdefault(why, []).append(finding.check)
        missing = [
            f"{checks[0]}{f' and {len(checks) - 1} more' * bool(checks[1:])}: {why}"
            for why, checks in needs.items()
        ]

        ruled_out = self.ruled_out
        tried = [*self.with_verdict("consistent"), *self.with_verdict("not_shown")]
        told = {finding.check: f"{finding.check}: {finding.measured}" for finding in tried}
        for label, texts in {
            "ruled out": [text for name, text in told.items() if name in ruled_out],
            "not shown": [text for name, text in told.items() if name not in ruled_out],
            "not checked": missing,
        }.items():
            for text in texts[:NUM_LINES]:
                show_line(console, label, text)
            if len(texts) > NUM_LINES:
                more = f"... and {len(texts) - NUM_LINES} more: --json lists them"
                show_line(console, label, more, "dim")

    # -- as data ------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as `--json` prints it. NaN and infinity are "NaN" and "Infinity"."""
        examined = self.examination
        return {
            "input": self.name,
            "format": self.dump.format,
            "trainer": self.setting.trainer,
            "outcome": self.outcome,
            "rows": examined.num_rows,
            "tokens": examined.num_tokens,
            "seconds": self.seconds,
            "only": list(self.only),
            "gap": _means(examined.gap),
            "causes": [self._cause_to_json(cause, finding) for cause, finding in self.causes],
            "ruled_out": self.ruled_out,
            "cannot_show": {cause: list(by) for cause, by in self.cannot_show.items()},
            "not_checkable": {
                f.check: self.missing_for(f) for f in self.with_verdict("not_checkable")
            },
            "headline": self.headline,
            "unexplained": {
                "is_float_noise": self.is_float_noise,
                "k2_share": encode_number(examined.unexplained_k2),
                "gap": _means(examined.after.total),
                "next_steps": self.next_steps,
                "mostly_in": [_place(place) for place in self.unexplained],
            },
            "where": {n: split_to_json(getattr(examined, n)) for n in ("before", "after")},
            "findings": [finding_to_json(finding) for finding in examined.findings],
            "found_while_training": dict(self.dump.found_before),
            "not_in_input": dict(self.lacks),
            "notes": self.notes,
        }

    def _cause_to_json(self, cause: Cause, finding: Finding) -> dict[str, Any]:
        certainty, why = self.certainty_of(cause, finding)
        return {
            "cause": cause.name,
            "class": cause.equivalents,
            "title": cause.title,
            "check": finding.check,
            "measured": finding.measured,
            "share_k2": self.share_of(cause.name),
            "share_k2_range": list(self.range_of(cause.name)),
            "certainty": certainty,
            "why": why,
            "basis": finding.basis,
            "remedy": self.remedy_for(cause),
            "in_engines": dict(cause.in_engines),
            "command": self.command_for(finding),
        }


def finding_to_json(finding: Finding) -> dict[str, Any]:
    return {
        **asdict(finding),
        "figures": {name: encode_number(float(value)) for name, value in finding.figures.items()},
        "evidence": [evidence_to_json(piece) for piece in finding.evidence],
    }


def evidence_to_json(piece: Evidence) -> dict[str, Any]:
    """A place; if it has very many tokens, the first MAX_EXPECTED."""
    out = asdict(piece)
    if len(piece.expected_ids) > MAX_EXPECTED:
        out |= {
            "expected_ids": list(piece.expected_ids[:MAX_EXPECTED]),
            "end": min(piece.end, piece.begin + MAX_EXPECTED),
            "note": f"{piece.note} (the first {MAX_EXPECTED} tokens)",
        }
    return out


def split_to_json(split: Split) -> dict[str, Any]:
    """Every part with its labels, agreement of routes, the steps, and the sizes of d."""
    return {
        "parts": {p.name: [_place(place) for place in split.places(p.name)] for p in PARTS},
        "routes": {
            name: _means(gap)
            for name, gap in zip(("same", "differ"), split.routes, strict=True)
            if gap.tokens
        },
        "steps": [{"step": step, **_means(gap)} for step, gap in sorted(split.steps.items())],
        "histogram": split.histogram(),
    }


def _place(place: Place) -> dict[str, Any]:
    known = {name: value for name, value in asdict(place).items() if name != "gap"}
    return known | _means(place.gap)


def _means(gap: Gap) -> dict[str, Any]:
    return {name: encode_number(value) for name, value in gap.means().items()}
