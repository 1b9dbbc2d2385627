"""Is the prompt of a row the one that the engine was sent, and that the model's template writes?

A trainer that renders prompts by itself may take another template than the engine, add a default
system message, lose the opening of the reply, or write the beginning token twice. The replies are
then the sampled ids, and all of their log-probs follow another prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lockstep.doctor.checks.base import Finding, Setting
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.tokens.context import (
    MIN_RUN,
    TemplateCheck,
    around_words,
    first_of,
    opening_of,
)
from lockstep.doctor.checks.tokens.replies import is_same_without_prefix, rewriting
from lockstep.doctor.checks.values.noise import MIN_FREEDOM, noise_of
from lockstep.errors import RendererError
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Int32Array, Message, ToolSchema

MIN_ROWS = 3
"""Rows whose prompt is not their messages', before that is a cause: one may have lost a message."""
MIN_GAP = 0.05
"""Mean |d| in nats of such rows from which their prompts are the cause. Kernels of two engines are
a few hundredths apart, and a prompt of another template moves most tokens of a reply."""
MIN_STEADY_K2 = 3e-4
"""k2 of such rows that is enough where it is known to repeat: an engine in bfloat16, which repeats
too, was at most at 2.3e-4 (five models of transformers)."""
MIN_BEGINNING_K2 = 5e-5
"""The same where all that differs is the first id: engines write or leave out a beginning token by
mistake, and it moves little."""
MIN_CONTRAST = 2.0
"""Ratio of that to the mean of the rows whose prompts are right, if there are any."""
MAX_NOISE = 0.25
"""Share of the mean square gap that noise may make: another prompt gives the same numbers each
time."""
MIN_NOISE = 0.05
"""The same share on all tokens, below which the gap is not noise."""
MAX_END = 24
"""Ids at the end of a prompt that are taken for the opening of the reply."""
MIN_OWN = 50
"""Tokens in rows with the template's own prompt, and ..."""
MIN_SMALL_CONTRAST = 4.0
"""... ratio to their mean |d|, from which on a smaller gap counts too."""
_USER = Message(role="user", content="a")
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
    is_one_more_or_less: bool = False
    """Whether one id is missing or added, and all others are as they should be."""


class _PromptCheck(TemplateCheck):
    """Base of checks that compare prompts with what they should be."""

    cause = "wrong_template"

    def begin(self) -> None:
        self._what = ""

    def show_others(self, rows: Rows, kind: str, others: Sequence[OtherPrompt]) -> None:
        """Counts the rows under `kind`, and offers them as evidence."""
        self.count(**{kind: len(others)})
        for other in others:
            self._what = self._what or other.what
            end = min(other.first + max(len(other.expected), 1), int(rows.offsets[other.row + 1]))
            note = f"the prompt is another one from here on: {other.what}"
            self.show(1.0, rows, other.first, max(end, other.first + 1), note, other.expected)

    def compared(
        self, rows: Rows, row: int, begin: int, expected: Sequence[int] | Int32Array
    ) -> OtherPrompt | None:
        """The difference of a row's prompt, which ends at `begin`, from the expected ids; None if
        there is none, or if it is another check's: padding, a prompt twice, control tokens that a
        text spelled, a border that is misplaced."""
        expected = np.asarray(expected, np.int32)
        start = int(rows.offsets[row])
        ids = rows.token_ids[start : int(rows.offsets[row + 1])]
        prompt = ids[: begin - start]
        more = prompt[len(expected) :].tolist()
        if np.array_equal(ids[: len(expected)], expected) and not self._is_of_template(more):
            return None  # words that the program begins the reply with
        if len(prompt) >= 2 * len(expected) and len(first_of(expected.tolist(), prompt)) > 1:
            return None
        if self.is_of_others(prompt, expected):
            return None
        first = min(first_difference(prompt.tolist(), expected.tolist()), len(prompt))
        return OtherPrompt(
            row=row,
            first=min(start + first, begin),
            cut=begin,
            what=describe(prompt, expected, self.setting.tokenizer),
            expected=tuple(expected[first : first + MAX_END].tolist()),
            is_one_more_or_less=np.array_equal(prompt[first + 1 :], expected[first:])
            or np.array_equal(prompt[first:], expected[first + 1 :]),
        )

    def _is_of_template(self, ids: Sequence[int]) -> bool:
        """Whether ids after a prompt are a template's: control tokens, or an empty thought."""
        tokenizer = self.setting.tokenizer
        if tokenizer is None or not ids:
            return False
        return not tokenizer.control_ids.isdisjoint(ids) or "<think>" in tokenizer.decode(ids)

    def is_of_others(self, found: Int32Array, expected: Int32Array) -> bool:
        """Whether the difference is padding, control tokens that a text spelled, or the space that
        the model's own tokenizer writes before a text."""
        tokenizer = self.setting.tokenizer
        if _is_padded(found, expected):
            return True
        if tokenizer is None:
            return False
        if is_same_without_prefix(found, expected, tokenizer):
            return True
        more, other = (
            sum(i in tokenizer.control_ids for i in ids.tolist()) for ids in (found, expected)
        )
        return more > other and tokenizer.decode_bytes(found) == tokenizer.decode_bytes(expected)


