"""Is the prompt of a row the one that the engine was sent, and that the model's template writes?

A trainer that renders prompts by itself may take another template than the engine, add a default
system message, lose the opening of the reply, or write the beginning token twice. The replies are
then the sampled ids, and all of their log-probs follow another prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.doctor.checks.base import Finding, Setting
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.context import MIN_RUN, TemplateCheck, first_of, opening_of
from lockstep.doctor.checks.tokens.replies import rewriting
from lockstep.doctor.checks.values.noise import MIN_FREEDOM, noise_of
from lockstep.errors import RendererError
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Message

MIN_ROWS = 3
"""Rows whose prompt is not their messages', before that is a cause: one may have lost a message."""
MIN_GAP = 0.05
"""Mean |d| in nats of such rows from which their prompts are the cause. Kernels of two engines are
a few hundredths apart, and a prompt of another template moves most tokens of a reply."""
MIN_CONTRAST = 2.0
"""Ratio of that to the mean of the rows whose prompts are right, if there are any."""
MAX_NOISE = 0.25
"""Share of the mean square gap that noise may make: another prompt gives the same numbers each
time."""
MAX_END = 24
"""Ids at the end of a prompt that are taken for the opening of the reply."""
INFERRED = ("unopened", "written")
"""Kinds of other prompts that are known by a template, which may not be the rows' own."""
BEGINNINGS = frozenset({"<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>"})
"""Names of tokens that a text begins with once, where no template says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPrompt:
    """A row whose prompt is not what it should be."""

    row: int
    first: int
    """Index of the first id that is wrong, in the rows."""
    cut: int
    """Index from which on the row's tokens follow other ids than were sampled."""
    what: str
    """The difference, in words."""
    expected: tuple[int, ...]
    """Ids that should stand from `first` on."""


