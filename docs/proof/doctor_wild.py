"""Is the doctor right about programs that it has never seen?

    python docs/proof/doctor_wild.py --half dev                singles, pairs and healthy dumps
    python docs/proof/doctor_wild.py singles --half dev --players glm4 --causes shifted reencoded
    python docs/proof/doctor_wild.py pairs --half held --seeds 2 --sample 30 --levels c

The players of wild_players.py sample dialogues with transformers; their programs then make one
mistake of known cause, or two, or none, and write a dump. The doctor is asked about that file by
`lockstep.diagnose`, at four levels of data (LEVELS).

A verdict is *right* if the first cause that is named is the injected one, by the classes of
causes.py; *wrong* if it is another; *undecided* if the doctor says that the sides differ, or that
it cannot judge, and names no cause; *not shown* if it says that nothing is wrong as far as
recorded, and lists the injected cause among those that this dump cannot show; *consistent* if it
does not list it. A cause is *falsely ruled out* if its hypothesis is, and nothing names the cause.
Dumps whose gap is less than three times that of the noise alone are counted apart: their defect
moves little.
A cause that nobody injected and that is called "proved" is counted as such. doctor_split.json says
which players are held: their verdicts are for judging alone. What came out is in
doctor-wild-HALF.json; a command adds its parts and players to it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import wild_players as wild
from wild_players import Episode, Ids, Line, Message, Program, Sampling

from lockstep import diagnose
from lockstep.doctor.causes import CAUSES, is_same_class
from lockstep.doctor.explain import HYPOTHESES

T = TypeVar("T")
HERE = Path(__file__).parent
FACTOR = 3.0
"""Times the floor's k2 from which on a cause must be found."""
SILENT = frozenset({
    "missing_final", "after_stop", "observation_trained", "boundary", "nonfinite",
    "injected_control",
})  # fmt: skip
"""Causes that move few log-probs or none: they must be found at any gap."""
STEP, VERSION = 4, 3
LEVELS = ("a", "b", "c", "e")
"""What the doctor is given. a: ids, mask and both log-probs as JSON lines, and nothing else. b:
also lengths, advantages, rewards, stop ids, and the model. c: also messages, turns and tools. e:
also the ids that the engine returned and was sent."""


# -- rows ------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A run of ids of a row: a prompt, a reply, or what is between two replies."""

    ids: Ids
    logprobs: list[float]
    """NaN where the engine gave none."""
    is_trained: list[bool]
    turn: int = -1
    """Number of the reply; -1 for what was not sampled."""

    @classmethod
    def given(cls, ids: Sequence[int]) -> Part:
        return cls(list(ids), [np.nan] * len(ids), [False] * len(ids))

    @classmethod
    def said(cls, ids: Sequence[int], logprobs: Sequence[float], turn: int) -> Part:
        return cls(list(ids), list(logprobs), [True] * len(ids), turn)


@dataclass
class Row:
    parts: list[Part]
    episode: Episode
    prompt_length: int
    number: int

    @property
    def ids(self) -> Ids:
        return [id_ for part in self.parts for id_ in part.ids]

    @property
    def replies(self) -> list[Part]:
        return [part for part in self.parts if part.turn >= 0]


def row_of(episode: Episode, number: int) -> Row:
    parts = [Part.given(episode.prompts[0])]
    for turn, (prompt, ids, logprobs) in enumerate(
        zip(episode.prompts, episode.replies, episode.logprobs, strict=True)
    ):
        if turn:
            done = len(episode.prompts[turn - 1]) + len(episode.replies[turn - 1])
            parts.append(Part.given(prompt[done:]))
        parts.append(Part.said(ids, logprobs, turn))
    return Row(parts, episode, len(episode.prompts[0]), number)


