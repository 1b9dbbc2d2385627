"""Chat templates of foreign programs, after public formats, for wild_players.py.

Each is written anew in the way of its model's family, with what that family refuses.
"""
# ruff: noqa: E501 - lines of a template are lines of what it writes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template after a public format, and how its replies are read."""

    jinja: str
    controls: Sequence[str]
    """Control tokens that it writes."""
    ends: Sequence[str]
    """Control tokens that end a reply."""
    call: str = ""
    """Pattern of a call: groups `name` and `arguments`, or `body` with both as JSON. Empty: calls
    are text of the content, in the form of TEXT_CALL."""
    thinks: bool = False
    tool_role: str = "tool"
    has_tools: bool = False
    """Whether it renders a block of tools."""
    bos: str = ""
    separator: str = ""
    """Text that it writes after the end of a reply."""
    header: str = ""
    """The opening of a reply, which add_generation_prompt adds."""
    has_date: bool = False
    no_thinking: str = ""
    """Text after the header that tells the model not to think."""
    ends_by_role: bool = False
    """Whether a reply ends with the token of the next role, which is not written twice."""


TEXT_CALL = r"CALL (?P<name>\w+) (?P<arguments>\{.*?\})"

CHATML_BODY = """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
THINKING
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
"""
CHATML_HEAD = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nReturn calls within <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
CHATML_OPEN = """
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
# Thinking before the last question is not repeated, as in Qwen3's template.
LAST_QUESTION = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
"""
THINKING = """
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
"""
LLAMA3 = """
{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{%- if tools %}
{{- 'You have these functions. Respond with JSON for a call.\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
HARMONY = """
{{- '<|start|>system<|message|>You are a large language model.\\nKnowledge cutoff: 2024-06\\nCurrent date: ' }}
{{- (date_string if date_string is defined else '2025-08-05') + '\\n\\nReasoning: low<|end|>' }}
{%- if messages[0].role == 'system' or tools %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' }}{%- endif %}
{%- if tools %}{{- '# Tools\\n\\nnamespace functions {\\n' }}
{%- for tool in tools %}
{{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {' }}
{%- for key, value in tool.function.parameters.properties.items() %}{{- key + ': ' + value.type + ', ' }}{%- endfor %}
{{- '}) => any;\\n' }}
{%- endfor %}{{- '}' }}{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant' }}
{%- if message.reasoning_content %}
{{- '<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|><|start|>assistant' }}
{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|channel|>commentary to=functions.' + call.name + ' <|constrain|>json<|message|>' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '<|call|>' }}
{%- else %}
{{- '<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.lookup to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
PHI3 = """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('Only the first message may be a system message.') }}{%- endif %}
{%- if message.role == 'tool' %}
{{- '<|tool|>\\n' + message.content + '<|end|>\\n' }}
{%- else %}
{{- '<|' + message.role + '|>\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call|>[{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}]<|/tool_call|>' }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
GLM4 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\\n# Tools\\n' }}
{%- for tool in tools %}{{- '\\n## ' + tool.function.name + '\\n\\n' }}{{- tool.function | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- '<|system|>\\n' + message.content }}
{%- elif message.role == 'user' %}
{{- '<|user|>\\n' + message.content }}
{%- elif message.role == 'tool' %}
{{- '<|observation|>\\n' + message.content }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|assistant|>' + call.name + '\\n' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{%- else %}
{{- '<|assistant|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
DEEPSEEK = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}{%- endif %}
{%- if tools %}{{- '\\n\\n## Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{%- endif %}
{%- set ns = namespace(after_tool=false) %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('A system message must be the first.') }}
{%- elif message.role == 'user' %}
{{- '<\uff5cUser\uff5c>' + message.content }}
{%- set ns.after_tool = false %}
{%- elif message.role == 'assistant' %}
{%- if not ns.after_tool %}{{- '<\uff5cAssistant\uff5c>' }}{%- endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>' + call.name + '\\n```json\\n' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '\\n```<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>' }}
{%- endif %}
{{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- set ns.after_tool = false %}
{%- elif message.role == 'tool' %}
{{- '<\uff5ctool\u2581outputs\u2581begin\uff5c><\uff5ctool\u2581output\u2581begin\uff5c>' + message.content + '<\uff5ctool\u2581output\u2581end\uff5c><\uff5ctool\u2581outputs\u2581end\uff5c>' }}
{%- set ns.after_tool = true %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_tool %}{{- '<\uff5cAssistant\uff5c>' }}{%- endif %}
"""
PLAIN = """
{%- if tools %}{{- raise_exception('This model does not support tools.') }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('A system message must be the first.') }}{%- endif %}
{{- message.content + '\\n\\n' }}
{%- elif message.role == 'user' %}
{{- '### User:\\n' + message.content + '\\n\\n' }}
{%- elif message.role == 'tool' %}
{{- '### Tool:\\n' + message.content + '\\n\\n' }}
{%- else %}
{%- if message.tool_calls %}{{- raise_exception('This model does not support tools.') }}{%- endif %}
{{- '### Assistant:\\n' + message.content + eos_token + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### Assistant:\\n' }}{%- endif %}
"""
GEMMA = """
{{- bos_token }}
{%- set ns = namespace(first='') %}
{%- if messages[0].role == 'system' %}{%- set ns.first = messages[0].content + '\\n\\n' %}{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- (ns.first if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
COMMAND_R = """
{{- bos_token }}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set messages = messages[1:] %}
{%- else %}{{- 'You are Command-R, a helpful assistant.' }}{%- endif %}
{%- if tools %}
{{- '\\n\\n## Available Tools\\n' }}
{%- for tool in tools %}
{{- 'def ' + tool.function.name + '(' }}
{%- for key, value in tool.function.parameters.properties.items() %}{{- key + ': str' + ('' if loop.last else ', ') }}{%- endfor %}
{{- ') -> dict\\n' }}
{%- endfor %}
{%- endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'tool' %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\\n' + message.content + '\\n</results><|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + (message.content or '') }}
{%- if message.tool_calls %}
{{- 'Action: ```json\\n[{"tool_name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments if message.tool_calls[0].function.arguments is string else message.tool_calls[0].function.arguments | tojson }}
{{- '}]\\n```' }}
{%- endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- else %}{{- raise_exception('A system message must be the first.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}
"""
ZEPHYR = """
{%- for message in messages %}
{%- if message.role == 'tool' or message.tool_calls %}{{- raise_exception('Only user, system and assistant roles are supported.') }}{%- endif %}
{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
MISTRAL = """
{{- bos_token }}
{%- set ns = namespace(first='') %}
{%- if messages[0].role == 'system' %}{%- set ns.first = messages[0].content + '\\n\\n' %}{%- set messages = messages[1:] %}{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (ns.first if loop.first else '') + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '[TOOL_CALLS] [{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}]' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- else %}{{- raise_exception('Only user, tool and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}
"""
GRANITE = """
{%- set ns = namespace(system='You are Granite, developed by IBM.') %}
{%- if messages[0].role == 'system' %}{%- set ns.system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + ns.system + '<|end_of_text|>\\n' }}
{%- if tools %}
{{- '<|start_of_role|>available_tools<|end_of_role|>' }}
{{- tools | tojson(indent=2) }}
{{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'tool_response' if message.role == 'tool' else message.role %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call|>[{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}]' }}
{%- endfor %}
{{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""
KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' }}{{- tools | tojson }}{{- '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant.<|im_end|>' }}
{%- endif %}
{%- if message.role == 'user' or message.role == 'assistant' %}
{{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}
{%- else %}
{{- '<|im_system|>' + message.role + '<|im_middle|>' }}
{%- endif %}
{%- if message.role == 'tool' %}{{- '## Return of functions.lookup:0\\n' }}{%- endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>functions.' + call.function.name + ':0<|tool_call_argument_begin|>' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""


_HERMES = r"<tool_call>\s*(?P<body>\{.*\})\s*</tool_call>"
_IM = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
       "</tool_response>", "<think>", "</think>")  # fmt: skip
_CHATML_BASE: Any = {
    "controls": _IM, "ends": ("<|im_end|>",), "call": _HERMES, "has_tools": True,
    "separator": "\n", "header": "<|im_start|>assistant\n", "no_thinking": "<think>\n\n</think>\n\n",
}  # fmt: skip
TEMPLATES: Mapping[str, Template] = {
    "chatml": Template(
        jinja=CHATML_HEAD + CHATML_BODY.replace("THINKING\n", "") + CHATML_OPEN, **_CHATML_BASE
    ),
    "thinking": Template(
        jinja=CHATML_HEAD + LAST_QUESTION + CHATML_BODY.replace("THINKING\n", THINKING.strip() + "\n")
        + CHATML_OPEN,
        thinks=True, **_CHATML_BASE,
    ),
    "llama3": Template(
        jinja=LLAMA3,
        controls=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ends=("<|eot_id|>",), has_tools=True, bos="<|begin_of_text|>", has_date=True,
        call=r"^\s*\{\s*\"name\":\s*\"(?P<name>\w+)\",\s*\"parameters\":\s*(?P<arguments>\{.*?\})\s*\}",
        header="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "harmony": Template(
        jinja=HARMONY,
        controls=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
                  "<|return|>", "<|call|>"),
        ends=("<|return|>", "<|call|>"), has_tools=True, thinks=True, has_date=True,
        call=r"<\|channel\|>commentary to=functions\.(?P<name>\w+) <\|constrain\|>json<\|message\|>(?P<arguments>\{.*\})",
        header="<|start|>assistant",
    ),
    "phi3": Template(
        jinja=PHI3,
        controls=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>",
                  "<|tool_call|>", "<|/tool_call|>"),
        ends=("<|end|>",), separator="\n", header="<|assistant|>\n",
        call=r"<\|tool_call\|>\[(?P<body>\{.*\})\]<\|/tool_call\|>",
    ),
    "glm4": Template(
        jinja=GLM4,
        controls=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ends=("<|user|>", "<|observation|>"), has_tools=True, bos="[gMASK]<sop>",
        call=r"^(?P<name>\w+)\n(?P<arguments>\{.*\})", header="<|assistant|>", ends_by_role=True,
    ),
    "deepseek": Template(
        jinja=DEEPSEEK,
        controls=("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
                  "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>",
                  "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581sep\uff5c>", "<\uff5ctool\u2581outputs\u2581begin\uff5c>",
                  "<\uff5ctool\u2581outputs\u2581end\uff5c>", "<\uff5ctool\u2581output\u2581begin\uff5c>", "<\uff5ctool\u2581output\u2581end\uff5c>"),
        ends=("<\uff5cend\u2581of\u2581sentence\uff5c>",), has_tools=True, bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        call=r"<\uff5ctool\u2581sep\uff5c>(?P<name>\w+)\n```json\n(?P<arguments>\{.*?\})\n```",
        header="<\uff5cAssistant\uff5c>",
    ),
    "plain": Template(
        jinja=PLAIN, controls=("</s>",), ends=("</s>",), separator="\n\n",
        header="### Assistant:\n",
    ),
    "gemma": Template(
        jinja=GEMMA, controls=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        ends=("<end_of_turn>",), tool_role="user", bos="<bos>", separator="\n",
        header="<start_of_turn>model\n",
    ),
    "command-r": Template(
        jinja=COMMAND_R,
        controls=("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
                  "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        ends=("<|END_OF_TURN_TOKEN|>",), has_tools=True, bos="<BOS_TOKEN>",
        call=r"Action: ```json\n\[(?P<body>\{.*\})\]\n```",
        header="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "zephyr": Template(
        jinja=ZEPHYR, controls=("</s>",), ends=("</s>",), tool_role="user", separator="\n",
        header="<|assistant|>\n",
    ),
    "mistral": Template(
        jinja=MISTRAL,
        controls=("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                  "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ends=("</s>",), has_tools=True, bos="<s>",
        call=r"\[TOOL_CALLS\]\s*\[(?P<body>\{.*\})\]",
    ),
    "granite": Template(
        jinja=GRANITE,
        controls=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
        ends=("<|end_of_text|>",), has_tools=True, separator="\n",
        call=r"<\|tool_call\|>\[(?P<body>\{.*\})\]",
        header="<|start_of_role|>assistant<|end_of_role|>",
    ),
    "kimi": Template(
        jinja=KIMI,
        controls=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
                  "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                  "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                  "<|im_end|>"),
        ends=("<|im_end|>",), has_tools=True,
        call=r"functions\.(?P<name>\w+):0<\|tool_call_argument_begin\|>(?P<arguments>\{.*?\})",
        header="<|im_assistant|>assistant<|im_middle|>",
    ),
}  # fmt: skip
