"""Any Hugging Face chat template, written piece by piece.

The text after a turn is found by rendering a short dialogue with the template and taking the
text behind the turn's end:

    the template of [Hello., a turn, the new messages]
        <|im_start|>user\\nHello.<|im_end|>\\n<|im_start|>assistant\\n the turn <|im_end|>
        \\n<|im_start|>user\\n...                  <- `extend` returns the text from here

So the work per turn does not grow with the dialogue. `proof` checks before the first prompt that
the template writes long dialogues as these pieces. It refuses dialogues that the template writes
in another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import groupby, product
from typing import Any

from lockstep.errors import RendererError
from lockstep.renderers.base import TokenIds
from lockstep.renderers.calls import function_json
from lockstep.renderers.config import JinjaConfig
from lockstep.renderers.jinja.marks import Marks
from lockstep.renderers.jinja.proof import TAKES_TOOLS, WAYS_OUT, TemplateProof, prove
from lockstep.renderers.jinja.reader import ShapeReader
from lockstep.renderers.jinja.shape import (
    CALLS,
    HELLO,
    THOUGHT,
    WORDS,
    ShapeFinder,
    calls_of,
    message_dict,
    value_of,
    with_inline,
)
from lockstep.renderers.jinja.template import ChatTemplate, TemplateRefusal, read_template
from lockstep.renderers.pieces import Piece, encode_pieces, refuse_replies, require_reply, split_ids
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.renderers.xml_calls import arguments_of, text_parameters
from lockstep.types import Message, ToolSchema


class JinjaRenderer(ShapeReader):
    """Writes and parses the tokens of a model's own chat template.

    `shape` holds the pieces of the template, `proof` the result of the check.
    """

    name = "jinja"

    def __init__(self, tokenizer: Tokenizer, config: JinjaConfig | None = None) -> None:
        """Reads the template, finds its pieces and checks them.

        Raises RendererError if the template is missing, malformed or hostile, or cannot be extended
        exactly; MissingExtraError without jinja2.
        """
        self.tokenizer = tokenizer
        self.config = config or JinjaConfig()
        text, where, special_tokens = read_template(tokenizer, self.config)
        self._template = ChatTemplate(text, where=where, date=self.config.date)
        self._variables = {**special_tokens, **self.config.variables}
        self._marks = Marks(tokenizer)
        self.tools_line = ""
        """How tools are written, and why, if not in the template's own form."""
        finder = ShapeFinder(run=self._run, marks=self._marks, source=text, where=where)
        why = "renderer.tools=text" if self.config.tools == "text" else self._examine(finder)
        if why and self.config.tools != "template":
            self._write_tools_as_text(finder, why)

    def _examine(self, finder: ShapeFinder, place: str = "", role: str = "") -> str:
        """Finds the pieces of the template and checks them; returns why it cannot take tools.

        place, role: where tools are text (`text_tools.jinja`); empty for the template's own form.
        """
        self.text_tools = {"text_tools": {"place": place, "role": role}} if place else {}
        self.proof: TemplateProof | None = None
        with self._template.probed():
            self.shape = finder.find()
            self._set_stops(self.shape.stop, self.shape.call_stop)
            opening, header = self._ids(self.shape.opening), self._ids(self.shape.header)
            # Nothing if no token ends where the header does.
            begun = opening[len(header) :] if opening[: len(header)] == header else ()
            self.thinking_opening: tuple[int, ...] = tuple(begun)
            self.proof = prove(self)
        if problem := self.proof.unsupported.get(TAKES_TOOLS, ""):
            self._set_stops(self.shape.stop)
            problem = f"the template cannot {TAKES_TOOLS}: {problem}"
        return problem

    def _write_tools_as_text(self, finder: ShapeFinder, why: str) -> None:
        """Chooses the message of the schemas and the role of results that let most dialogues extend
        exactly. If none does, the template takes no tools."""
        num_held: dict[tuple[str, str], int] = {}
        for form in product(("system", "user"), ("tool", "user")):
            with suppress(RendererError):
                if not self._examine(finder, *form) and self.proof is not None:
                    num_held[form] = len(self.proof.held)
        place, role = max(num_held, key=num_held.__getitem__, default=("", ""))
        self._examine(finder, place, role)
        if place:
            self.config = replace(self.config, tools="text")
            where = f"schemas in the first {place} message, results in {role} turns"
            self.tools_line = f"tools as text, {where}, since {why}"
        elif self.config.tools == "text":
            raise RendererError(
                "renderer.tools=text: this model's chat template can be extended exactly neither "
                "with results in a tool's turn nor in a user's. Set renderer.tools=template."
            )

    def _set_stops(self, *names: str) -> None:
        """Sets the tokens that end a turn of text and one of calls, `renderer.stop_tokens`, and the
        model's own."""
        stops = dict.fromkeys(name for name in (*names, *self.config.stop_tokens) if name)
        ids = dict.fromkeys((*self.tokenizer.require(stops).values(), *self.tokenizer.eos_ids))
        self.stop_ids: tuple[int, ...] = tuple(ids)

    # -- messages to ids ----------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Returns the first prompt, as the template writes it with its generation prompt.

        With thinking=keep, a history whose thinking the template would drop is written piece by
        piece instead. Raises RendererError, with the template's message, if it refuses them.
        """
        declared = tools if self.config.tools_in_prompt else ()
        if not messages:
            raise RendererError("the dialogue has no messages: a prompt needs one of a user.")
        if declared:
            self._require(TAKES_TOOLS)
        if self.config.thinking == "keep" and self._loses_thinking(messages):
            return self._pieces_of(messages, declared)
        return self.render_whole(messages, declared)

    def render_whole(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Returns the template's own rendering of a history, with its generation prompt."""
        text, mark = self._write(messages, tools, has_opening=True)
        self._require_words(messages, text, mark, tools)
        return encode_pieces(self.tokenizer, self._marks.pieces(text, mark))

    def extend(self, sampled_ids: TokenIds, messages: Sequence[Message]) -> list[int]:
        """Returns the end of a turn that was cut off, and what the template writes after a turn:
        `messages` and the next opening. Raises RendererError for an ability that the proof refused.
        """
        refuse_replies(messages)
        for what in _kinds(messages):
            self._require(what)
        ids = [int(id_) for id_ in sampled_ids]
        num_calls = sum(message.role == "tool" for message in messages)
        words = "" if num_calls else WORDS
        turn = Message(role="assistant", content=words, tool_calls=calls_of(num_calls))
        text, mark = self._write(messages, before=(HELLO, turn), has_opening=True)
        behind = self.shape.opening
        if messages or not self.shape.is_ended_by_next:
            behind = text[self._end_of(turn, text) :]
        self._require_words(messages, behind, mark)
        close: list[Piece] = []
        stop = self.shape.call_stop if num_calls else self.shape.stop
        if not ids or ids[-1] not in self.stop_ids:
            close = self._close(ids, stop if self.shape.is_ended_by_next else self.shape.stop)
        elif self.shape.is_ended_by_next and ids[-1] != self.tokenizer.control_id(stop):
            # The model named another role than the one to come.
            close = self._marks.pieces(stop, "")
        return encode_pieces(self.tokenizer, [*close, *self._marks.pieces(behind, mark)])

    def render_reply(self, message: Message) -> list[int]:
        """Returns the ids that a model samples for `message`, stop id included.

        Raises RendererError for what the template cannot write: thinking or several calls where it
        has no form for them, arguments that are not a JSON object.
        """
        require_reply(message)
        ids = self.reply_ids(message)
        stops = [at for at, id_ in enumerate(ids) if id_ in self.stop_ids]
        if stops != [len(ids) - 1]:
            shown = self.tokenizer.decode(ids)
            raise RendererError(f"a stop token stands inside of this reply: {shown!r}.")
        if len(self.parse(ids).tool_calls) != len(message.tool_calls):
            raise RendererError(
                "the calls of this reply could not be read back as the template writes them: "
                f"{self.tokenizer.decode(ids)!r}."
            )
        return ids

    def reply_ids(self, message: Message, after: Sequence[Message] = ()) -> list[int]:
        """Returns a turn as the template writes it before `after`, without its opening and with its
        stop token; as the last message if `after` is empty."""
        shape = self.shape
        how = shape.thinking
        if message.thinking and how is None:
            raise RendererError(
                "the message has thinking, and the chat template of this model writes none. Leave "
                "the thinking out."
            )
        for call in message.tool_calls:
            if shape.calls is None:
                what = f"the message calls a tool: {shape.no_calls}"
                raise RendererError(_sentences(what, self._way_out(TAKES_TOOLS)))
            if not shape.has_text_arguments and arguments_of(call) is None:
                raise RendererError(
                    f"the arguments of the call {call.name} are no JSON object, and the template "
                    f"takes them apart: {call.arguments[:80]!r}."
                )
        text, mark = self._write([message, *after], before=(HELLO,))
        base, _ = self._write((), before=(HELLO,))
        if not text.startswith(base):
            raise RendererError(
                "a later message changes the beginning: the template begins the dialogue with "
                f"{text[: len(base)]!r} then, and with {base!r} without it."
            )
        text = text[len(base) :]
        stop = shape.call_stop if message.tool_calls else shape.stop
        if not after and all(name != stop for _, name in self._marks.names(text)):
            # GLM-4.5 ends a turn with the token of the next role, Apriel the last one with nothing.
            has_own_end = message.tool_calls and not self.text_tools
            text += shape.call_stop if has_own_end else shape.words_end
        text = text[: self._end_of(message, text)]
        self._require_words([message], text, mark)
        if text.startswith(shape.opening):
            text = text[len(shape.opening) :]
        elif text.startswith(shape.header):
            text = text[len(shape.header) :].removeprefix(shape.lead)
            if how is not None:  # a history without thinking, where the opening begins with it
                text = f"{how.open}{self._marks.mark(message.thinking, mark)}{how.close}{text}"
        else:
            raise RendererError(
                f"the template begins a reply with {text[:60]!r}, and asks for one with "
                f"{shape.opening!r}."
            )
        return encode_pieces(self.tokenizer, self._marks.pieces(text, mark))

    # -- thinking -----------------------------------------------------------------------------

    def forgets(self, messages: Sequence[Message]) -> bool:
        """True with thinking=drop if the template drops the thinking of a turn that `messages`
        follow."""
        return self.config.thinking == "drop" and self.template_forgets(messages)

    def template_forgets(self, messages: Sequence[Message]) -> bool:
        """True if the template drops it, regardless of the setting. Also true of an empty block
        that belongs to an opening without thinking."""
        how = self.shape.thinking
        has_field = how is not None and bool(how.key)
        if not messages or (how is None and self.shape.opening == self.shape.header):
            return False
        calls = calls_of(sum(m.role == "tool" for m in messages))
        thought = THOUGHT if has_field else ""
        turn = Message(role="assistant", content=WORDS, thinking=thought, tool_calls=calls)
        text, _ = self._write(messages, before=(HELLO, turn))
        if has_field:
            return THOUGHT not in text
        base, _ = self._write((), before=(HELLO,))
        return not text[len(base) :].startswith(self.shape.opening)

    def _loses_thinking(self, messages: Sequence[Message]) -> bool:
        at = next((at for at, m in enumerate(messages) if m.thinking), None)
        if at is None or self.shape.thinking is None or messages[0].role == "assistant":
            return False
        after = [m for m in messages[at + 1 :] if m.role != "assistant"]
        return self.template_forgets(after)

    def _pieces_of(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Writes a history turn by turn, each turn with its thinking."""
        turns = [at for at, message in enumerate(messages) if message.role == "assistant"]
        ids = self.render_whole(messages[: turns[0]], tools)
        for at, next_turn in zip(turns, [*turns[1:], len(messages)], strict=True):
            after = messages[at + 1 : next_turn]
            is_spoken = bool(messages[at].thinking) or not after
            reply = self.reply_ids(messages[at], () if is_spoken else after)
            ids += [*reply, *self.extend(reply, after)]
        return ids

    def _close(self, ids: list[int], stop: str) -> list[Piece]:
        """The end of a turn that was cut off: the end of open thinking, the text before a stop
        token, `stop`."""
        text = self._shown(split_ids(self.tokenizer, ids), "\0")
        _, _, is_open = self._split_thinking(text)
        how = self.shape.thinking
        thinking = how.close if how is not None and is_open else ""
        before = self.shape.words_end.removesuffix(self.shape.stop)
        if before and text.endswith(before):
            before = ""
        return self._marks.pieces(thinking + before + stop, "")

    def with_tools(self, tools: Sequence[ToolSchema]) -> JinjaRenderer:
        """See `base.TypesArguments`."""
        made = copy(self)
        made._schemas = text_parameters(tools)
        return made

    # -- writing with the template ------------------------------------------------------------

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        before: Sequence[Message] = (),
        has_opening: bool = False,
    ) -> tuple[str, str]:
        """Returns (rendered text, the mark in it). Messages in `before` are ours and get no
        marks."""
        shape = self.shape
        ours = [message_dict(m, shape) for m in before]
        theirs = [message_dict(m, shape) for m in messages]
        declared = [function_json(tool) for tool in tools]
        written = json.dumps([ours, theirs, declared], ensure_ascii=False)
        mark = self._marks.choose([written, self._template.source])
        marked = [*ours, *self._marks.marked(theirs, mark)]
        if shape.thinking is not None and shape.thinking.key == "content":
            marked = [with_inline(message, shape.thinking) for message in marked]
        try:
            return self._run(marked, self._marks.marked(declared, mark), has_opening), mark
        except TemplateRefusal as refusal:
            if self.proof is None:
                raise
            way_out = self._accepted_change(marked, declared, has_opening)
            raise TemplateRefusal(_sentences(str(refusal), way_out)) from None

    def _run(self, messages: list[Any], tools: list[Any], has_opening: bool) -> str:
        given = {"messages": messages, "tools": tools or None, "documents": None}
        own = {"add_generation_prompt": has_opening, **self.text_tools, **self._variables}
        return self._template.render({**given, **own})

    def _require_words(
        self, messages: Sequence[Message], text: str, mark: str, tools: Sequence[ToolSchema] = ()
    ) -> None:
        """Raises RendererError if the template left out text of a message, or a tool."""
        wanted = [(f"words of the {said.role}'s message", said.content) for said in messages]
        for what, words in [*wanted, *(("a tool", tool.name) for tool in tools)]:
            marked = self._marks.mark(words, mark).strip()
            forms = (marked, *(json.dumps(marked, ensure_ascii=a)[1:-1] for a in (False, True)))
            if not any(form in text for form in forms):
                raise RendererError(f"the chat template leaves out {what}: {words.strip()[:80]!r}.")

    def _end_of(self, turn: Message, text: str) -> int:
        """Returns the end of a turn in rendered text, after its stop token."""
        stop = self.shape.call_stop if turn.tool_calls else self.shape.stop
        begin = 0
        is_ours = turn.content == WORDS or (turn.tool_calls and turn.tool_calls[0] == CALLS[0])
        if is_ours:  # behind the dialogue's beginning, which may end with the same token
            marker = value_of(turn.tool_calls[-1]) if turn.tool_calls else WORDS
            begin = text.find(marker) + len(marker)
        for at, name in self._marks.names(text):
            if at >= begin and name == stop:
                return at + len(name)
        raise RendererError(
            f"the template writes this turn without the {stop or 'stop token'} that ends others: "
            f"{text[-200:]!r}."
        )

    def _require(self, what: str) -> None:
        """Raises RendererError for an ability that the proof refused. During the proof everything
        is tried."""
        if self.proof is not None and (problem := self.proof.unsupported.get(what)):
            lack = f"this model's chat template has no way to {what}: {problem}"
            raise RendererError(_sentences(lack, self._way_out(what)))

    def _way_out(self, what: str) -> str:
        is_own = self.config.tools == "template"
        return WAYS_OUT.get(what) or WAYS_OUT["template" if is_own else "text"]

    def _accepted_change(self, messages: list[Any], tools: list[Any], has_opening: bool) -> str:
        """Names the first change of a refused dialogue that makes the template take it."""
        for name, change in _CHANGES.items():
            with suppress(RendererError):
                self._run(change(messages), tools, has_opening)
                return WAYS_OUT[name]
        return ""


def _sentences(*parts: str) -> str:
    return " ".join(f"{part.rstrip(' .')}." for part in parts if part)


def _joined(messages: list[Any]) -> list[Any]:
    out: list[Any] = []
    for role, run in groupby(messages, lambda message: message["role"]):
        several = list(run)
        if role == "tool" or any(message.get("tool_calls") for message in several):
            out += several
        else:
            words = "\n\n".join(message["content"] or "" for message in several)
            out.append({**several[0], "content": words})
    return out


def _without_system(messages: list[Any]) -> list[Any]:
    return _joined([{**m, "role": "user"} if m["role"] == "system" else m for m in messages])


_CHANGES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "join": _joined,
    "system": _without_system,
    "user": lambda messages: _joined([message_dict(HELLO, None), *messages]),
}


def _kinds(messages: Sequence[Message]) -> list[str]:
    """Returns the abilities, by the proof's names, that `messages` need."""
    replies = [message for message in messages if message.role == "tool"]
    roles = {message.role for message in messages}
    found = {
        "take a tool's reply": bool(replies),
        "take several replies to one turn": len(replies) > 1,
        "take an empty reply": any(not m.content.strip() for m in replies),
        "take a system message later on": not roles.isdisjoint(("system", "developer")),
        "take a user's words": "user" in roles and not replies,
        "take a reply and a user's words": {"user", "tool"} <= roles,
    }
    return [what for what, is_asked in found.items() if is_asked]
