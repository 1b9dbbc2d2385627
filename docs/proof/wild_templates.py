"""Chat templates of foreign programs, after public formats, for wild_players.py.

Each is written anew in the way of its model's family, with what that family refuses.
"""
# ruff: noqa: E501 - control tokens and patterns of calls are long

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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

FOLDER = Path(__file__).with_suffix("")
"""Has the templates, a file each."""


def _text(name: str) -> str:
    # Players learnt their vocabulary from the texts with this first line.
    return "\n" + (FOLDER / f"{name}.jinja").read_text("utf-8")


_HERMES = r"<tool_call>\s*(?P<body>\{.*\})\s*</tool_call>"
_IM = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
       "</tool_response>", "<think>", "</think>")  # fmt: skip
_CHATML_BASE: Any = {
    "controls": _IM, "ends": ("<|im_end|>",), "call": _HERMES, "has_tools": True,
    "separator": "\n", "header": "<|im_start|>assistant\n", "no_thinking": "<think>\n\n</think>\n\n",
}  # fmt: skip
TEMPLATES: Mapping[str, Template] = {
    "chatml": Template(jinja=_text("chatml"), **_CHATML_BASE),
    "thinking": Template(jinja=_text("thinking"), thinks=True, **_CHATML_BASE),
    "llama3": Template(
        jinja=_text("llama3"),
        controls=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ends=("<|eot_id|>",), has_tools=True, bos="<|begin_of_text|>", has_date=True,
        call=r"^\s*\{\s*\"name\":\s*\"(?P<name>\w+)\",\s*\"parameters\":\s*(?P<arguments>\{.*?\})\s*\}",
        header="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "harmony": Template(
        jinja=_text("harmony"),
        controls=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>",
                  "<|return|>", "<|call|>"),
        ends=("<|return|>", "<|call|>"), has_tools=True, thinks=True, has_date=True,
        call=r"<\|channel\|>commentary to=functions\.(?P<name>\w+) <\|constrain\|>json<\|message\|>(?P<arguments>\{.*\})",
        header="<|start|>assistant",
    ),
    "phi3": Template(
        jinja=_text("phi3"),
        controls=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>",
                  "<|tool_call|>", "<|/tool_call|>"),
        ends=("<|end|>",), separator="\n", header="<|assistant|>\n",
        call=r"<\|tool_call\|>\[(?P<body>\{.*\})\]<\|/tool_call\|>",
    ),
    "glm4": Template(
        jinja=_text("glm4"),
        controls=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ends=("<|user|>", "<|observation|>"), has_tools=True, bos="[gMASK]<sop>",
        call=r"^(?P<name>\w+)\n(?P<arguments>\{.*\})", header="<|assistant|>", ends_by_role=True,
    ),
    "deepseek": Template(
        jinja=_text("deepseek"),
        controls=("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
                  "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>",
                  "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581sep\uff5c>", "<\uff5ctool\u2581outputs\u2581begin\uff5c>",
                  "<\uff5ctool\u2581outputs\u2581end\uff5c>", "<\uff5ctool\u2581output\u2581begin\uff5c>", "<\uff5ctool\u2581output\u2581end\uff5c>"),
        ends=("<\uff5cend\u2581of\u2581sentence\uff5c>",), has_tools=True, bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        call=r"<\uff5ctool\u2581sep\uff5c>(?P<name>\w+)\n```json\n(?P<arguments>\{.*?\})\n```",
        header="<\uff5cAssistant\uff5c>",
    ),
    "plain": Template(
        jinja=_text("plain"), controls=("</s>",), ends=("</s>",), separator="\n\n",
        header="### Assistant:\n",
    ),
    "gemma": Template(
        jinja=_text("gemma"), controls=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        ends=("<end_of_turn>",), tool_role="user", bos="<bos>", separator="\n",
        header="<start_of_turn>model\n",
    ),
    "command-r": Template(
        jinja=_text("command-r"),
        controls=("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
                  "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        ends=("<|END_OF_TURN_TOKEN|>",), has_tools=True, bos="<BOS_TOKEN>",
        call=r"Action: ```json\n\[(?P<body>\{.*\})\]\n```",
        header="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "zephyr": Template(
        jinja=_text("zephyr"), controls=("</s>",), ends=("</s>",), tool_role="user", separator="\n",
        header="<|assistant|>\n",
    ),
    "mistral": Template(
        jinja=_text("mistral"),
        controls=("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                  "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ends=("</s>",), has_tools=True, bos="<s>",
        call=r"\[TOOL_CALLS\]\s*\[(?P<body>\{.*\})\]",
    ),
    "granite": Template(
        jinja=_text("granite"),
        controls=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
        ends=("<|end_of_text|>",), has_tools=True, separator="\n",
        call=r"<\|tool_call\|>\[(?P<body>\{.*\})\]",
        header="<|start_of_role|>assistant<|end_of_role|>",
    ),
    "kimi": Template(
        jinja=_text("kimi"),
        controls=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
                  "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                  "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                  "<|im_end|>"),
        ends=("<|im_end|>",), has_tools=True,
        call=r"functions\.(?P<name>\w+):0<\|tool_call_argument_begin\|>(?P<arguments>\{.*?\})",
        header="<|im_assistant|>assistant<|im_middle|>",
    ),
}  # fmt: skip
