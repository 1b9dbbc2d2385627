"""Mistral's instruct format, versions 3 (Tekken) and 7, piece by piece.

    <s>[SYSTEM_PROMPT]Search, then answer.[/SYSTEM_PROMPT]
    [AVAILABLE_TOOLS][{"type": "function", "function": {...}}][/AVAILABLE_TOOLS]
    [INST]Who is it?[/INST]                                    <- render ends here
    [TOOL_CALLS][{"name": "find", "arguments": {"q": 1}}]</s>  <- sampled
    [TOOL_RESULTS]000000000[TOOL_CONTENT]Bela[/TOOL_RESULTS]   <- extend

(Without the line breaks.) Version 3 has no system messages: their text goes before the last user's.
Its results are JSON: {"content": "Bela", "call_id": "000000000"}.

Where a prompt has several users' turns, the tools stand before the last. A user who speaks later
gets none: their prompts only grow.

Source: mistral-common 1.13.1 (tokens/tokenizers/instruct.py); tests/parity/test_mistral_parity.py
compares with it and lists every difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from lockstep.errors import RendererError
from lockstep.renderers.base import TokenIds, TurnRenderer
from lockstep.renderers.calls import call_text, function_json, read_call_array
from lockstep.renderers.config import JinjaConfig, MistralConfig
from lockstep.renderers.jinja.template import read_template
from lockstep.renderers.pieces import Piece, cut_at, split_turn, text_of
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolSchema

MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
V7_TOKENS = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
LATER_TOKEN = "[ARGS]"


class MistralRenderer(TurnRenderer):
    """Messages to Mistral's tokens and back.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer(control_tokens=(*MISTRAL_TOKENS, *V7_TOKENS))
    >>> renderer = MistralRenderer(tokenizer)
    >>> tokenizer.decode(renderer.render([Message(role="user", content="hi")]))
    '<s>[INST]hi[/INST]'
    >>> tokenizer.decode(renderer.render_reply(Message(role="assistant", content="Yes?")))
    'Yes?</s>'
    """

    name = "mistral"

    def __init__(self, tokenizer: Tokenizer, config: MistralConfig | None = None) -> None:
        """Raises RendererError, which lists the missing control tokens."""
        self.config = config or MistralConfig()
        ids = list(tokenizer.require(MISTRAL_TOKENS).values())
        self._begin, end, *self._user = ids[:4]
        self._tools, (self._calls, *self._result) = ids[4:6], ids[6:]
        super().__init__(tokenizer, stop_ids=(end,))
        variant = self.config.variant
        self._is_v7 = (_version(tokenizer) if variant == "auto" else variant) == "v7"
        if self._is_v7:
            *self._system, self._content = tokenizer.require(V7_TOKENS).values()

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Piece]:
        rest = list(messages)
        said = [message.role for message in rest if message.role not in ("system", "developer")]
        if not self._is_v7 and said[:1] != ["user"]:
            rest.insert(0, Message(role="user"))
        return [self._begin, *self._write(rest, tools if self.config.tools_in_prompt else ())]

    def _follow_up(self, messages: Sequence[Message]) -> list[Piece]:
        return self._write(messages)

    def _write(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[Piece]:
        runs = [(role, list(run)) for role, run in groupby(messages, _role)]
        last_user = max((at for at, (role, _) in enumerate(runs) if role == "user"), default=-1)
        listed = json.dumps([function_json(tool) for tool in tools], ensure_ascii=False)
        declared: list[Piece] = [self._tools[0], listed, self._tools[1]] if tools else []
        of_system = [m.content for role, run in runs if role == "system" for m in run if m.content]
        head = "" if self._is_v7 else "\n\n".join(of_system)
        pieces: list[Piece] = []
        for at, (role, run) in enumerate(runs):
            match role:
                case "system" if self._is_v7:
                    for message in run:
                        pieces += [self._system[0], message.content, self._system[1]]
                case "user":
                    words = "\n\n".join(message.content for message in run)
                    if at == last_user:
                        pieces += declared
                        words = f"{head}\n\n{words}" if head else words
                    pieces += [self._user[0], words, self._user[1]]
                case "tool":
                    for number, message in enumerate(run):
                        pieces += self._result_pieces(message, f"{number:09}")
                case "assistant":
                    for message in run:
                        pieces += self._body(message, is_given=True)
                case _:
                    continue  # written with the user's words
        if last_user < 0:
            pieces += declared + ([self._user[0], head, self._user[1]] if head else [])
        return pieces

    def _result_pieces(self, message: Message, number: str) -> list[Piece]:
        """number: id for a call that has none. The format demands one."""
        begin, end = self._result
        call_id = message.tool_call_id or number
        if self._is_v7:
            return [begin, call_id, self._content, message.content, end]
        result = {"content": _value_of(message.content or "{}"), "call_id": call_id}
        return [begin, json.dumps(result, ensure_ascii=False), end]

    def _body(self, message: Message, *, is_given: bool = False) -> list[Piece]:
        """is_given: the message is part of a history, which is written without spaces at its
        end."""
        self._refuse_thinking(message)
        pieces: list[Piece] = [message.content.rstrip(" ") if is_given else message.content]
        if message.tool_calls:
            calls = ", ".join(call_text(call, has_id=True) for call in message.tool_calls)
            pieces += [self._calls, f"[{calls}]"]
        return [*pieces, self.stop_ids[0]]

    def parse(self, sampled_ids: TokenIds) -> Message:
        """Parses one turn: text, and behind [TOOL_CALLS] a JSON list of calls.

        The text of their arguments is kept, and an "id" if the model wrote one. Malformed parts
        stay in `content`, control tokens by name, and `parse_error` says why.
        """
        parts, error = split_turn(self.tokenizer, sampled_ids, self.stop_ids)
        words, behind, problem = cut_at(self.tokenizer, parts, self._calls)
        calls = [] if behind is None else read_call_array(behind, has_id=True)
        if isinstance(calls, str):
            words, problem, calls = text_of(self.tokenizer, parts), calls, []
        error = error or problem
        return Message(role="assistant", content=words, tool_calls=tuple(calls), parse_error=error)


def _version(tokenizer: Tokenizer) -> str:
    """The version whose tokens the model's chat template names. Without a template the tokenizer
    decides, which may name later tokens too. Raises RendererError for a later version."""
    is_named = tokenizer.has
    with suppress(RendererError):
        is_named = read_template(tokenizer, JinjaConfig())[0].__contains__
    if is_named(LATER_TOKEN):
        raise RendererError(
            f"{tokenizer.where} is of a model that writes calls with {LATER_TOKEN}, as version 11 "
            "and later do. Set renderer=jinja for its own template, or renderer.variant=v7."
        )
    return "v7" if is_named(V7_TOKENS[0]) else "v3"


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _value_of(text: str) -> Any:
    """The JSON value that `text` is, or the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
