"""Chat templates rendered and encoded as transformers' `apply_chat_template` does it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.sandbox
from full_counts import PROOF
from hypothesis import strategies as st
from real_tokenizers import directory_of, shipped_tokenizer_of

from lockstep.testing.renderers import DIALOGUES
from lockstep.types import Message, ToolCall, ToolSchema

SEARCH = ToolSchema(
    name="get_document_chunks",
    description='Finds "chunks" \u00fcber <keywords>.',
    parameters={
        "type": "object",
        "properties": {"keywords": {"type": "array", "items": {"type": "string"}}},
        "required": ["keywords"],
    },
)
SYSTEM = Message(role="system", content="Search, then answer.")
QUESTION = Message(role="user", content="Who is the friend of Bela?")
CALL = Message(
    role="assistant",
    tool_calls=(ToolCall(name="get_document_chunks", arguments='{"keywords": ["Bela"]}'),),
)
REPLY = Message(role="tool", name="get_document_chunks", content="The friend of Bela is Ciro.")
ANSWER = Message(role="assistant", content="It is Ciro.")
MORE = Message(role="user", content="And of Ciro?")
CHECKED = {name: dialogue for name, dialogue in DIALOGUES.items() if PROOF or name == "unicode"}
"""What `check_renderer` is run on: thousands of control names in every text take seconds."""
TEXTS = st.text(
    st.sampled_from(list('ab {}"\n<|>_.,\t1234e\u0301\u4e2d\uac00\u0906\U0001f600')), max_size=20
)
OTHERS = st.builds(
    lambda role, text: Message(role=role, content=text, name="f" if role == "tool" else ""),
    st.sampled_from(["user", "tool", "system"]),
    TEXTS,
)
"""Messages that no model writes."""


def template_of(text: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(text)


@lru_cache
def _template(name: str) -> jinja2.Template:
    return template_of(_config(name)["chat_template"])


@lru_cache
def _config(name: str) -> dict[str, Any]:
    return json.loads((directory_of(name) / "tokenizer_config.json").read_text("utf-8"))


def template_text(
    name: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[ToolSchema] = (),
    *,
    opening: bool = True,
    **variables: Any,
) -> str:
    """What a model's template makes of `messages`. No tools is None, as transformers has it."""
    special = {key: value for key, value in _config(name).items() if key.endswith("_token")}
    for key, value in special.items():
        special[key] = value["content"] if isinstance(value, dict) else value
    return _template(name).render(
        messages=messages,
        tools=[function_of(tool) for tool in tools] or None,
        add_generation_prompt=opening,
        **special,
        **variables,
    )


def shipped_ids(name: str, text: str) -> list[int]:
    """Ids of `text` where control tokens may be spelled, by the shipped tokenizer."""
    return shipped_tokenizer_of(name).encode(text, add_special_tokens=False).ids


def function_of(tool: ToolSchema) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": fields}


def their_dict(message: Message) -> dict[str, Any]:
    """The message as templates read it, with the arguments of calls as objects."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
    return out


def check_pieces(ours, begun, path, tools, their_ids) -> None:
    """Asserts that a dialogue has the template's ids, written whole and turn by turn. path: each
    turn with the messages after it."""
    ids, whole = ours.render(begun, tools), list(begun)
    assert ids == their_ids(whole, tools)
    for turn, follow_up in path:
        sampled = ours.render_reply(turn)
        ids += sampled + ours.extend(sampled, follow_up)
        whole += [turn, *follow_up]
    assert ids == ours.render(whole, tools) == their_ids(whole, tools)
