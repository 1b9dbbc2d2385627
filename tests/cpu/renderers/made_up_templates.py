"""Chat templates made up for tests: each does what some real one does, in other words."""

import tomllib
from pathlib import Path


def _file(name: str) -> str:
    return (Path(__file__).with_suffix("") / name).read_text("utf-8")


CHATML = _file("chatml.jinja")
"""Thinking is dropped before the last user message. CALL stands for one call."""

_NAME = "call.function.name"
CALLS = {
    "json": (
        '\'<tool_call>\\n{"name": "\' + ' + _NAME + ' + \'", "arguments": \' + '
        "(call.function.arguments if call.function.arguments is string else "
        "call.function.arguments | tojson) + '}\\n</tool_call>'"
    ),
    "json of an object": (
        '\'<tool_call>{"arguments": \' + call.function.arguments | tojson + \', "name": "\' + '
        + _NAME
        + " + '\"}</tool_call>'"
    ),
    "fields": (
        "'<tool_call>' + " + _NAME + " + '\\n```json\\n' + call.function.arguments + "
        "'\\n```</tool_call>'"
    ),
    "a line each": (
        "'<tool_call>' + " + _NAME + " + '\\n' + call.function.arguments + '</tool_call>'"
    ),
}
XML = _file("xml.jinja")

THINKS_AT_ONCE = CHATML.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
).replace(
    "{%- if message.reasoning_content and loop.index0 > ns.last %}\n"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}",
    "{%- if loop.index0 > ns.last %}\n"
    "{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}",
)
"""Each turn is opened with <think>, as Qwen3.5 does."""


def template(call="json", source=CHATML):
    if call == "xml":
        return source.replace("{{- CALL }}", XML.rstrip("\n"))
    return source.replace("CALL", CALLS[call])


NO_TOOLS = _file("no_tools.jinja")
"""Trims what it is given, and knows two roles."""

FIRST_CALL_IS_OTHER = template().replace(
    "{%- if message.content or not loop.first %}",
    "{%- if ns.last > 0 %}{{ ' again ' }}{% endif %}{%- if message.content or not loop.first %}",
)
"""Calls after a second question are written otherwise: no pieces."""

COUNTS = NO_TOOLS.replace("'<|start|>' + message.role", "'<|start|>' ~ loop.index ~ message.role")
"""Numbers its messages: an opening is not the beginning of a turn."""

NEVER_ENDS = "{%- for message in messages %}{{ message.content }}\n{% endfor %}"
"""No control token ends a turn."""

HOSTILE = {
    name: (case["template"], case["says"])
    for name, case in tomllib.loads(_file("hostile.toml")).items()
}
"""Template and what the error says."""

BRACKETS = _file("brackets.jinja")
"""No generation prompt, and a list of calls behind one token: Mistral's way."""
BRACKET_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[SYS]", "[/SYS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip

NEXT_ROLE = _file("next_role.jinja")
"""A turn ends with the token of the role that speaks next: GLM-4.5's way."""
NEXT_ROLE_TOKENS = (
    "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip

FIELD_NAMES = _file("field_names.jinja")
"""Control tokens whose names contain the keys of messages, and a line break before the end of a
turn: Granite, Kimi-K2 and Apriel in one. Calls are tags as MiniMax-M2 writes them."""
FIELD_NAME_TOKENS = (
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_content|>", "<|call_id|>", "<invocations>",
    "</invocations>",
)  # fmt: skip

BARE = _file("bare.jinja")
"""One call, which is the whole turn and ends with a token of its own: Llama's way."""

STRICT = _file("strict.jinja")
"""Raises on tools, on a system message and on two turns of a user."""

OWN_CALLS = _file("own_calls.jinja")
"""Writes calls, and leaves out tools."""

QWEN3_TOOLS = _file("qwen3_tools.jinja")
"""The system message of the Qwen3 format."""
