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
import copy
import json
import os
import random
import re
import shlex
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import wild_players as wild
from wild_players import Episode, Ids, Line, Message, Program, Sampling

from lockstep import diagnose
from lockstep.doctor.causes import CAUSES
from lockstep.doctor.explain import HYPOTHESES

HERE = Path(__file__).parent
FACTOR = 3.0
"""Times the floor's k2 from which on a cause must be found."""
VERSION = 3
LEVELS = ("a", "b", "c", "e")
"""What the doctor is given. a: ids, mask and both log-probs as JSON lines, and nothing else. b:
also lengths, advantages, rewards, stop ids, and the model. c: also messages, turns and tools. e:
also the ids that the engine returned and was sent."""

_ENGINES = ("engine_ids", "engine_prompt_ids")
LEFT_OUT = {"b": ("messages", "turn", *_ENGINES), "c": _ENGINES, "e": ()}
"""Level -> columns that are not given."""


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

    def keep(self, kept: slice) -> None:
        """Leaves out all other tokens."""
        self.ids, self.logprobs = self.ids[kept], self.logprobs[kept]
        self.is_trained = self.is_trained[kept]


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
    """One mistake of a program: a line of doctor_wild.toml, which explains the fields."""

    cause: str
    label: str
    needs: Callable[[Program], bool]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    work: Mapping[str, Any] = field(default_factory=dict)
    of_tasks: float = 1.0
    weights: Callable[[Program, int], Any] | None = None
    rows: Callable[[Work, list[Row]], None] | None = None
    trainer: Callable[[Work, list[Row]], AbstractContextManager[Any]] | None = None
    lines: Callable[[Work, list[Line]], None] | None = None

    @classmethod
    def read(cls, cause: str, label: str, *, needs: str = "", **table: Any) -> Fault:
        """The table's other entries are arguments of the function that it names."""
        own = {name: table.pop(name) for name in cls.__dataclass_fields__.keys() & table.keys()}
        for place in {"weights", "rows", "trainer", "lines"} & own.keys():
            own[place] = partial(globals()[own[place]], **table)
        return cls(cause=cause, label=label, needs=partial(has, what=needs), **own)


def has(program: Program, what: str) -> bool:
    """True if a program has what a mistake needs: a field of its template, or one of these."""
    template, model = program.parts.template, program.model
    match what:
        case "no bos":
            return not program.template.bos
        case "earlier thinking":
            return template == "thinking"
        case "no default system":
            return template != "command-r"
        case "unstripped text":
            return template not in ("llama3", "gemma")
        case "routers":
            return bool(wild.routers_of(model))
        case "sinks":
            return any(name.endswith(".sinks") for name, _ in model.named_parameters())
        case "window":
            return bool(getattr(model.config, "sliding_window", None))
        case "versions":
            return program.parts.format in ("parquet", "verl", "slime")
    return not what or bool(getattr(program.template, what))


# -- mistakes with tokens --------------------------------------------------------------------------


def _relabelled(part: Part, ids: Ids, end_ids: frozenset[int]) -> Part:
    """Gives a reply other ids. Its log-probs stay in their order; the end keeps its own; ids for
    which none is left are not trained."""
    ends = bool(part.ids) and part.ids[-1] in end_ids and bool(ids) and ids[-1] == part.ids[-1]
    own = part.logprobs[: len(part.logprobs) - ends]
    size = len(ids) - ends
    kept = min(size, len(own))
    logprobs = own[:kept] + [np.nan] * (size - kept) + part.logprobs[-1:] * ends
    part.is_trained = [True] * kept + [False] * (size - kept) + [True] * ends
    part.ids, part.logprobs = list(ids), logprobs
    return part


def _body(work: Work, part: Part) -> tuple[Ids, Ids]:
    """(ids before the end, the end) of a reply."""
    is_ended = bool(part.ids) and part.ids[-1] in work.program.end_ids
    return (part.ids[:-1], part.ids[-1:]) if is_ended else (part.ids, [])