@dataclass
class Work:
    """One dump in the making."""

    program: Program
    seed: int
    temperature: float = 1.0
    """By which the trainer divides."""
    is_left: bool = False
    has_versions: bool = False
    also: set[str] = field(default_factory=set)
    """Causes that are as right: a rendering that leaves most replies' text as it is encodes them
    again, and does no more; one that leaves out thoughts drops them."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def pick(self, share: float, rows: Sequence[Row]) -> list[Row]:
        """The rows that a mistake meets: at least one."""
        chosen = [row for row in rows if self.rng.random() < share]
        return chosen or list(rows[:1])

    def prompt_logprobs(self, ids: Ids) -> list[float]:
        """What an engine would say of given ids."""
        return wild.Sampler(self.program, Sampling(seed=self.seed)).score(ids)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake of a program."""

    cause: str
    label: str
    kind: str = "tokens"
    """tokens, values, numerics or template: what the doctor is given (`levels_of`)."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `wild.play`."""
    work: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Work`."""
    weights: Callable[[Program, int], Any] | None = None
    """Makes the weights that sample."""
    share: float = 1.0
    """Of the tasks that these weights sample."""
    rows: Callable[[Work, list[Row]], None] | None = None
    trainer: Callable[[Work, list[Row]], AbstractContextManager[Any]] | None = None
    lines: Callable[[Work, list[Line]], None] | None = None
    needs: Callable[[Program], bool] = lambda program: True


# -- mistakes with tokens --------------------------------------------------------------------------


def _relabelled(part: Part, ids: Ids, end_ids: frozenset[int]) -> None:
    """Gives a reply other ids. Its log-probs stay in their order; the end keeps its own; ids for
    which none is left are not trained."""
    ends = bool(part.ids) and part.ids[-1] in end_ids and bool(ids) and ids[-1] == part.ids[-1]
    own = part.logprobs[: len(part.logprobs) - ends]
    size = len(ids) - ends
    kept = min(size, len(own))
    logprobs = own[:kept] + [np.nan] * (size - kept) + part.logprobs[-1:] * ends
    part.is_trained = [True] * kept + [False] * (size - kept) + [True] * ends
    part.ids, part.logprobs = list(ids), logprobs


def _body(work: Work, part: Part) -> tuple[Ids, Ids]:
    """(ids before the end, the end) of a reply."""
    is_ended = bool(part.ids) and part.ids[-1] in work.program.end_ids
    return (part.ids[:-1], part.ids[-1:]) if is_ended else (part.ids, [])


def reencoded(share: float) -> Callable[[Work, list[Row]], None]:
    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, rows):
            for part in row.replies:
                body, end = _body(work, part)
                ids = work.program.encode(work.program.decode(body)) + end
                _relabelled(part, ids, work.program.end_ids)

    return change


def rerendered(share: float) -> Callable[[Work, list[Row]], None]:
    def change(work: Work, rows: list[Row]) -> None:
        same_texts: list[bool] = []
        for row in work.pick(share, rows):
            try:
                row.parts = _anew(work.program, row)
            except Exception as error:  # a template that refuses the dialogue: the row stays
                if type(error).__name__ not in ("TemplateError", "UndefinedError"):
                    raise
            row.prompt_length = len(row.parts[0].ids)
            for part in row.replies:
                sampled = row.episode.replies[part.turn]
                if part.ids != sampled:
                    texts = (work.program.decode(ids) for ids in (part.ids, sampled))
                    same_texts.append(len(set(texts)) == 1)
        if same_texts and np.mean(same_texts) >= 0.5:
            work.also.add("reencoded")
        if work.program.parts.template == "thinking":  # `_anew` leaves out earlier thoughts
            work.also.add("thinking_dropped")

    return change


def _anew(program: Program, row: Row) -> list[Part]:
    """The row as one rendering of all messages, encoded at once."""
    messages = [dict(m) for m in row.episode.messages[: row.episode.heads[-1] + 1]]
    if program.parts.template == "thinking":
        last = max(n for n, m in enumerate(messages) if m["role"] == "user")
        for message in messages[:last]:
            message.pop("reasoning_content", None)
    text = program.render(messages, is_open=False)
    ends: list[tuple[int, int]] = []
    for head in row.episode.heads:
        before = program.render(messages[:head])
        own, _ = program.reply_text(messages[:head], messages[head])
        begin = len(before)
        if not text.startswith(before):
            begin = text.index(own, ends[-1][1] if ends else 0)
        ends.append((begin, begin + len(own)))
    found = program.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    parts = [Part.given([])]
    spans = iter(enumerate(ends))
    turn, (begin, end) = next(spans)
    is_last = False
    for id_, (at, _) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        if not is_last and at >= end:
            # The end of the reply belongs to it.
            if id_ in program.end_ids or program.decode([id_]) == "<|end|>":
                if parts[-1].turn != turn:
                    parts.append(Part.said([], [], turn))
                parts[-1].ids.append(id_)
                parts.append(Part.given([]))
                turn, (begin, end) = next(spans, (turn, (10**9, 10**9)))
                is_last = begin == 10**9
                continue
            parts.append(Part.given([]))
            turn, (begin, end) = next(spans, (turn, (10**9, 10**9)))
            is_last = begin == 10**9
        if begin <= at < end and parts[-1].turn != turn:
            parts.append(Part.said([], [], turn))
        parts[-1].ids.append(id_)
    out: list[Part] = []
    for part in parts:
        if not part.ids:
            continue
        if part.turn < 0:
            out.append(Part.given(part.ids))
            continue
        ids, logprobs = row.episode.replies[part.turn], row.episode.logprobs[part.turn]
        new = Part.said(ids, logprobs, part.turn)
        _relabelled(new, part.ids, program.end_ids)
        out.append(new)
    return out


def missing_final(count: int, share: float, *, only_last: bool = False) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, rows):
            for part in row.replies[-1:] if only_last else row.replies:
                size = max(1, len(part.ids) - count)
                part.ids, part.logprobs = part.ids[:size], part.logprobs[:size]
                part.is_trained = part.is_trained[:size]

    return change


def dropped_separator(share: float) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        separator = work.program.template.separator
        for row in work.pick(share, rows):
            for n, part in enumerate(row.parts):
                text = work.program.decode(part.ids)
                if n and part.turn < 0 and text.startswith(separator):
                    row.parts[n] = Part.given(work.program.encode(text[len(separator) :]))

    return change


def shifted(by: int, share: float) -> Any:
    """Log-probs of a row, all its replies in one list, are off by so many places."""

    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, rows):
            joined = [value for part in row.replies for value in part.logprobs]
            moved = joined[:by] + joined[:-by] if by > 0 else joined[-by:] + joined[by:]
            for part in row.replies:
                part.logprobs, moved = moved[: len(part.ids)], moved[len(part.ids) :]

    return change


def after_stop(count: int, share: float) -> Any:
    """The engine did not stop: what it went on to say is trained."""

    def change(work: Work, rows: list[Row]) -> None:
        program = work.program
        ended = [r for r in rows if r.replies[-1].ids[-1] in program.end_ids]
        chosen = work.pick(share, ended)
        sampler = wild.Sampler(program, Sampling(seed=work.seed + 77, max_tokens=count))
        drawn = sampler.draw([row.ids for row in chosen], frozenset())
        for row, (ids, logprobs) in zip(chosen, drawn, strict=True):
            last = row.parts[-1]
            last.ids = last.ids + ids
            last.logprobs = last.logprobs + logprobs
            last.is_trained = last.is_trained + [True] * count

    return change


def observation_trained(share: float, *, has_logprobs: bool) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, [r for r in rows if len(r.parts) > 2]):
            given = work.prompt_logprobs(row.ids) if has_logprobs else [0.0] * len(row.ids)
            at = 0
            for n, part in enumerate(row.parts):
                if n and part.turn < 0:
                    part.logprobs = given[at : at + len(part.ids)]
                    part.is_trained = [True] * len(part.ids)
                at += len(part.ids)

    return change


def boundary(by: int, share: float) -> Any:
    """by: tokens by which the response begins too late, or (negative) too early."""

    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, rows):
            prompt, reply = row.parts[:2]
            if by > 0:
                size = min(by, len(reply.ids) - 1)
                reply.is_trained[:size] = [False] * size
                reply.logprobs[:size] = [np.nan] * size
                row.prompt_length += size
            else:
                prompt.logprobs[by:] = work.prompt_logprobs(prompt.ids)[by:]
                prompt.is_trained[by:] = [True] * -by
                row.prompt_length += by

    return change


def headers_trained(work: Work, rows: list[Row]) -> None:
    """The prompt's length was taken without add_generation_prompt."""
    size = len(work.program.encode(work.program.template.header))
    boundary(-size, 1.0)(work, rows)


def duplicated_prompt(share: float) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, rows):
            row.parts.insert(0, Part.given(row.parts[0].ids))
            row.prompt_length *= 2

    return change


def fillers(token_share: float, *, only_later: bool = False) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        for row in rows:
            for part in row.replies[1:] if only_later else row.replies:
                for n in range(len(part.logprobs)):
                    if work.rng.random() < token_share:
                        part.logprobs[n] = 0.0

    return change


def padding(place: str, share: float) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        pad = work.program.tokenizer.pad_token_id
        longest = max(len(row.parts[0].ids) for row in rows) + 4
        for row in work.pick(share, rows):
            if place == "left":
                fill = [pad] * (longest - len(row.parts[0].ids))
                row.parts.insert(0, Part.given(fill))
                row.prompt_length += len(fill)
            elif place == "prompt":
                row.parts.insert(1, Part.given([pad] * 9))
                row.prompt_length += 9
            else:  # each reply is padded to a common length
                for n in range(len(row.parts) - 1, 0, -1):
                    if row.parts[n].turn >= 0 and n + 1 < len(row.parts):
                        fill = [pad] * (wild.MAX_REPLY_TOKENS // 2)
                        row.parts.insert(n + 1, Part.given(fill))

    return change


def post_processed(how: str, share: float) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, rows):
            for part in row.replies:
                body, end = _body(work, part)
                text = work.program.decode(body)
                new = text.rstrip(" .!?\n") if how == "stripped" else text.partition(". ")[0]
                if how == "completed" and not text.endswith("."):
                    new = text + "."
                # Ids that the text keeps are kept.
                size = len(body)
                while size and not new.startswith(work.program.decode(body[:size])):
                    size -= 1
                rest = new[len(work.program.decode(body[:size])) :]
                ids = body[:size] + work.program.encode(rest) + end
                if new != text:
                    _relabelled(part, ids, work.program.end_ids)

    return change


def thinking_dropped(share: float) -> Any:
    def change(work: Work, rows: list[Row]) -> None:
        for row in work.pick(share, rows):
            for part in row.replies[:-1]:
                body, _ = _body(work, part)
                text = work.program.decode(body)
                if not text.startswith("<think>") or "</think>\n\n" not in text:
                    continue
                cut = len(text.partition("</think>\n\n")[0]) + len("</think>\n\n")
                size = next(n for n in range(len(body) + 1)
                            if len(work.program.decode(body[:n])) >= cut)  # fmt: skip
                for name in ("ids", "logprobs", "is_trained"):
                    setattr(part, name, getattr(part, name)[size:])

    return change


# -- mistakes with the template --------------------------------------------------------------------


def wrong_prompt(
    head: Callable[[Program, Sequence[Message]], str],
    glue: Callable[[Program, Sequence[Message]], str] | None = None,
    prefix: Callable[[Program, Ids], Ids] = lambda program, ids: ids,
) -> Any:
    """The trainer writes the prompt by other rules than the engine was sent: the replies keep their
    ids. head, glue: text of the first prompt, and of what is between two replies."""

    def change(work: Work, rows: list[Row]) -> None:
        program = work.program
        for row in rows:
            episode = row.episode
            messages = episode.messages
            first = program.encode(head(program, messages[: episode.heads[0]]))
            row.parts[0] = Part.given(prefix(program, first))
            row.prompt_length = len(row.parts[0].ids)
            if glue is None:
                continue
            for turn in range(1, len(episode.heads)):
                new = messages[episode.heads[turn - 1] + 1 : episode.heads[turn]]
                ids = program.encode(glue(program, new))
                place = next(n for n, part in enumerate(row.parts) if part.turn == turn) - 1
                if episode.replies[turn - 1][-1] not in program.end_ids:
                    ids = row.parts[place].ids[:1] + ids
                row.parts[place] = Part.given(ids)

    return change


def _as_family(program: Program) -> Program:
    """The same tokenizer with the template of another family."""
    name = "chatml" if "<|im_start|>" not in program.template.controls else "phi3"
    return under_template(program, name)


CUSTOM = "custom"
"""The player's own template with rules before the system message, as users change templates."""
_RULES = """
{%- set rules = 'House rules: be polite. ' %}
{%- if messages[0].role == 'system' %}
{%- set messages = [{'role': 'system', 'content': rules + messages[0].content}] + messages[1:] %}
{%- else %}
{%- set messages = [{'role': 'system', 'content': rules}] + messages %}
{%- endif %}
"""


@cache
def _tokenizer_with(player: str, name: str) -> Any:
    tokenizer = type(wild.program_of(player).tokenizer).from_pretrained(
        wild.PLAYERS[player].directory
    )
    own = wild.TEMPLATES[wild.PLAYERS[player].template]
    changed = _RULES + own.jinja if name == CUSTOM else wild.TEMPLATES[name].jinja
    tokenizer.chat_template = changed.strip()
    return tokenizer


def under_template(program: Program, name: str) -> Program:
    template = program.template if name == CUSTOM else wild.TEMPLATES[name]
    tokenizer = _tokenizer_with(program.parts.name, name)
    return replace(program, template=template, tokenizer=tokenizer)


def _with_system(messages: Sequence[Message]) -> list[Message]:
    if messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": "You are a helpful assistant."}, *messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m["role"] != "system"]


def _spaced(messages: Sequence[Message]) -> list[Message]:
    return [m | {"content": " " + m["content"] + "\n"} if m["role"] == "user" else m
            for m in messages]  # fmt: skip


def _plain_tools() -> list[dict[str, Any]]:
    """Tools with the keys in another order and a longer description."""
    out = []
    for tool in wild.TOOLS:
        own = tool["function"]
        function = {"parameters": own["parameters"], "name": own["name"]}
        function["description"] = own["description"] + " Returns JSON."
        out.append({"function": function, "type": "function"})
    return out


def _family_head(program: Program, messages: Sequence[Message]) -> str:
    return _as_family(program).render(messages)


def _family_glue(program: Program, new: Sequence[Message]) -> str:
    return _as_family(program).glue_text(new)


WRONG_PROMPTS: Mapping[str, tuple[Any, Callable[[Program], bool]]] = {
    "other family": (wrong_prompt(_family_head, _family_glue), lambda p: True),
    "system added": (
        wrong_prompt(lambda p, m: p.render(_with_system(m))),
        lambda p: p.parts.template != "command-r",  # it has a default of its own
    ),
    "system dropped": (wrong_prompt(lambda p, m: p.render(_without_system(m))), lambda p: True),
    "newline after header": (
        wrong_prompt(lambda p, m: p.render(m) + "\n", lambda p, m: p.glue_text(m) + "\n"),
        lambda p: True,
    ),
    "user text spaced": (
        wrong_prompt(lambda p, m: p.render(_spaced(m)), lambda p, m: p.glue_text(_spaced(m))),
        lambda p: p.parts.template not in ("llama3", "gemma"),  # they strip it
    ),
    "no generation prompt": (
        wrong_prompt(
            lambda p, m: p.render(m, is_open=False), lambda p, m: p.glue_text(m, is_open=False)
        ),
        lambda p: bool(p.template.header),
    ),
    "first token doubled": (
        wrong_prompt(
            lambda p, m: p.render(m),
            prefix=lambda p, ids: ids[:1] + ids,
        ),
        lambda p: bool(p.template.bos),
    ),
    "first token missing": (
        wrong_prompt(lambda p, m: p.render(m), prefix=lambda p, ids: ids[1:]),
        lambda p: bool(p.template.bos),
    ),
    "first token added": (
        wrong_prompt(
            lambda p, m: p.render(m), prefix=lambda p, ids: [p.tokenizer.eos_token_id, *ids]
        ),
        lambda p: not p.template.bos,
    ),
    "thinking switched off": (
        wrong_prompt(
            lambda p, m: p.render(m, enable_thinking=False),
            lambda p, m: p.glue_text(m, enable_thinking=False),
        ),
        lambda p: bool(p.template.no_thinking),
    ),
    "tools dropped": (
        wrong_prompt(lambda p, m: p.render(m, tools=None)), lambda p: p.template.has_tools
    ),
    "tools in another form": (
        wrong_prompt(lambda p, m: p.render(m, tools=_plain_tools())),
        lambda p: p.template.has_tools,
    ),
    "another date": (
        wrong_prompt(lambda p, m: p.render(m, date_string="2026-11-24")),
        lambda p: p.template.has_date,
    ),
}  # fmt: skip
"""Name -> (the mistake, whether a player can make it)."""


# -- mistakes with numbers -------------------------------------------------------------------------


def on_sampler(change: Callable[[np.ndarray, np.random.Generator], np.ndarray], share: float = 1.0):
    """Changes the sampler's log-probs of trained tokens of a share of the rows."""

    def apply(work: Work, lines: list[Line]) -> None:
        rng = np.random.default_rng(work.seed + 5)
        for line in lines:
            if rng.random() < share:
                on = line.mask & ~np.isnan(line.sampler)
                line.sampler = line.sampler.copy()
                line.sampler[on] = change(line.sampler[on], rng)

    return apply


def _bfloat16(values: np.ndarray, _: Any = None) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()


def _spoilt(value: float, share: float):
    def change(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.where(rng.random(len(values)) < share, value, values)

    return change


@contextmanager
def _model(model: Any) -> Iterator[Any]:
    yield model


def _masks(rows: Sequence[Row]) -> list[np.ndarray]:
    return [np.array([on for part in row.parts for on in part.is_trained]) for row in rows]


def after_update(steps: int, lr: float):
    def trainer(work: Work, rows: list[Row]) -> AbstractContextManager[Any]:
        advantages = advantages_of([row.episode for row in rows])
        return _model(wild.updated(work.program, [r.ids for r in rows], _masks(rows), advantages,
                                   steps=steps, lr=lr))  # fmt: skip

    return trainer


@cache
def _older(player: str, steps: int, lr: float) -> Any:
    """Weights of some updates ago: as far from the model as updates on other dialogues go."""
    program = wild.program_of(player)
    rows = [row_of(e, n) for n, e in enumerate(played(player, 900, Sampling(seed=900)))]
    advantages = advantages_of([row.episode for row in rows])
    # Updates backwards: the model is what comes of these weights.
    return wild.updated(program, [r.ids for r in rows], _masks(rows), [-a for a in advantages],
                        steps=steps, lr=lr)  # fmt: skip


def older(steps: int, lr: float = 2e-3):
    return lambda program, seed: _older(program.parts.name, steps, lr)


def another_part(program: Program, seed: int) -> Any:
    """One layer that is not the trained one."""
    import copy

    model = copy.deepcopy(program.model)
    generator = torch.Generator().manual_seed(seed)
    layers = wild.layers_of(model)
    layer = layers[seed % len(layers)]
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += 0.2 * weight.std() * noise
    return model


def _has_routers(program: Program) -> bool:
    return bool(wild.routers_of(program.model))


def _has_sinks(program: Program) -> bool:
    return any(name.endswith(".sinks") for name, _ in program.model.named_parameters())


def _has_window(program: Program) -> bool:
    return bool(getattr(program.model.config, "sliding_window", None))


def _has_versions(program: Program) -> bool:
    return program.parts.format in ("parquet", "verl", "slime")


def _shares(cause: str, make: Callable[[float], Any], **more: Any) -> list[Fault]:
    return [Fault(cause=cause, label=f"share {s:g}", rows=make(s), **more) for s in (0.3, 1.0)]


def _faults() -> list[Fault]:
    def tokens(cause: str, label: str, change: Any, **more: Any) -> Fault:
        return Fault(cause=cause, label=label, rows=change, **more)

    def values(cause: str, label: str, change: Any, **more: Any) -> Fault:
        return Fault(cause=cause, label=label, lines=change, kind="values", **more)

    def numerics(cause: str, label: str, **more: Any) -> Fault:
        return Fault(cause=cause, label=label, kind="numerics", **more)

    has_separator = {"needs": lambda p: bool(p.template.separator)}
    routed, sunk, windowed = (
        {"needs": _has_routers}, {"needs": _has_sinks}, {"needs": _has_window},
    )  # fmt: skip
    return [
        *_shares("reencoded", reencoded),
        *_shares("rerendered", rerendered),
        tokens("missing_final", "end of 0.3", missing_final(1, 0.3)),
        tokens("missing_final", "ends", missing_final(1, 1.0)),
        tokens("missing_final", "3 of the last", missing_final(3, 1.0, only_last=True)),
        *_shares("dropped_separator", dropped_separator, **has_separator),
        tokens("shifted", "+1", shifted(1, 1.0)),
        tokens("shifted", "-1, share 0.3", shifted(-1, 0.3)),
        tokens("after_stop", "3, share 0.3", after_stop(3, 0.3)),
        tokens("after_stop", "8", after_stop(8, 1.0)),
        tokens("observation_trained", "0.0", observation_trained(1.0, has_logprobs=False)),
        tokens("observation_trained", "share 0.3", observation_trained(0.3, has_logprobs=True)),
        tokens("boundary", "+3", boundary(3, 1.0)),
        tokens("boundary", "-4, share 0.3", boundary(-4, 0.3)),
        tokens("boundary", "header", headers_trained, needs=lambda p: bool(p.template.header)),
        *_shares("duplicated_prompt", duplicated_prompt),
        tokens("fillers", "share 0.1", fillers(0.1)),
        tokens("fillers", "later replies", fillers(1.0, only_later=True)),
        *(tokens("padding", f"{place}", padding(place, 1.0)) for place in ("left", "prompt")),
        tokens("padding", "replies, share 0.3", padding("replies", 0.3)),
        tokens("post_processed", "stripped", post_processed("stripped", 1.0)),
        tokens("post_processed", "one sentence", post_processed("first", 1.0)),
        tokens("post_processed", "completed, share 0.3", post_processed("completed", 0.3)),
        Fault(cause="injected_control", label="share 0.3", options={"injected": 0.3},
              needs=lambda p: p.template.call != ""),
        Fault(cause="injected_control", label="share 1", options={"injected": 1.0}),
        *_shares("thinking_dropped", thinking_dropped,
                 needs=lambda p: p.parts.template == "thinking"),
        *(Fault(cause="wrong_template", label=label, kind="template", rows=change, needs=needs)
          for label, (change, needs) in WRONG_PROMPTS.items()),
        Fault(cause="processed", label="sampler at 0.7", kind="values",
              sampling={"temperature": 0.7}),
        Fault(cause="processed", label="trainer at 0.7", kind="values",
              sampling={"temperature": 0.7, "is_raw": True}, work={"temperature": 0.7}),
        Fault(cause="processed", label="top-p 0.9", kind="values", sampling={"top_p": 0.9}),
        values("clamped", "-3", on_sampler(lambda x, _: np.maximum(x, -3.0))),
        values("clamped", "-1", on_sampler(lambda x, _: np.maximum(x, -1.0))),
        values("quantised", "2 decimals", on_sampler(lambda x, _: np.round(x, 2))),
        values("quantised", "1 decimal", on_sampler(lambda x, _: np.round(x, 1))),
        values("quantised", "bfloat16", on_sampler(_bfloat16)),
        values("nonfinite", "NaN", on_sampler(_spoilt(np.nan, 0.01))),
        values("nonfinite", "-inf", on_sampler(_spoilt(-np.inf, 0.01))),
        values("positive", "probabilities", on_sampler(lambda x, _: np.exp(x))),
        values("positive", "negated, share 0.3", on_sampler(lambda x, _: -x, 0.3)),
        values("positive", "log2", on_sampler(lambda x, _: x / np.log(2))),
        *(numerics("kernel_noise", f"std {s:g}", sampling={"noise_std": s})
          for s in (0.05, 0.15, 0.4)),
        numerics("dropout", "attention 0.1",
                 trainer=lambda w, _: wild.dropping(w.program.model, attention=0.1)),
        numerics("dropout", "hidden 0.1",
                 trainer=lambda w, _: wild.dropping(w.program.model, hidden=0.1)),
        numerics("other_weights", "2 updates", weights=older(2)),
        numerics("other_weights", "8 updates", weights=older(8)),
        numerics("other_weights", "another layer", weights=another_part),
        numerics("stale", "4 updates, half", weights=older(4), share=0.5,
                 work={"has_versions": True}, needs=_has_versions),
        numerics("stale", "12 updates, half", weights=older(12), share=0.5,
                 work={"has_versions": True}, needs=_has_versions),
        numerics("after_update", "1 step", trainer=after_update(1, 2e-3)),
        numerics("after_update", "4 steps", trainer=after_update(4, 2e-3)),
        numerics("ignored_sinks", "all layers", **sunk,
                 trainer=lambda w, _: wild.without_sinks(w.program.model)),
        numerics("ignored_sinks", "one layer", **sunk,
                 trainer=lambda w, _: wild.without_sinks(w.program.model, [1])),
        numerics("ignored_window", "all layers", **windowed,
                 trainer=lambda w, _: wild.without_window(w.program.model)),
        *(numerics("routing_flips", f"std {s:g}", options={"router_std": s},
                   **routed)
          for s in (0.05, 0.2)),
        numerics("routing_flips", "trainer, std 0.1", **routed,
                 trainer=lambda w, _: wild.noisy_routers(w.program.model, 0.1, w.seed)),
    ]  # fmt: skip


FAULTS = _faults()


def fault(cause: str, label: str = "") -> Fault:
    return next(f for f in FAULTS if f.cause == cause and f.label.startswith(label))


PAIRS: Sequence[tuple[Fault, Fault]] = [
    (fault(*one), fault(*other))
    for one, other in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["pairs"]
]
"""Two mistakes of one program."""


# -- making a dump ---------------------------------------------------------------------------------


_PLAYED: dict[Any, list[Episode]] = {}


def played(player: str, seed: int, sampling: Sampling, **options: Any) -> list[Episode]:
    """Dialogues of a player; the same ones are sampled once."""
    key = (player, seed, sampling, tuple(sorted(options.items())))
    if key not in _PLAYED:
        if len(_PLAYED) > 24:
            _PLAYED.clear()
        options = dict(options)
        program = wild.program_of(player)
        if template := options.pop("template", ""):
            program = under_template(program, template)
        if weights := options.pop("weights", None):
            program = replace(program, model=weights(program, seed))
        std = options.pop("router_std", 0.0)
        with ExitStack() as stack:
            if std:
                stack.enter_context(wild.noisy_routers(program.model, std, seed))
            _PLAYED[key] = wild.play(program, sampling, **options)
    return _PLAYED[key]


def advantages_of(episodes: Sequence[Episode]) -> list[float]:
    """Reward minus the mean of the task, as GRPO has it."""
    means = {
        task: np.mean([e.reward for e in episodes if e.task == task])
        for task in {e.task for e in episodes}
    }
    return [float(e.reward - means[e.task]) for e in episodes]


def dump_lines(
    program: Program, seed: int, faults: Sequence[Fault], healthy: Mapping[str, Any] | None = None
) -> tuple[Work, list[Line]]:
    """The training rows of a program that makes these mistakes."""
    own = dict(healthy or {})
    player = program.parts.name
    sampling: dict[str, Any] = {"seed": seed, **own.pop("sampling", {})}
    options: dict[str, Any] = dict(own.pop("options", {}))
    if template := options.get("template"):
        program = under_template(program, template)
    work = Work(program, seed, rng=random.Random(seed), **own.pop("work", {}))
    share = 1.0
    weights: Any = None
    for one in faults:
        sampling |= one.sampling
        options |= one.options
        for name, value in one.work.items():
            setattr(work, name, value)
        if one.weights is not None:
            weights, share = one.weights, one.share
    episodes = played(player, seed, Sampling(**sampling), **options)
    if weights is not None:
        old = played(player, seed, Sampling(**sampling), weights=weights, **options)
        tasks = sorted({e.task for e in old})
        stale = set(tasks[: round(share * len(tasks))])
        new = [replace(e, version=VERSION - 2) for e in old if e.task in stale]
        episodes = new + [e for e in episodes if e.task not in stale]
    rows = [row_of(e, n) for n, e in enumerate(episodes)]
    for one in faults:
        if one.rows is not None:
            one.rows(work, rows)
    pad = program.tokenizer.pad_token_id
    with ExitStack() as stack:
        model = program.model
        for one in faults:
            if one.trainer is not None:
                model = stack.enter_context(one.trainer(work, rows))
        if own.pop("is_bfloat16", False):
            import copy

            model = copy.deepcopy(model).bfloat16()
        torch.manual_seed(seed)  # of dropout
        trainer = wild.score(
            model, [row.ids for row in rows], pad=pad, temperature=work.temperature,
            is_left=work.is_left,
        )  # fmt: skip
    advantages = advantages_of([row.episode for row in rows])
    lines: list[Line] = []
    for row, values, advantage in zip(rows, trainer, advantages, strict=True):
        sizes = [len(part.ids) for part in row.parts]
        episode = row.episode
        last = episode.heads[-1] + 1
        lines.append(Line(
            ids=np.array(row.ids, np.int32),
            mask=np.array([on for part in row.parts for on in part.is_trained], np.bool_),
            sampler=np.array([x for part in row.parts for x in part.logprobs], np.float32),
            trainer=values,
            prompt_length=row.prompt_length,
            turn=np.repeat([part.turn for part in row.parts], sizes).astype(np.int32),
            advantage=advantage, reward=episode.reward, group=episode.task, step=STEP,
            version=episode.version if work.has_versions else None,
            messages=episode.messages[:last],
            engine_ids=episode.replies, engine_prompt_ids=episode.prompts,
        ))  # fmt: skip
    for one in faults:
        if one.lines is not None:
            one.lines(work, lines)
    return work, lines


def k2_of(lines: Sequence[Line]) -> float:
    """Mean of d^2 / 2 over trained tokens that have both sides' log-probs."""
    d = np.concatenate([(line.trainer - line.sampler)[line.mask] for line in lines]).astype(float)
    d = d[np.isfinite(d)]
    return float((d**2).mean() / 2) if len(d) else 0.0


@cache
def floor_of(player: str, seed: int) -> float:
    return k2_of(dump_lines(wild.program_of(player), seed, [])[1])


def written(folder: Path, work: Work, lines: Sequence[Line], level: str) -> Path:
    """What a program recorded, at one level of data."""
    program = work.program
    if level == "a":
        path = folder / "rows.jsonl"
        with open(path, "w") as file:
            for line in lines:
                row = {
                    "token_ids": line.ids.tolist(), "loss_mask": line.mask.astype(int).tolist(),
                    "rollout_logprobs": wild._own(line.sampler, line.mask),
                    "trainer_logprobs": wild._own(line.trainer, line.mask),
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
        return path
    if level == "b":
        lines = [replace(line, messages=None) for line in lines]
    if level != "e":
        lines = [replace(line, engine_ids=None, engine_prompt_ids=None) for line in lines]
    facts = {
        "temperature": work.temperature, "eos_ids": sorted(program.end_ids),
        "trainer_version": VERSION,
    }  # fmt: skip
    if level in "ce" and program.template.has_tools:
        facts["tools"] = json.dumps(wild.TOOLS)
    return wild.write_parquet(folder, lines, facts)


def asked(work: Work, lines: Sequence[Line], level: str) -> dict[str, Any]:
    """What the doctor says of a dump."""
    parts = work.program.parts
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), work, lines, level)
        directory = str(parts.directory)
        given = {} if level == "a" else {"model": directory}
        began = time.perf_counter()
        try:
            diagnosis = diagnose(path, **given)
            found = {
                cause.name: diagnosis.certainty_of(cause, finding)[0]
                for cause, finding in diagnosis.causes
            }
        except Exception as error:
            text = " ".join(str(error).split()).replace(folder, "DUMP").replace(directory, "DIR")
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}, {last.name}"
            return {"named": {}, "raised": f"{type(error).__name__} in {where}: {text[:300]}"}
        shares = {n: round(diagnosis.share_of(n), 3) for n in found}
        return {
            "named": found, "shares": shares, "outcome": diagnosis.outcome,
            "seconds": round(time.perf_counter() - began, 2),
            "cannot_show": sorted(diagnosis.cannot_show),
            "ruled_out": sorted({
                HYPOTHESES[c].cause for c in diagnosis.ruled_out if c in HYPOTHESES
            }),
        }  # fmt: skip


def is_of(name: str, cause: str) -> bool:
    """Whether naming `name` is right where `cause` was injected."""
    known = name in CAUSES and cause in CAUSES
    return name == cause or (known and is_same_class(name, cause))


def judged(
    found: dict[str, Any], causes: Sequence[str], also: Collection[str] = ()
) -> dict[str, Any]:
    """also: causes that are as right where "rerendered" was injected."""
    names = list(found["named"])
    proved = [n for n, sure in found["named"].items() if sure == "proved"]

    def is_right(name: str, cause: str) -> bool:
        return is_of(name, cause) or (cause == "rerendered" and name in also)

    first = bool(names) and any(is_right(names[0], c) for c in causes)
    outcome = found.get("outcome", "raised")
    verdict = "right" if first else "wrong" if names else outcome
    verdict = "undecided" if verdict in ("differs", "not_judged") else verdict
    told, ruled_out = found.pop("cannot_show", ()), found.pop("ruled_out", ())
    if verdict == "consistent" and causes and all(any(is_of(n, c) for n in told) for c in causes):
        verdict = "not shown"
    return {
        "verdict": verdict,
        "first": first,
        "all": all(any(is_right(n, c) for n in names) for c in causes),
        "false_proved": [n for n in proved if not any(is_right(n, c) for c in causes)],
        "false_ruled_out": [
            c for c in causes if c in ruled_out and not any(is_right(n, c) for n in names)
        ],
        **({"also": sorted(also)} if also else {}),
        **found,
    }


# -- the parts -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is run."""

    seeds: Sequence[int] = (0,)
    causes: Sequence[str] = ()
    levels: Sequence[str] = ()
    sample: int | None = None
    """Cases of each part and player, drawn at random, the same ones each time."""

    def drawn(self, cases: Iterable[T]) -> list[T]:
        out = list(cases)
        if self.sample is None:
            return out
        return random.Random(5).sample(out, min(self.sample, len(out)))


def reaches(one: Fault, program: Program, lines: Sequence[Line]) -> bool:
    """False for a control token in the replies of a tool that no row has called, and for weights
    from before updates that changed no bit: all advantages were 0."""
    token = program.template.controls[-1]
    if "injected" in one.options:
        return any(token in str(line.messages) for line in lines)
    if one.weights is None:
        return True
    old = one.weights(program, 0).parameters()
    return any(not torch.equal(*pair) for pair in zip(old, program.model.parameters(), strict=True))


def singles(player: str, what: Asked) -> list[dict[str, Any]]:
    return _cases(player, what, [(one,) for one in FAULTS])


def pairs(player: str, what: Asked) -> list[dict[str, Any]]:
    return _cases(player, what, PAIRS)


def _cases(player: str, what: Asked, cases: Sequence[tuple[Fault, ...]]) -> list[dict[str, Any]]:
    program = wild.program_of(player)
    out: list[dict[str, Any]] = []
    possible = [
        faults
        for faults in cases
        if all(one.needs(program) for one in faults)
        and (not what.causes or {one.cause for one in faults} & set(what.causes))
    ]
    for faults in what.drawn(possible):
        causes = [one.cause for one in faults]
        for seed in what.seeds:
            work, lines = dump_lines(program, seed, faults)
            if not all(reaches(one, program, lines) for one in faults):
                continue
            k2, floor = k2_of(lines), floor_of(player, seed)
            for level in what.levels or LEVELS:
                case = {
                    "player": player, "level": level, "causes": causes,
                    "strength": " + ".join(one.label for one in faults), "seed": seed,
                    "times": round(k2 / max(floor, 1e-12), 2),
                    **judged(asked(work, lines, level), causes, work.also),
                }  # fmt: skip
                show(case)
                out.append(case)
    return out


HEALTHY: Mapping[str, Mapping[str, Any]] = {
    "no noise": {"sampling": {"noise_std": 0.0}},
    "noise 0.003": {"sampling": {"noise_std": 0.003}},
    "the usual": {},
    "noise 0.02": {"sampling": {"noise_std": 0.02}},
    "trainer in bfloat16": {"is_bfloat16": True},
    "sampler in bfloat16": {"sampling": {"is_bfloat16": True}},
    "both in bfloat16": {"sampling": {"is_bfloat16": True}, "is_bfloat16": True},
    "cut replies": {"sampling": {"max_tokens": 12}},
    "one reply": {"options": {"max_replies": 1}},
    "few rows": {"options": {"num_tasks": 1, "group_size": 4}},
    "one row of a task": {"options": {"num_tasks": 16, "group_size": 1}},
    "forced words": {"options": {"forced": True}},
    "no system message": {"options": {"has_system": False}},
    "long rows": {"options": {"max_replies": 8}, "sampling": {"max_tokens": 96}},
    "temperature 0.6 on both sides": {
        "sampling": {"temperature": 0.6}, "work": {"temperature": 0.6},
    },
    "raw log-probs at 0.6": {"sampling": {"temperature": 0.6, "is_raw": True}},
    "padded on the left": {"work": {"is_left": True}},
    "another template on both sides": {"options": {"template": CUSTOM}},
    "with versions": {"work": {"has_versions": True}},
}  # fmt: skip
"""Kinds of dumps with nothing wrong: what differs from the usual one."""


def healthy(player: str, what: Asked) -> list[dict[str, Any]]:
    program = wild.program_of(player)
    out: list[dict[str, Any]] = []
    for kind, settings in what.drawn(HEALTHY.items()):
        for seed in what.seeds:
            work, lines = dump_lines(program, seed, [], settings)
            work.program = program  # its directory has the template of its own
            for level in what.levels or LEVELS:
                found = judged(asked(work, lines, level), [])
                case = {"player": player, "level": level, "causes": [], "strength": kind,
                        "seed": seed, "k2": k2_of(lines), **found}  # fmt: skip
                show(case)
                out.append(case)
    return out


PARTS: Mapping[str, Callable[[str, Asked], list[dict[str, Any]]]] = {
    "singles": singles, "pairs": pairs, "healthy": healthy,
}  # fmt: skip


def show(case: Mapping[str, Any]) -> None:
    names = ", ".join(
        f"{n} ({sure}, {case.get('shares', {}).get(n, 0):.0%})" for n, sure in case["named"].items()
    )
    moved = f"{case['times']:9.1f} x floor" if "times" in case else f"k2 {case['k2']:12.2e}"
    verdict = case["verdict"] if case["causes"] else case.get("outcome", "raised")
    if len(case["causes"]) > 1 and not case["all"]:
        verdict += ", one"
    print(
        f"{case['player']:15} {case['level']:2}{'+'.join(case['causes']) or 'healthy':28}"
        f"{case['strength']:32}{moved}  {verdict:12}{case.get('seconds', 0):5.1f} s  "
        f"{case.get('raised', names)}",
        flush=True,
    )


def is_seen(case: Mapping[str, Any]) -> bool:
    """Whether a defect shows in the data of its level: it moves log-probs, or is in its records."""
    return case["times"] >= FACTOR or bool(SILENT & set(case["causes"]))


def summary(part: str, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one part, by level."""
    out: dict[str, Any] = {"cases": len(cases), "raised": sum("raised" in c for c in cases)}
    for level in LEVELS:
        own = [c for c in cases if c["level"] == level]
        if not own:
            continue
        if part == "healthy":
            out[level] = {
                "dumps": len(own), "without_a_cause": sum(not c["named"] for c in own),
                "outcomes": dict(Counter(c.get("outcome", "raised") for c in own)),
                "named": dict(Counter(f"{c['strength']}: {', '.join(c['named'])}"
                                      for c in own if c["named"])),
            }  # fmt: skip
            continue
        loud = [c for c in own if c["times"] >= FACTOR]
        silent = [c for c in own if c["times"] < FACTOR]
        out[level] = {
            "moves the gap": dict(Counter(c["verdict"] for c in loud)),
            "moves little or nothing": dict(Counter(c["verdict"] for c in silent)),
            "false_proved": dict(Counter(
                f"{'+'.join(c['causes'])} -> {n}" for c in own for n in c["false_proved"])),
            "false_ruled_out": sum(bool(c.get("false_ruled_out")) for c in own),
            "wrong": dict(Counter(
                f"{'+'.join(c['causes'])}: {next(iter(c['named']))}"
                for c in own if c["verdict"] == "wrong")),
            "consistent": dict(Counter(
                f"{'+'.join(c['causes'])}, {c['strength']}"
                for c in own if c["verdict"] == "consistent")),
        }  # fmt: skip
        if part == "pairs":
            out[level]["both_named"] = f"{sum(c['all'] for c in own)} of {len(own)}"
    return out


# -- running ---------------------------------------------------------------------------------------


def results(half: str) -> Path:
    return HERE / f"doctor-wild-{half}.json"


def _of_player(player: str, parts: Sequence[str], what: Asked) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    return {part: PARTS[part](player, what) for part in parts}


def write(half: str, found: Mapping[str, Mapping[str, Any]], words: str) -> None:
    """found: part -> player -> cases. One line for each case."""
    from run import host

    commands = [f"python docs/proof/doctor_wild.py {words}"]
    if results(half).is_file():
        earlier = json.loads(results(half).read_text())["commands"]
        commands = [*(c for c in earlier if c not in commands), *commands]
    figures = {
        part: summary(part, [c for cases in of.values() for c in cases])
        for part, of in found.items()
    }
    head = {
        "part": f"doctor_wild {half}", "date": datetime.now(UTC).date().isoformat(),
        "commands": commands, "host": host(),
        "figures": figures,
    }  # fmt: skip
    lines = [json.dumps(head, indent=1)[:-2] + ',\n "cases": {']
    for part, of in found.items():
        lines.append(f'  "{part}": {{')
        for player, cases in of.items():
            lines.append(f'   "{player}": [')
            rows = [json.dumps(_short(c), ensure_ascii=True) for c in cases]
            lines.append(",\n".join(f"    {row}" for row in rows))
            lines.append("   ]" + "," * (player != list(of)[-1]))
        lines.append("  }" + "," * (part != list(found)[-1]))
    lines.append(" }\n}")
    results(half).write_text("\n".join(lines) + "\n")


def _short(case: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if k != "player" and v not in ([], {})}


def before(half: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The cases of an earlier run."""
    if not results(half).is_file():
        return {}
    read = json.loads(results(half).read_text())["cases"]
    empty = {"named": {}, "false_proved": [], "causes": []}
    return {
        part: {p: [{**empty, "player": p, **c} for c in cases] for p, cases in of.items()}
        for part, of in read.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--half", choices=("dev", "held"), default="dev")
    parser.add_argument("--players", nargs="+", default=[], choices=list(wild.PLAYERS))
    parser.add_argument("--causes", nargs="+", default=[])
    parser.add_argument("--levels", nargs="+", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sample", type=int, help="cases of each part and player")
    parser.add_argument("--jobs", type=int, default=1, help="players at a time")
    words = parser.parse_args()
    half, told = words.half, f"--half {words.half} --seeds {' '.join(map(str, words.seeds))}"
    if words.sample is not None:
        told += f" --sample {words.sample}"
    if words.levels:
        told += f" --levels {' '.join(words.levels)}"
    if words.players:
        told += f" --players {' '.join(words.players)}"
    if words.parts != list(PARTS):
        told = f"{' '.join(words.parts)} {told}"
    found = before(half)
    chosen = [n for n, p in wild.PLAYERS.items() if p.is_held == (half == "held")]
    chosen = [n for n in words.players or chosen if n in chosen]
    what = Asked(
        seeds=words.seeds, causes=tuple(words.causes), levels=tuple(words.levels),
        sample=words.sample,
    )  # fmt: skip
    is_whole = not words.causes
    fresh: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(words.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_of_player, name, words.parts, what): name for name in chosen}
        for done in as_completed(running):
            if error := done.exception():  # of a program, not of the doctor
                print(f"{running[done]} failed: {error!r}", flush=True)
                continue
            for part, cases in done.result().items():
                fresh.setdefault(part, {})[running[done]] = cases
                found.setdefault(part, {})[running[done]] = cases
            if is_whole:
                write(half, found, told)
    for part, of in (found if is_whole else fresh).items():
        cases = [c for cases in of.values() for c in cases]
        print(part, json.dumps(summary(part, cases), indent=1), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