class WrongTemplate(TemplateCheck):
    """Compares each prompt with what the engine was sent; without that, with what the renderer
    writes for the row's messages, where the two sides disagree."""

    name = "template/wrong_template"
    claim = "prompts are what the engine was sent, and what the model's template writes"
    cause = "wrong_template"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._what = ""
        self._written: dict[tuple[Message, ...], list[int] | None] = {}
        self._gap = np.zeros((2, 2))
        """Sums of |d| and numbers of tokens: rows with another prompt than the template writes,
        other rows."""
        self._square = self._noise = 0.0
        self._freedom = 0

    # -- looking ------------------------------------------------------------------------------

    def look(self, rows: Rows) -> None:
        has_renderer = self.setting.renderer is not None
        self.count(
            rows=len(rows),
            prompts_sent=sum(map(bool, rows.engine_prompt_ids or ())),
            prompts_written=sum(map(bool, rows.messages or ())) if has_renderer else 0,
        )
        weight = {"sent": 3.0, "twice": 2.0, "unopened": 2.0, "written": 1.0}
        for kind, others in self._others(rows).items():
            for other in others:
                self.count(**{kind: 1})
                self._what = self._what or other.what
                end = min(other.first + max(len(other.expected), 1), int(rows.offsets[-1]))
                end = min(end, int(rows.offsets[other.row + 1]))
                note = f"the prompt is another one from here on: {other.what}"
                self.show(
                    weight[kind], rows, other.first, max(end, other.first + 1), note, other.expected
                )
        self._measure(rows)

    def _others(self, rows: Rows) -> dict[str, list[OtherPrompt]]:
        """The rows with another prompt: than was sent, with its beginning twice, without the
        opening of the reply, or than the template writes for the messages."""
        return rows.once(
            "other prompts",
            lambda: {
                "sent": list(self._unlike_sent(rows)),
                "twice": list(self._begun_twice(rows)),
                "unopened": list(self._unopened(rows)),
                "written": list(self._unlike_written(rows)),
            },
        )

    def _unlike_sent(self, rows: Rows) -> Iterator[OtherPrompt]:
        spans = rows.spans
        answered = rows.engine_ids or (None,) * len(rows)
        for r, turns in enumerate(spans.of_rows(len(rows))):
            prompts = None if rows.engine_prompt_ids is None else rows.engine_prompt_ids[r]
            if not prompts or not len(prompts[0]) or not turns:
                continue
            other = self._compare(rows, r, int(spans.begin[turns[0]]), np.asarray(prompts[0]))
            if other is None:
                other = self._later(rows, r, turns, prompts, answered[r])
            if other is not None:
                yield other

    def _compare(
        self, rows: Rows, row: int, begin: int, expected: Int32Array
    ) -> OtherPrompt | None:
        """The difference of a row's prompt, which ends at `begin`, from the expected ids; None if
        there is none, or if it is another check's: padding, a prompt twice, control tokens that a
        text spelled, a border that is misplaced."""
        start = int(rows.offsets[row])
        ids = rows.token_ids[start : int(rows.offsets[row + 1])]
        if np.array_equal(ids[: len(expected)], expected):
            return None
        prompt = ids[: begin - start]
        if len(prompt) >= 2 * len(expected) and len(first_of(expected.tolist(), prompt)) > 1:
            return None
        if _is_padded(prompt, expected):
            return None
        tokenizer = self.setting.tokenizer
        if tokenizer is not None and self._is_injected(prompt, expected, tokenizer):
            return None
        first = min(first_difference(prompt.tolist(), expected.tolist()), len(prompt))
        what = describe(prompt, expected, tokenizer)
        return OtherPrompt(
            row=row,
            first=min(start + first, begin),
            cut=begin,
            what=what,
            expected=tuple(expected[first : first + MAX_END].tolist()),
        )

    @staticmethod
    def _is_injected(prompt: Int32Array, expected: Int32Array, tokenizer: Tokenizer) -> bool:
        """Whether both are one text, in which the prompt has more control tokens."""
        control = tokenizer.control_ids
        more = sum(i in control for i in prompt.tolist())
        more -= sum(i in control for i in expected.tolist())
        return more > 0 and tokenizer.decode_bytes(prompt) == tokenizer.decode_bytes(expected)

    def _later(
        self,
        rows: Rows,
        row: int,
        turns: range,
        prompts: Sequence[Int32Array],
        answered: Sequence[Int32Array] | None,
    ) -> OtherPrompt | None:
        """The first text between two turns that is not what the engine was sent there. Text that
        is only missing at its beginning is the separator's check's."""
        spans = rows.spans
        if answered is None or len(answered) != len(turns) or len(prompts) != len(turns):
            return None
        for t in range(1, len(turns)):
            before = np.concatenate([prompts[t - 1], answered[t - 1]])
            if not np.array_equal(prompts[t][: len(before)], before):
                return None  # the engine was sent a history that was rendered anew
            sent = np.asarray(prompts[t][len(before) :])
            begin, end = int(spans.end[turns[t - 1]]), int(spans.begin[turns[t]])
            found = rows.token_ids[begin:end]
            is_suffix = len(found) < len(sent) and np.array_equal(
                sent[len(sent) - len(found) :], found
            )
            if np.array_equal(found, sent) or is_suffix:
                continue
            if self.setting.tokenizer is not None and self._is_injected(
                found, sent, self.setting.tokenizer
            ):
                continue
            if not np.array_equal(
                rows.token_ids[begin - len(answered[t - 1]) : begin], answered[t - 1]
            ):
                return None  # the reply is another one, and its border too
            first = first_difference(found.tolist(), sent.tolist())
            return OtherPrompt(
                row=row,
                first=min(begin + first, end),
                cut=end,
                what=f"after turn {t}, {describe(found, sent, self.setting.tokenizer)}",
                expected=tuple(sent[first : first + MAX_END].tolist()),
            )
        return None

    def _begun_twice(self, rows: Rows) -> Iterator[OtherPrompt]:
        begins = self._beginnings
        spans = rows.spans
        starts, sizes = rows.offsets[:-1].tolist(), rows.sizes.tolist()
        replied = dict(
            zip(
                spans.row[spans.is_first].tolist(),
                spans.begin[spans.is_first].tolist(),
                strict=True,
            )
        )
        for r, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if size < 2 or not begins or r not in replied:
                continue
            one, two = rows.token_ids[start : start + 2].tolist()
            if one == two and one in begins and self.setting.tokenizer is not None:
                name = self.setting.tokenizer.control_name(one)
                yield OtherPrompt(
                    row=r,
                    first=start + 1,
                    cut=replied[r],
                    what=f"{name} twice at its beginning",
                    expected=(),
                )

    def _unopened(self, rows: Rows) -> Iterator[OtherPrompt]:
        """The rows whose first reply directly follows the end of a message, where the template has
        an opening."""
        close, opening = self._close
        if not close or not opening:
            return
        spans, ids = rows.spans, rows.token_ids
        first = spans.begin[spans.is_first]
        row = spans.row[spans.is_first]
        is_unopened = rows.position[first] >= len(close)
        for back, id_ in enumerate(reversed(close), 1):
            is_unopened &= ids[np.maximum(first - back, 0)] == id_
        for r, begin in zip(row[is_unopened].tolist(), first[is_unopened].tolist(), strict=True):
            yield OtherPrompt(
                row=r,
                first=begin,
                cut=begin,
                expected=opening,
                what="the opening of the reply is missing",
            )

    @property
    def _close(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(the ids that end a user's message, the opening that the renderer writes after them);
        empty if they are not known."""

        def find() -> tuple[tuple[int, ...], tuple[int, ...]]:
            renderer = self.setting.renderer
            if renderer is None:
                return (), ()
            try:
                opening = opening_of(renderer)
                one, two = (
                    renderer.render([Message(role="user", content=c)])[: -len(opening)]
                    for c in ("a", "b")
                )
            except RendererError:
                return (), ()
            return tuple(one[len(one) - first_difference(one[::-1], two[::-1]) :]), opening

        return self.setting.once("close", find)

    @property
    def _beginnings(self) -> frozenset[int]:
        """Control tokens that a row begins with once."""

        def find() -> frozenset[int]:
            tokenizer, renderer = self.setting.tokenizer, self.setting.renderer
            if tokenizer is None:
                return frozenset()
            found = {i for i in tokenizer.control_ids if tokenizer.control_name(i) in BEGINNINGS}
            if renderer is not None:
                try:
                    one, two, *_ = renderer.render([Message(role="user", content="a")])
                except RendererError:
                    return frozenset(found)
                if one in tokenizer.control_ids and one != two:
                    found.add(one)
            return frozenset(found - {self.setting.pad_id})

        return self.setting.once("beginnings", find)

    def _unlike_written(self, rows: Rows) -> Iterator[OtherPrompt]:
        if rows.messages is None or self.setting.renderer is None:
            return
        spans = rows.spans
        for r, turns in enumerate(spans.of_rows(len(rows))):
            messages = rows.messages[r]
            if not messages or not turns:
                continue
            expected = self._write(messages)
            if expected is None:
                continue
            other = self._compare(
                rows, r, int(spans.begin[turns[0]]), np.asarray(expected, np.int32)
            )
            if other is not None:
                yield other

    def _write(self, messages: Sequence[Message]) -> list[int] | None:
        """The first prompt of a dialogue by the renderer; None where it refuses it."""
        replied = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        asked = tuple(messages[:replied])
        if asked not in self._written:
            if len(self._written) >= MAX_WRITTEN:
                self._written.clear()
            try:
                self._written[asked] = self.renderer.render(asked)
            except RendererError:
                self._written[asked] = None
        return self._written[asked]

    def _measure(self, rows: Rows) -> None:
        """Sums the gap of rows with another prompt than the template writes, and of the others."""
        if rows.rollout_logprobs is None or rows.trainer_logprobs is None:
            return
        is_other = np.zeros(len(rows), np.bool_)
        others = self._others(rows)
        is_other[[other.row for kind in INFERRED for other in others[kind]]] = True
        at = rows.compared
        gap, chosen = np.abs(rows.gap[at]), is_other[rows.row_of[at]]
        for sums, of in zip(self._gap, (chosen, ~chosen), strict=True):
            sums += [gap[of].sum(), of.sum()]
        if not is_other.any():
            return
        for side in (rows.rollout, rows.trainer):
            noise = noise_of(rows, side)
            self._noise += noise.within
            self._freedom += noise.freedom
            self._square += noise.square_gap * noise.freedom / max(noise.tokens, 1)

    # -- judging ------------------------------------------------------------------------------

    @property
    def _is_harmful(self) -> bool:
        """Whether rows with another prompt than the template writes disagree because of it, as far
        as log-probs tell: more than rows with theirs, and by the same each time. The model tells it
        better, where it is at hand."""
        (gap, num), (own_gap, own_num) = self._gap.tolist()
        mean, own = gap / max(num, 1.0), own_gap / max(own_num, 1.0)
        is_noise = self._freedom >= MIN_FREEDOM and self._noise > MAX_NOISE * self._square
        return (
            self.setting.model is None
            and max(self.counts[kind] for kind in INFERRED) >= MIN_ROWS
            and mean >= max(MIN_GAP, MIN_CONTRAST * own)
            and not is_noise
        )

    def conclude(self) -> Finding:
        c = self.counts
        if c["sent"]:
            return self.differs(
                f"{c['sent']} of {c['prompts_sent']} prompts are not what the engine was sent: "
                f"{self._what}",
                basis="shown",
            )
        if c["twice"]:
            return self.differs(
                f"{c['twice']} of {c['rows']} rows have {self._what}", basis="shown"
            )
        told = (
            f"{c['written'] or c['unopened']} of {c['rows']} prompts are not what the template "
            f"writes: {self._what}"
        )
        if self._is_harmful:
            return self.differs(f"{told}; the two sides disagree in these rows", basis="fit")
        if c["written"] or c["unopened"]:
            return self.information(
                f"{told}. Tools and defaults that the messages do not tell may be the reason"
            )
        if not c["prompts_sent"] and not c["prompts_written"]:
            return self.not_checkable("engine_prompt_ids or messages")
        return self.consistent(
            f"{c['prompts_sent']} prompts are as they were sent, {c['prompts_written']} as the "
            "template writes them"
        )

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained after a prompt that is not the sampler's."""
        others = self._others(rows)
        found = [*others["sent"], *others["twice"]]
        if not self.counts["sent"] and self._is_harmful:
            found += [*others["unopened"], *others["written"]]
        return rows.cut_from([other.cut for other in found])


def _is_padded(prompt: Int32Array, expected: Int32Array) -> bool:
    """Whether the prompt is the expected one with one id repeated somewhere in it."""
    more = len(prompt) - len(expected)
    if more < MIN_RUN:
        return False
    at = first_difference(prompt.tolist(), expected.tolist())
    inserted = prompt[at : at + more]
    return bool((inserted == inserted[0]).all()) and np.array_equal(
        prompt[at + more :], expected[at:]
    )


MAX_WRITTEN = 4096
"""Prompts that are kept as the renderer wrote them: groups share theirs, and a dump is of any
size."""


def describe(found: Int32Array, expected: Int32Array, tokenizer: Tokenizer | None) -> str:
    """How a prompt differs from the expected one, in words."""

    def shown(ids: Int32Array) -> str:
        if tokenizer is None:
            return f"ids {' '.join(map(str, ids[:MAX_END].tolist()))}"
        text = tokenizer.decode(ids.tolist())
        return repr(text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}")

    head = first_difference(found.tolist(), expected.tolist())
    tail = first_difference(found[head:][::-1].tolist(), expected[head:][::-1].tolist())
    was, now = expected[head : len(expected) - tail], found[head : len(found) - tail]
    if not len(was):
        if not head or (len(now) == 1 and now[0] == found[head - 1]):
            return f"{shown(now)} is added at its beginning" if not head else f"{shown(now)} twice"
        return f"{shown(now)} is added" + (" at its end" if not tail else "")
    if not len(now):
        where = "" if head and tail else " at its end" if head else " at its beginning"
        return f"{shown(was)} is missing{where}"
    if tokenizer is not None:
        texts = (tokenizer.decode(ids.tolist()) for ids in (was, now))
        if (change := rewriting(*texts)) and "white space" in change:
            return f"{change}: {shown(was)} became {shown(now)}"
    return f"{shown(was)} became {shown(now)}"