def reencoded(work: Work, rows: list[Row], *, share: float) -> None:
    for part in (part for row in work.pick(share, rows) for part in row.replies):
        body, end = _body(work, part)
        ids = work.program.encode(work.program.decode(body)) + end
        _relabelled(part, ids, work.program.end_ids)


def rerendered(work: Work, rows: list[Row], *, share: float) -> None:
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
                same_texts.append(work.program.decode(part.ids) == work.program.decode(sampled))
    if same_texts and np.mean(same_texts) >= 0.5:
        work.also.add("reencoded")
    if has(work.program, "earlier thinking"):  # `_anew` leaves it out
        work.also.add("thinking_dropped")


def _anew(program: Program, row: Row) -> list[Part]:
    """The row as one rendering of all messages, encoded at once."""
    messages = [dict(m) for m in row.episode.messages[: row.episode.heads[-1] + 1]]
    if has(program, "earlier thinking"):
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
    parts: list[tuple[int, Ids]] = [(-1, [])]
    spans = enumerate([*ends, (10**9, 10**9)])
    turn, (begin, end) = next(spans)
    for id_, (at, _) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        # The end of the reply belongs to it.
        is_end = at >= end and (id_ in program.end_ids or program.decode([id_]) == "<|end|>")
        if at >= end and not is_end:
            parts.append((-1, []))
            turn, (begin, end) = next(spans)
        if (begin <= at < end or is_end) and parts[-1][0] != turn:
            parts.append((turn, []))
        parts[-1][1].append(id_)
        if is_end:
            parts.append((-1, []))
            turn, (begin, end) = next(spans)
    out: list[Part] = []
    for turn, ids in parts:
        if ids and turn < 0:
            out.append(Part.given(ids))
        elif ids:
            sampled = Part.said(row.episode.replies[turn], row.episode.logprobs[turn], turn)
            out.append(_relabelled(sampled, ids, program.end_ids))
    return out


def missing_final(
    work: Work, rows: list[Row], *, count: int, share: float, only_last: bool = False
) -> None:
    for row in work.pick(share, rows):
        for part in row.replies[-1:] if only_last else row.replies:
            part.keep(slice(max(1, len(part.ids) - count)))


def dropped_separator(work: Work, rows: list[Row], *, share: float) -> None:
    separator = work.program.template.separator
    for row in work.pick(share, rows):
        for n, part in enumerate(row.parts):
            text = work.program.decode(part.ids)
            if n and part.turn < 0 and text.startswith(separator):
                row.parts[n] = Part.given(work.program.encode(text[len(separator) :]))


def shifted(work: Work, rows: list[Row], *, by: int, share: float) -> None:
    """Log-probs of a row, all its replies in one list, are off by so many places."""
    for row in work.pick(share, rows):
        joined = [value for part in row.replies for value in part.logprobs]
        moved = joined[:by] + joined[:-by] if by > 0 else joined[-by:] + joined[by:]
        for part in row.replies:
            part.logprobs, moved = moved[: len(part.ids)], moved[len(part.ids) :]


def after_stop(work: Work, rows: list[Row], *, count: int, share: float) -> None:
    """The engine did not stop: what it went on to say is trained."""
    chosen = work.pick(share, [r for r in rows if r.replies[-1].ids[-1] in work.program.end_ids])
    sampler = wild.Sampler(work.program, Sampling(seed=work.seed + 77, max_tokens=count))
    drawn = sampler.draw([row.ids for row in chosen], frozenset())
    for row, (ids, logprobs) in zip(chosen, drawn, strict=True):
        last = row.parts[-1]
        last.ids = last.ids + ids
        last.logprobs = last.logprobs + logprobs
        last.is_trained = last.is_trained + [True] * count


def observation_trained(
    work: Work, rows: list[Row], *, share: float, has_logprobs: bool = True
) -> None:
    for row in work.pick(share, [r for r in rows if len(r.parts) > 2]):
        given = work.prompt_logprobs(row.ids) if has_logprobs else [0.0] * len(row.ids)
        at = 0
        for n, part in enumerate(row.parts):
            if n and part.turn < 0:
                part.logprobs = given[at : at + len(part.ids)]
                part.is_trained = [True] * len(part.ids)
            at += len(part.ids)