class WrongTemplate(_PromptCheck):
    """Compares each prompt with the ids that the engine was sent, and its beginning with a second
    one."""

    name = "template/wrong_template"
    claim = "prompts are the ids that the engine was sent, and begin once"
    basis = "shown"

    def look(self, rows: Rows) -> None:
        self.count(rows=len(rows), prompts_sent=sum(map(bool, rows.engine_prompt_ids or ())))
        for kind, others in self._others(rows).items():
            self.show_others(rows, kind, others)

    def _others(self, rows: Rows) -> dict[str, list[OtherPrompt]]:
        """The rows with another prompt than was sent, or with its beginning twice."""
        return rows.once(
            "other prompts",
            lambda: {"sent": list(self._unlike_sent(rows)), "twice": list(self._twice(rows))},
        )

    def _unlike_sent(self, rows: Rows) -> Iterator[OtherPrompt]:
        spans = rows.spans
        answered = rows.engine_ids or (None,) * len(rows)
        for r, turns in enumerate(spans.of_rows(len(rows))):
            prompts = None if rows.engine_prompt_ids is None else rows.engine_prompt_ids[r]
            if not prompts or not len(prompts[0]) or not turns:
                continue
            other = self.compared(rows, r, int(spans.begin[turns[0]]), prompts[0])
            if other is None:
                other = self._later(rows, r, turns, prompts, answered[r])
            if other is not None:
                yield other

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
        if answered is None or not len(answered) == len(turns) == len(prompts):
            return None
        for t in range(1, len(turns)):
            reply = answered[t - 1]
            before = np.concatenate([prompts[t - 1], reply])
            begin, end = int(spans.end[turns[t - 1]]), int(spans.begin[turns[t]])
            is_history = np.array_equal(prompts[t][: len(before)], before)
            own = rows.token_ids[max(begin - len(reply), 0) : begin]
            if not is_history or not np.array_equal(own, reply):
                return None  # rendered anew by the engine's client, or another reply in the row
            sent = np.asarray(prompts[t][len(before) :], np.int32)
            found = rows.token_ids[begin:end]
            is_suffix = len(found) < len(sent) and np.array_equal(sent[-len(found) :], found)
            if np.array_equal(found, sent) or is_suffix or self.is_of_others(found, sent):
                continue
            first = first_difference(found.tolist(), sent.tolist())
            return OtherPrompt(
                row=row,
                first=min(begin + first, end),
                cut=end,
                what=f"after turn {t}, {describe(found, sent, self.setting.tokenizer)}",
                expected=tuple(sent[first : first + MAX_END].tolist()),
            )
        return None

    def _twice(self, rows: Rows) -> Iterator[OtherPrompt]:
        begins, tokenizer, spans = self._beginnings, self.setting.tokenizer, rows.spans
        if not begins or tokenizer is None:
            return
        first, row = spans.begin[spans.is_first], spans.row[spans.is_first]
        start = rows.offsets[row]
        one, two = rows.token_ids[start], rows.token_ids[np.minimum(start + 1, first)]
        three = rows.token_ids[np.minimum(start + 2, first)]  # more of them are padding
        is_twice = np.isin(one, list(begins)) & (one == two) & (two != three)
        is_twice &= first > start + 1
        for at in np.flatnonzero(is_twice).tolist():
            yield OtherPrompt(
                row=int(row[at]),
                first=int(start[at]) + 1,
                cut=int(first[at]),
                what=f"{tokenizer.control_name(int(one[at]))} twice at its beginning",
                expected=(),
            )

    @cached_property
    def _beginnings(self) -> frozenset[int]:
        """Control tokens that a row begins with once."""
        tokenizer, renderer = self.setting.tokenizer, self.setting.renderer
        if tokenizer is None:
            return frozenset()
        found = {i for i in tokenizer.control_ids if tokenizer.control_name(i) in BEGINNINGS}
        if renderer is not None:
            with suppress(RendererError):
                one, two, *_ = renderer.render([_USER])
                if one in tokenizer.control_ids and one != two:
                    found.add(one)
        return frozenset(found - {self.setting.pad_id})

    def conclude(self) -> Finding:
        c = self.counts
        if c["sent"]:
            return self.differs(
                f"{c['sent']} of {c['prompts_sent']} prompts are not what the engine was sent: "
                f"{self._what}"
            )
        if c["twice"]:
            return self.differs(f"{c['twice']} of {c['rows']} rows have {self._what}")
        if not c["prompts_sent"]:
            return self.not_checkable("engine_prompt_ids")
        return self.consistent(f"{c['prompts_sent']} prompts are as they were sent")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained after a prompt that is not the sampler's."""
        return rows.cut_from([o.cut for others in self._others(rows).values() for o in others])


