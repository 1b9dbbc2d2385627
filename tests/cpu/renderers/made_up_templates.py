"""Chat templates made up for tests: each does what some real one does, in other words."""

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- 'Tools:' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\nCall with <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- CALL }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
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
XML = """\
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
"""

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


NO_TOOLS = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}
{{- raise_exception('Roles must alternate.') }}
{%- endif %}
{{- '<|start|>' + message.role + '\\n' + message.content | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
"""
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

BRACKETS = """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'system' and loop.first %}{{ '[SYS]' + message.content + '[/SYS]' }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- if message.content %}{{ raise_exception('words beside calls') }}{% endif %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('An id has nine characters.') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']</s>' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('no such role') }}
{%- endif %}
{%- endfor %}
"""
"""No generation prompt, and a list of calls behind one token: Mistral's way."""
BRACKET_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[SYS]", "[/SYS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip

NEXT_ROLE = """\
{{- '<sop>' }}
{%- if tools %}{{ '<|system|>\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- message.reasoning_content }}
{%- endif %}
{{- '</think>' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""A turn ends with the token of the role that speaks next: GLM-4.5's way."""
NEXT_ROLE_TOKENS = (
    "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip

FIELD_NAMES = """\
{%- macro open(role) %}{{ '<|start_of_role|>' + role + '<|end_of_role|>' }}{% endmacro %}
{%- if tools %}{{ open('tools') }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|end_of_content|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'tool' %}
{{- open('tool') + '<|call_id|>' + message['content'] }}
{%- else %}{{ open(message['role']) + message['content'] }}
{%- for call in message['tool_calls'] %}
{%- if loop.first %}{{ '<invocations>\\n' }}{% endif %}
{{- '<invoke name="' + call['function']['name'] + '">\\n' }}
{%- for key, value in call['function']['arguments'] | items %}
{{- '<parameter name="' + key + '">' }}{{ value if value is string else value | tojson }}
{{- '</parameter>\\n' }}{% endfor %}
{{- '</invoke>\\n' }}{% if loop.last %}{{ '</invocations>' }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '\\n<|end_of_content|>\\n' if message['role'] == 'assistant' else '<|end_of_content|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ open('assistant') }}{% endif %}
"""
"""Control tokens whose names contain the keys of messages, and a line break before the end of a
turn: Granite, Kimi-K2 and Apriel in one. Calls are tags as MiniMax-M2 writes them."""
FIELD_NAME_TOKENS = (
    "<|start_of_role|>", "<|end_of_role|>", "<|end_of_content|>", "<|call_id|>", "<invocations>",
    "</invocations>",
)  # fmt: skip

BARE = """\
{%- for message in messages %}
{{- '<|start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|message|>' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- message.content + '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|call|>' }}
{%- else %}{{ message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}
"""
"""One call, which is the whole turn and ends with a token of its own: Llama's way."""