def boundary(work: Work, rows: list[Row], *, by: int, share: float) -> None:
    """by: tokens by which the response begins too late, or (negative) too early."""
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


def headers_trained(work: Work, rows: list[Row]) -> None:
    """The prompt's length was taken without add_generation_prompt."""
    size = len(work.program.encode(work.program.template.header))
    boundary(work, rows, by=-size, share=1.0)


def duplicated_prompt(work: Work, rows: list[Row], *, share: float) -> None:
    for row in work.pick(share, rows):
        row.parts.insert(0, Part.given(row.parts[0].ids))
        row.prompt_length *= 2


def fillers(work: Work, rows: list[Row], *, of_tokens: float, only_later: bool = False) -> None:
    for row in rows:
        for part in row.replies[1:] if only_later else row.replies:
            for n in range(len(part.logprobs)):
                if work.rng.random() < of_tokens:
                    part.logprobs[n] = 0.0


def padding(work: Work, rows: list[Row], *, place: str, share: float) -> None:
    """place: "left" of the prompt, behind the "prompt", or behind all "replies" but the last."""
    pad = work.program.tokenizer.pad_token_id
    longest = max(len(row.parts[0].ids) for row in rows) + 4
    for row in work.pick(share, rows):
        if place == "replies":
            for n in range(len(row.parts) - 2, 0, -1):
                if row.parts[n].turn >= 0:
                    row.parts.insert(n + 1, Part.given([pad] * (wild.MAX_REPLY_TOKENS // 2)))
            continue
        fill = [pad] * (9 if place == "prompt" else longest - len(row.parts[0].ids))
        row.parts.insert(int(place == "prompt"), Part.given(fill))
        row.prompt_length += len(fill)


def post_processed(work: Work, rows: list[Row], *, how: str, share: float) -> None:
    decode = work.program.decode
    for part in (part for row in work.pick(share, rows) for part in row.replies):
        body, end = _body(work, part)
        text = decode(body)
        new = text.rstrip(" .!?\n") if how == "stripped" else text.partition(". ")[0]
        if how == "completed" and not text.endswith("."):
            new = text + "."
        if new != text:
            # Ids that the text keeps are kept.
            size = len(body)
            while size and not new.startswith(decode(body[:size])):
                size -= 1
            rest = work.program.encode(new[len(decode(body[:size])) :])
            _relabelled(part, body[:size] + rest + end, work.program.end_ids)


def thinking_dropped(work: Work, rows: list[Row], *, share: float) -> None:
    decode = work.program.decode
    for part in (part for row in work.pick(share, rows) for part in row.replies[:-1]):
        body, _ = _body(work, part)
        thinking, mark, _ = decode(body).partition("</think>\n\n")
        if mark and thinking.startswith("<think>"):
            cut = len(thinking + mark)
            part.keep(slice(next(n for n in range(len(body) + 1) if len(decode(body[:n])) >= cut),
                            None))  # fmt: skip


# -- mistakes with the template --------------------------------------------------------------------


def wrong_prompt(
    work: Work, rows: list[Row], *, messages: str = "", tools: str = "", text: str = "",
    first: str = "", is_other_family: bool = False, in_glue: bool = False, **variables: Any,
) -> None:  # fmt: skip
    """The trainer writes the prompt by other rules than the engine was sent: the replies keep their
    ids. text: is written behind it. first: what happens to its first token. in_glue: what is
    between two replies is written so too. variables: of the template."""
    program, changed = work.program, MESSAGES[messages]
    by = program
    if is_other_family:  # the same tokenizer with the template of another family
        by = under_template(
            program, "chatml" if "<|im_start|>" not in program.template.controls else "phi3"
        )
    if tools:
        variables["tools"] = {"dropped": None, "other form": _plain_tools()}[tools]
    for row in rows:
        episode = row.episode
        said = changed(episode.messages[: episode.heads[0]])
        ids = program.encode(by.render(said, **variables) + text)
        ids = {"doubled": ids[:1] + ids, "missing": ids[1:],
               "added": [program.tokenizer.eos_token_id, *ids]}.get(first, ids)  # fmt: skip
        row.parts[0] = Part.given(ids)
        row.prompt_length = len(ids)
        for turn in range(1, len(episode.heads) * in_glue):
            new = changed(episode.messages[episode.heads[turn - 1] + 1 : episode.heads[turn]])
            ids = program.encode(by.glue_text(new, **variables) + text)
            place = next(n for n, part in enumerate(row.parts) if part.turn == turn) - 1
            if episode.replies[turn - 1][-1] not in program.end_ids:
                ids = row.parts[place].ids[:1] + ids
            row.parts[place] = Part.given(ids)


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
    parts = wild.PLAYERS[player]
    tokenizer = type(wild.program_of(player).tokenizer).from_pretrained(parts.directory)
    own = wild.TEMPLATES[parts.template]
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


MESSAGES: Mapping[str, Callable[[Sequence[Message]], list[Message]]] = {
    "": list,
    "with system": _with_system,
    "without system": lambda messages: [m for m in messages if m["role"] != "system"],
    "spaced": lambda messages: [
        m | {"content": f" {m['content']}\n"} if m["role"] == "user" else m for m in messages
    ],
}
"""Changes of the messages, by name."""


def _plain_tools() -> list[dict[str, Any]]:
    """Tools with the keys in another order and a longer description."""
    out = []
    for tool in wild.TOOLS:
        own = tool["function"]
        function = {"parameters": own["parameters"], "name": own["name"]}
        function["description"] = own["description"] + " Returns JSON."
        out.append({"function": function, "type": "function"})
    return out


# -- mistakes with numbers -------------------------------------------------------------------------


CHANGES: Mapping[str, Callable[[np.ndarray, np.random.Generator, float], np.ndarray]] = {
    "at least": lambda x, rng, by: np.maximum(x, by),
    "decimals": lambda x, rng, by: np.round(x, int(by)),
    "bfloat16": lambda x, rng, by: torch.from_numpy(x).bfloat16().float().numpy(),
    "in a hundredth": lambda x, rng, by: np.where(rng.random(len(x)) < 0.01, by, x),
    "probabilities": lambda x, rng, by: np.exp(x),
    "times": lambda x, rng, by: x * by,
    "log2": lambda x, rng, by: x / np.log(2),
}


def on_sampler(
    work: Work, lines: list[Line], *, how: str, by: float = 0.0, share: float = 1.0
) -> None:
    """Changes the sampler's log-probs of trained tokens of a share of the rows."""
    rng = np.random.default_rng(work.seed + 5)
    for line in lines:
        if rng.random() < share:
            on = line.mask & ~np.isnan(line.sampler)
            line.sampler = line.sampler.copy()
            line.sampler[on] = CHANGES[how](line.sampler[on], rng, by)


def on_model(work: Work, rows: list[Row], *, by: str, **settings: Any) -> Any:
    """by: a function of wild_players that changes the model while the trainer scores."""
    return getattr(wild, by)(work.program.model, **settings)


def routing_flips(work: Work, rows: list[Row], *, std: float) -> AbstractContextManager[Any]:
    return wild.noisy_routers(work.program.model, std, work.seed)


def after_update(work: Work, rows: list[Row], *, steps: int) -> AbstractContextManager[Any]:
    return nullcontext(_updated(work.program, rows, steps, 1.0))


def _updated(program: Program, rows: list[Row], steps: int, sign: float) -> Any:
    masks = [np.array([on for part in row.parts for on in part.is_trained]) for row in rows]
    advantages = [sign * a for a in advantages_of([row.episode for row in rows])]
    return wild.updated(program, [r.ids for r in rows], masks, advantages, steps=steps, lr=2e-3)


def older(program: Program, seed: int, *, steps: int) -> Any:
    return _older(program.parts.name, steps)


@cache
def _older(player: str, steps: int) -> Any:
    """Weights of some updates ago: as far from the model as updates on other dialogues go."""
    rows = [row_of(e, n) for n, e in enumerate(played(player, 900, Sampling(seed=900)))]
    # Updates backwards: the model is what comes of these weights.
    return _updated(wild.program_of(player), rows, steps, -1.0)


def another_part(program: Program, seed: int) -> Any:
    """One layer that is not the trained one."""
    model = copy.deepcopy(program.model)
    generator = torch.Generator().manual_seed(seed)
    layers = wild.layers_of(model)
    with torch.no_grad():
        for weight in layers[seed % len(layers)].parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += 0.2 * weight.std() * noise
    return model


PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FAULTS = [
    Fault.read(cause, label, **table)
    for cause, labels in PLAN["faults"].items()
    for label, table in labels.items()
]


def fault(cause: str, label: str = "") -> Fault:
    return next(f for f in FAULTS if f.cause == cause and f.label.startswith(label))


PAIRS: Sequence[tuple[Fault, Fault]] = [
    (fault(*one), fault(*other)) for one, other in PLAN["pairs"]
]
"""Two mistakes of one program."""


# -- making a dump ---------------------------------------------------------------------------------


@lru_cache(maxsize=24)
def played(player: str, seed: int, sampling: Sampling, **options: Any) -> list[Episode]:
    """Dialogues of a player; the same ones are sampled once."""
    program = wild.program_of(player)
    if template := options.pop("template", ""):
        program = under_template(program, template)
    if weights := options.pop("weights", None):
        program = replace(program, model=weights(program, seed))
    std = options.pop("router_std", 0.0)
    with wild.noisy_routers(program.model, std, seed) if std else nullcontext():
        return wild.play(program, sampling, **options)


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
    own = healthy or {}
    player = program.parts.name
    sampling: dict[str, Any] = {"seed": seed, **own.get("sampling", {})}
    options: dict[str, Any] = dict(own.get("options", {}))
    if template := options.get("template"):
        program = under_template(program, template)
    work = Work(program, seed, rng=random.Random(seed), **own.get("work", {}))
    for one in faults:
        sampling |= one.sampling
        options |= one.options
        work = replace(work, **one.work)
    episodes = played(player, seed, Sampling(**sampling), **options)
    for one in faults:
        if one.weights is not None:
            old = played(player, seed, Sampling(**sampling), weights=one.weights, **options)
            tasks = sorted({e.task for e in old})
            stale = set(tasks[: round(one.of_tasks * len(tasks))])
            new = [replace(e, version=VERSION - 2) for e in old if e.task in stale]
            episodes = new + [e for e in episodes if e.task not in stale]
    rows = [row_of(e, n) for n, e in enumerate(episodes)]
    for one in faults:
        if one.rows is not None:
            one.rows(work, rows)
    with ExitStack() as stack:
        model = program.model
        for one in faults:
            if one.trainer is not None:
                model = stack.enter_context(one.trainer(work, rows))
        if own.get("is_bfloat16"):
            model = copy.deepcopy(model).bfloat16()
        torch.manual_seed(seed)  # of dropout
        trainer = wild.score(
            model, [row.ids for row in rows], pad=program.tokenizer.pad_token_id,
            temperature=work.temperature, is_left=work.is_left,
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
            advantage=advantage, reward=episode.reward, group=episode.task,
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
    rows = [wild.columns_of(line, VERSION) for line in lines]
    if level == "a":
        names = ("token_ids", "rollout_logprobs", "trainer_logprobs")
        given = ({"loss_mask": list(map(int, row["loss_mask"])), **{n: row[n] for n in names}}
                 for row in rows)  # fmt: skip
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        return path
    for name in LEFT_OUT[level]:
        for row in rows:
            del row[name]
    facts = {"temperature": work.temperature, "stop_ids": sorted(work.program.end_ids)}
    if level != "b" and work.program.template.has_tools:
        facts["tools"] = json.dumps(wild.TOOLS)
    return wild.write_parquet(folder, rows, facts)


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
    return name == cause or (known and CAUSES[name].equivalents == CAUSES[cause].equivalents)


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


@dataclass(frozen=True)
class Kind:
    """A kind of dump: the mistakes of its program, or what a healthy one does differently."""

    label: str
    faults: Sequence[Fault] = ()
    healthy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def causes(self) -> list[str]:
        return [one.cause for one in self.faults]


PARTS: Mapping[str, Sequence[Kind]] = {
    "singles": [Kind(one.label, [one]) for one in FAULTS],
    "pairs": [Kind(" + ".join(one.label for one in pair), pair) for pair in PAIRS],
    "healthy": [Kind(label, healthy=changes) for label, changes in PLAN["healthy"].items()],
}


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


def judged_cases(
    player: str, kinds: Sequence[Kind], what: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A case for each kind, seed and level of data. what: the options of the command."""
    program = wild.program_of(player)
    chosen = [
        kind
        for kind in kinds
        if all(one.needs(program) for one in kind.faults)
        and (not kind.faults or not what.causes or {*kind.causes} & {*what.causes})
    ]
    if what.sample is not None:
        chosen = random.Random(5).sample(chosen, min(what.sample, len(chosen)))
    for kind, seed in product(chosen, what.seeds):
        work, lines = dump_lines(program, seed, kind.faults, kind.healthy)
        if not all(reaches(one, program, lines) for one in kind.faults):
            continue
        work.program = program  # its directory has the template of its own
        moved = {"k2": k2_of(lines)}
        if kind.faults:
            moved = {"times": round(moved["k2"] / max(floor_of(player, seed), 1e-12), 2)}
        for level in what.levels:
            found = judged(asked(work, lines, level), kind.causes, work.also if kind.faults else ())
            case = {"level": level, "causes": kind.causes, "player": player,
                    "strength": kind.label, "seed": seed, **moved, **found}  # fmt: skip
            show(case)
            yield case


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


def _of_player(player: str, what: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    return {part: list(judged_cases(player, PARTS[part], what)) for part in what.parts}


def write(half: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """found: part -> player -> cases. One line for each case."""
    from run import host, today

    commands = [f"python docs/proof/doctor_wild.py {shlex.join(sys.argv[1:])}"]
    if results(half).is_file():
        earlier = json.loads(results(half).read_text())["commands"]
        commands = [*(c for c in earlier if c not in commands), *commands]
    figures = {
        part: summary(part, [c for cases in of.values() for c in cases])
        for part, of in found.items()
    }
    lines: list[str] = []

    def line(case: Mapping[str, Any]) -> str:
        short = {k: v for k, v in case.items() if k != "player" and v not in ([], {})}
        lines.append(json.dumps(short))
        return f"@{len(lines) - 1}"

    document = {
        "part": f"doctor_wild {half}", "date": today(), "commands": commands, "host": host(),
        "figures": figures,
        "cases": {part: {player: list(map(line, cases)) for player, cases in of.items()}
                  for part, of in found.items()},
    }  # fmt: skip
    text = re.sub(r'"@(\d+)"', lambda place: lines[int(place[1])], json.dumps(document, indent=1))
    results(half).write_text(text + "\n")


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
    parser.add_argument("--levels", nargs="+", default=LEVELS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sample", type=int, help="cases of each part and player")
    parser.add_argument("--jobs", type=int, default=1, help="players at a time")
    what = parser.parse_args()
    half, found = what.half, before(what.half)
    chosen = [n for n, p in wild.PLAYERS.items() if p.is_held == (half == "held")]
    chosen = [n for n in what.players or chosen if n in chosen]
    fresh: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(what.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_of_player, name, what): name for name in chosen}
        for done in as_completed(running):
            if error := done.exception():  # of a program, not of the doctor
                print(f"{running[done]} failed: {error!r}", flush=True)
                continue
            for part, cases in done.result().items():
                fresh.setdefault(part, {})[running[done]] = cases
                found.setdefault(part, {})[running[done]] = cases
            if not what.causes:
                write(half, found)
    for part, of in (fresh if what.causes else found).items():
        cases = [c for cases in of.values() for c in cases]
        print(part, json.dumps(summary(part, cases), indent=1), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