class UnlikeTemplate(_PromptCheck):
    """Compares prompts with what the renderer writes for the row's messages, and looks for the
    opening of the reply, where nothing else has explained why the two sides disagree.

    The renderer may be another one than the rows', and messages do not tell all that a prompt has:
    what differs is a cause only where log-probs disagree, and by the same each time.
    """

    name = "template/unlike_template"
    claim = "prompts are what the model's template writes for the row's messages"
    basis = "fit"
    needs = ("renderer",)

    def begin(self) -> None:
        super().begin()
        self._written: dict[tuple[tuple[Message, ...], str], list[int] | None] = {}
        self._gap = np.zeros((2, 3))
        """Sums of |d| and of k2, and numbers of tokens: rows with another prompt than the template
        writes, other rows."""
        self._square = self._noise = 0.0
        self._freedom = self._beginnings = 0

    def look(self, rows: Rows) -> None:
        self.count(rows=len(rows), prompts_written=sum(map(bool, rows.messages or ())))
        others = self._others(rows)
        self.show_others(rows, "others", others)
        for other in others:
            is_first = other.first == rows.offsets[other.row]
            self._beginnings += is_first and other.is_one_more_or_less
        if rows.rollout_logprobs is None or rows.trainer_logprobs is None:
            return
        is_other = np.zeros(len(rows), np.bool_)
        is_other[[other.row for other in others]] = True
        at = rows.compared
        gap, chosen = np.abs(rows.gap[at]), is_other[rows.row_of[at]]
        for sums, of in zip(self._gap, (chosen, ~chosen), strict=True):
            sums += [gap[of].sum(), 0.5 * (gap[of] ** 2).sum(), of.sum()]
        for who in ("sampler", "trainer") if is_other.any() else ():
            noise = noise_of(rows, who)
            self._noise += noise.within
            self._freedom += noise.freedom
            self._square += noise.mean_square_gap * noise.freedom

    def _others(self, rows: Rows) -> list[OtherPrompt]:
        def find() -> list[OtherPrompt]:
            found: dict[int, OtherPrompt] = {}
            for others in (self._undeclared, self._unopened, self._unlike_written):
                found |= {other.row: other for other in others(rows)}
            return list(found.values())

        return rows.once("prompts unlike the template's", find)

    def _unopened(self, rows: Rows) -> Iterator[OtherPrompt]:
        """The rows whose first reply directly follows the end of a message, where the template has
        an opening."""
        close, opening = self._close
        if not close or not opening:
            return
        spans, ids = rows.spans, rows.token_ids
        first, row = spans.begin[spans.is_first], spans.row[spans.is_first]
        is_unopened = rows.position[first] >= len(close)
        for back, id_ in enumerate(reversed(close), 1):
            is_unopened &= ids[np.maximum(first - back, 0)] == id_
        for r, begin in zip(row[is_unopened].tolist(), first[is_unopened].tolist(), strict=True):
            what = "the opening of the reply is missing"
            yield OtherPrompt(row=r, first=begin, cut=begin, expected=opening, what=what)

    @cached_property
    def _close(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(the ids that end a user's message, the opening that the renderer writes after them);
        empty if they are not known."""
        try:
            opening = opening_of(self.renderer)
        except RendererError:
            return (), ()
        around = around_words(_USER, lambda m: self.renderer.render([m])[: -len(opening)])
        return ((), ()) if around is None else (around[1], opening)

    def _unlike_written(self, rows: Rows) -> Iterator[OtherPrompt]:
        spans = rows.spans
        for r, turns in enumerate(spans.of_rows(len(rows)) if rows.messages else ()):
            messages = None if rows.messages is None else rows.messages[r]
            is_known = rows.engine_prompt_ids is not None and rows.engine_prompt_ids[r]
            if not messages or not turns or is_known:
                continue
            begin = int(spans.begin[turns[0]])
            expected = self._write(messages, ())
            other = None if expected is None else self.compared(rows, r, begin, expected)
            if other is not None and self.setting.tokenizer is not None:
                prompt = rows.token_ids[int(rows.offsets[r]) : begin].tolist()
                text = self.setting.tokenizer.decode(prompt)
                tools = tuple(tools_in(text))
                expected = self._write(messages, tools) if tools else None
                if expected is not None:  # else the template has no place for tools
                    other = self.compared(rows, r, begin, expected)
            if other is not None:
                yield other

    def _undeclared(self, rows: Rows) -> Iterator[OtherPrompt]:
        """All rows, where replies call tools and no prompt says anything of these."""
        is_known = any(rows.engine_prompt_ids or ())
        spans, name = rows.spans, "" if is_known else undeclared_tool(rows, self.setting)
        first, row = spans.begin[spans.is_first], spans.row[spans.is_first]
        what = f"it says nothing of the tool {name!r}, which replies call"
        for r, begin in zip(row.tolist(), first.tolist(), strict=True) if name else ():
            yield OtherPrompt(row=r, first=begin, cut=begin, what=what, expected=())

    def _write(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int] | None:
        """The first prompt of a dialogue by the renderer; None where it refuses it."""
        replied = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
        asked = tuple(messages[:replied])
        key = (asked, json.dumps([tool.parameters for tool in tools]))
        if key not in self._written:
            if len(self._written) >= MAX_WRITTEN:
                self._written.clear()
            try:
                self._written[key] = self.renderer.render(asked, tools)
            except RendererError:
                self._written[key] = None
        return self._written[key]

    @property
    def _is_harmful(self) -> bool:
        """Whether rows with another prompt than the template writes disagree because of it, as far
        as log-probs tell: more than rows with theirs, and by the same each time. The model tells it
        better, where it is at hand."""
        (gap, k2, num), (own_gap, _, own_num) = self._gap.tolist()
        mean, own = gap / max(num, 1.0), own_gap / max(own_num, 1.0)
        is_known = self._freedom >= MIN_FREEDOM
        # As much noise on every token must be a part of the whole gap, too: repeated tokens are
        # the first of a reply, and the gap of another prompt may be in later ones.
        is_noise = is_known and self._noise > MAX_NOISE * self._square
        is_noise &= self._noise / max(self._freedom, 1) > MIN_NOISE * 2 * k2 / max(num, 1.0)
        is_steady = is_known and k2 >= num * (
            MIN_BEGINNING_K2 if self._beginnings == self.counts["others"] else MIN_STEADY_K2
        )
        is_large = mean >= MIN_GAP or is_steady
        is_large |= own_num >= MIN_OWN and mean >= MIN_SMALL_CONTRAST * own
        return (
            self.setting.model is None
            and self.counts["others"] >= MIN_ROWS
            and is_large
            and mean >= MIN_CONTRAST * own
            and not is_noise
        )

    def conclude(self) -> Finding:
        c = self.counts
        told = (
            f"{c['others']} of {c['rows']} prompts are not what the template writes: {self._what}"
        )
        if self._is_harmful:
            return self.differs(f"{told}; the two sides disagree in these rows")
        if c["others"]:
            return self.information(
                f"{told}. Tools and defaults that the messages do not tell may be the reason"
            )
        if not c["prompts_written"]:
            return self.not_checkable("messages")
        return self.consistent(f"{c['prompts_written']} prompts are as the template writes them")

    def repair(self, rows: Rows) -> Rows:
        """Nothing is trained after a prompt that is not the template's, if that does harm."""
        return rows.cut_from([o.cut for o in self._others(rows)] if self._is_harmful else [])


def undeclared_tool(rows: Rows, setting: Setting) -> str:
    """A tool that replies call and of which no prompt says anything: a declaration has its name and
    those of its arguments. Empty without one. Replies are messages, or the first ones are parsed.
    """
    tokenizer, renderer, spans = setting.tokenizer, setting.renderer, rows.spans
    if tokenizer is None or renderer is None:
        return ""
    known = [m for messages in rows.messages or () for m in messages or ()]
    if not known:
        parts = zip(spans.begin[:MAX_PARSED].tolist(), spans.end[:MAX_PARSED].tolist(), strict=True)
        known = [renderer.parse(rows.token_ids[begin:end]) for begin, end in parts]
    called = set[tuple[str, ...]]()
    """Names of tools, each with those of the arguments of one call."""
    for call in (call for message in known for call in message.tool_calls):
        with suppress(ValueError):
            if isinstance(arguments := json.loads(call.arguments), dict):
                called.add((call.name, *arguments))
    first = spans.is_first
    for begin, end in zip(rows.offsets[spans.row[first]], spans.begin[first], strict=True):
        prompt = tokenizer.decode(rows.token_ids[begin:end].tolist())
        if any(all(word in prompt for word in call) for call in called):
            return ""
    return min(called, default=("",))[0]


MAX_PARSED = 64
"""Replies that are parsed to see what they call, where the rows have no messages."""


def tools_in(text: str) -> Iterator[ToolSchema]:
    """The tools that a prompt declares as JSON objects, in whatever form."""
    at = 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            at += 1
            continue
        at = end
        declared: Any = found.get("function", found) if isinstance(found, dict) else {}
        if not isinstance(declared, dict):
            continue
        name, parameters = declared.get("name"), declared.get("parameters")
        if isinstance(name, str) and isinstance(parameters, dict):
            about = str(declared.get("description", ""))
            yield ToolSchema(name=name, description=about, parameters=parameters)


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
