"""Chat templates made up for tests: each does what some real one does, in other words."""

from pathlib import Path


def _file(name: str) -> str:
    return (Path(__file__).with_suffix("") / f"{name}.jinja").read_text("utf-8")


CHATML = _file("chatml")
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
XML = _file("xml")

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


NO_TOOLS = _file("no_tools")
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
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "did not finish|takes more memory",
    ),
    "doubles": (
        "{% set ns = namespace(x='ab') %}{% for a in range(64) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x }}",
        "more memory|did not finish",
    ),
    "multiplies": ("{{ 'a' * 10 ** 12 }}", "more memory"),
    "writes without an end": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'abcdefghijklmnop' * 64 }}"
        "{% endfor %}{% endfor %}",
        "more memory|did not finish",
    ),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "compares shared lists": (
        "{% set ns = namespace(x=[1], y=[1]) %}{% for a in range(99) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
        "{{ ns.x == ns.y }}",
        "did not finish",
    ),
    "reads attributes": (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "SecurityError",
    ),
    "reaches the interpreter": (
        "{{ raise_exception.__globals__['sys'].modules }}",
        "it fails",
    ),
    "includes a file": ("{% include '/etc/passwd' %}", "it fails: TypeError: no loader"),
    "imports a file": ("{% import '/etc/passwd' as x %}", "it fails: TypeError: no loader"),
    "extends a file": ("{% extends '/etc/passwd' %}", "it fails: TypeError: no loader"),
    "is no template": ("{% for x in %}", "it fails: TemplateSyntaxError in line 1"),
    "changes what it is given": ("{{ messages.append(1) }}", "it fails"),
    "fails": ("{{ messages[0].a.b.c }}", "it fails: UndefinedError"),
}
"""Template and what the error says."""

BRACKETS = _file("brackets")
"""No generation prompt, and a list of calls behind one token: Mistral's way."""
BRACKET_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[SYS]", "[/SYS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip

NEXT_ROLE = _file("next_role")
"""A turn ends with the token of the role that speaks next: GLM-4.5's way."""
NEXT_ROLE_TOKENS = (
    "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip

FIELD_NAMES = _file("field_names")
"""Control tokens whose names contain the keys of messages, and a line break before the end of a
turn: Granite, Kimi-K2 and Apriel in one. Calls are tags as MiniMax-M2 writes them."""
FIELD_NAME_TOKENS = (
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_content|>", "<|call_id|>", "<invocations>",
    "</invocations>",
)  # fmt: skip

BARE = _file("bare")
"""One call, which is the whole turn and ends with a token of its own: Llama's way."""

STRICT = _file("strict")
"""Raises on tools, on a system message and on two turns of a user."""

OWN_CALLS = _file("own_calls")
"""Writes calls, and leaves out tools."""

QWEN3_TOOLS = _file("qwen3_tools")
"""The system message of the Qwen3 format."""
