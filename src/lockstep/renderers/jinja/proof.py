"""Checks, before the first prompt, that extending a dialogue gives the ids of the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lockstep.errors import RendererError
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.xml_calls import arguments_of
from lockstep.tables import tables_beside
from lockstep.types import Message, ToolSchema

_TABLES = tables_beside(__file__)
_MESSAGES = {name: Message.from_dict(fields) for name, fields in _TABLES["messages"].items()}


def _dialogue(names: str) -> tuple[Message, ...]:
    return tuple(_MESSAGES[name] for name in names.split())


TOOL = ToolSchema(**_TABLES["tool"])
SYSTEM, USER, ANSWER, CALL, REPLY = _dialogue("SYSTEM USER ANSWER CALL REPLY")
TAKES_TOOLS = "take tools"
_USERS, _REPLIES = "take a user's words", "take a tool's reply"
DIALOGUES: Mapping[str, tuple[str, tuple[Message, ...]]] = {
    name: (ability, _dialogue(names)) for name, (ability, names) in _TABLES["dialogues"].items()
}
"""Name -> the ability that the dialogue needs, its messages. Every template must take a user's
words. The model's turns in "truncated" lack their stop token."""
WITH_TOOLS = {name: _dialogue(names) for name, names in _TABLES["with_tools"].items()}
WAYS_OUT: Mapping[str, str] = _TABLES["ways_out"]
"""Ability or change of a dialogue -> a sentence for errors."""
REPLIES = {name: _dialogue(names) for name, names in _TABLES["replies"].items()}


@dataclass(frozen=True, kw_only=True)
class TemplateProof:
    """Result of the check."""

    held: tuple[str, ...]
    """Dialogues whose extended ids are the template's."""
    num_asked: int
    """Number of dialogues that were tried. Those with thinking are tried if the template has
    thinking."""
    unsupported: Mapping[str, str]
    """Ability -> reason why the template lacks it: its own refusal, or the first difference."""

    @property
    def line(self) -> str:
        """One line for the start of a run."""
        out = f"{len(self.held)} of {self.num_asked} dialogues extend exactly"
        if self.unsupported:
            out += f"; refused: {', '.join(self.unsupported)}"
        return out


def prove(renderer: Any) -> TemplateProof:
    """Extends each dialogue and compares the ids with the template's rendering of the whole.

    renderer: a `JinjaRenderer`, which can also write with the template itself.
    Raises RendererError, with the dialogue's name and the first difference, if a plain dialogue
    differs, or if thinking is to be dropped and differs.
    """
    held: list[str] = []
    num_asked = 0
    unsupported: dict[str, str] = {}
    if renderer.shape.no_calls:
        unsupported[TAKES_TOOLS] = renderer.shape.no_calls
    for name, (ability, messages) in DIALOGUES.items():
        if renderer.shape.thinking is None and any(m.thinking for m in messages):
            continue
        num_asked += 1
        has_calls = any(m.tool_calls for m in messages)
        if has_calls and renderer.shape.calls is None:
            unsupported.setdefault(ability, renderer.shape.no_calls)
            continue
        try:
            _check_cases(renderer, messages, is_cut=name == "truncated")
        except RendererError as error:
            problem = f"dialogue {name!r}: {error}"
        else:
            held.append(name)
            continue
        if ability == _USERS or (ability == "drop thinking" and renderer.config.thinking == "drop"):
            raise RendererError(f"this model's chat template cannot be extended exactly. {problem}")
        unsupported.setdefault(ability, problem)
        if ability == _REPLIES:
            unsupported.setdefault(TAKES_TOOLS, problem)
    return TemplateProof(held=tuple(held), num_asked=num_asked, unsupported=unsupported)


def _check_cases(renderer: Any, messages: Sequence[Message], *, is_cut: bool) -> None:
    """Raises RendererError if the extended dialogue differs from the template's ids."""
    has_calls = any(m.tool_calls for m in messages)
    tools = (TOOL,) if has_calls and renderer.config.tools_in_prompt else ()
    if renderer.shape.thinking is not None and renderer.thinking_opening:
        messages = [  # a model that is opened with thinking thinks
            replace(m, thinking=m.thinking or "Hm.") if m.role == "assistant" else m
            for m in messages
        ]
    turns = [at for at, m in enumerate(messages) if m.role == "assistant"]
    path = [(renderer.render_whole(messages[: turns[0]], tools), False)]
    for at, end in pairwise([*turns, len(messages)]):
        after = messages[at + 1 : end]
        is_forgotten = renderer.template_forgets(after)
        sampled = renderer.reply_ids(messages[at], () if is_forgotten else after)
        read = renderer.parse(sampled)
        if not _is_same(read, messages[at]):
            raise RendererError(
                f"the reply {renderer.tokenizer.decode(sampled)!r} is read as "
                f"{read}, and was written for {messages[at]}."
            )
        if is_cut:
            sampled = sampled[:-1]
        path.append((sampled, True))
        if is_forgotten:
            path = forgotten(renderer, path)
        path.append((renderer.extend(path[-1][0], after), False))
    ids = [id_ for piece, _ in path for id_ in piece]
    whole, show = renderer.render_whole(messages, tools), renderer.tokenizer.decode
    if ids != whole:
        at = first_difference(ids, whole)
        raise RendererError(
            f"the ids differ from place {at} on, behind {show(whole[max(at - 12, 0) : at])!r}. "
            f"Extended: {show(ids[at : at + 16])!r}; the template over the whole: "
            f"{show(whole[at : at + 16])!r}."
        )


def forgotten(
    renderer: Any, path: Sequence[tuple[list[int], bool]]
) -> list[tuple[list[int], bool]]:
    """Returns a path of (ids, is_sampled) with its thinking dropped: each sampled turn loses its
    thinking, and the opening before it the ids that begin thinking."""
    opening = list(renderer.thinking_opening)
    out: list[tuple[list[int], bool]] = []
    for at, (ids, is_sampled) in enumerate(path):
        if is_sampled:
            ids = renderer.without_thinking(ids)
        elif opening and path[at + 1][1] and ids[-len(opening) :] == opening:
            ids = ids[: -len(opening)]
        out.append((ids, False))
    return out


def _is_same(read: Message, message: Message) -> bool:
    """True if two messages are equal up to the spelling of arguments."""
    left = [(call.name, arguments_of(call)) for call in read.tool_calls]
    right = [(call.name, arguments_of(call)) for call in message.tool_calls]
    same = (read.content, read.thinking) == (message.content, message.thinking)
    return same and left == right and not read.parse_error
