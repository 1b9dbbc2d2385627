"""Settings of the renderers. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Literal

from lockstep.config import Checked
from lockstep.errors import ConfigError

Thinking = Literal["keep", "drop"]


@dataclass(frozen=True, kw_only=True)
class RendererConfig(Checked):
    """Base of the renderers' settings. Each subclass is a choice of the setting `renderer`, named
    by its tag; `registry.make_renderer` makes the renderer."""

    tools_in_prompt: bool = True
    """Declare the tools to the model. Turn off for a tiny model that was trained on one fixed tool.
    """


@dataclass(frozen=True, kw_only=True)
class HarmonyConfig(RendererConfig):
    """The format of gpt-oss."""

    system_message: bool = True
    """Open with the system message: identity, dates, reasoning effort and channels."""
    identity: str = "You are ChatGPT, a large language model trained by OpenAI."
    """First line of the system message; empty leaves it out."""
    current_date: str = ""
    """Given in the system message, such as 2025-08-05; empty leaves it out: prompts then repeat."""
    reasoning_effort: Literal["low", "medium", "high"] = "medium"
    """Given in the system message: low, medium or high."""
    developer_heading: bool = True
    """Write "# Instructions" above the instructions, as gpt-oss expects."""
    thinking: Thinking = "keep"
    """Earlier thinking. keep: it stays in the prompt. drop: the analysis before a final answer is
    removed when anybody but a tool speaks next; the dialogue then continues as a new branch, so
    that sampled ids are never rewritten."""
    stop_at_end: bool = False
    """Also stop at <|end|>, which closes each message of a turn. A turn is then one message,
    without analysis before the answer. For models that answer in one message."""


@dataclass(frozen=True, kw_only=True)
class ChatMLConfig(RendererConfig):
    """The format of Qwen3 and Qwen2.5."""

    TAG: ClassVar[str] = "chatml"

    variant: Literal["qwen3", "qwen2.5"] = "qwen3"
    """qwen3. qwen2.5: no thinking, tool replies between tags that are text, and the template's own
    system message if the dialogue has none."""
    enable_thinking: bool = True
    """Off: every turn opens with an empty thinking block, so that the model answers at once."""
    has_empty_thinking: bool = True
    """Write an empty thinking block for a supervised reply without thinking, as the Qwen3
    template does. Turn off for models that never think."""
    thinking: Thinking = "keep"
    """Earlier thinking. keep: it stays in the prompt. drop: only thinking after the last user
    message stays, as in the Qwen3 template; when a user speaks, the dialogue continues as a new
    branch, so that sampled ids are never rewritten."""


@dataclass(frozen=True, kw_only=True)
class Llama3Config(RendererConfig):
    """The format of Llama 3.1, 3.2 and 3.3."""

    current_date: str = "26 Jul 2024"
    """The system message's "Today Date". The template writes the current day; this default is its
    fallback where the day is unknown, so that prompts repeat. Empty: no dates, and a system message
    only if the dialogue has one, as in Llama 3.0."""
    tools_in_user_message: bool = True
    """Declare them in the first user message, as the template does by default. Off: in the system
    message."""
    tool_replies: Literal["json", "text"] = "json"
    """json: write tool replies as JSON strings, as the template does. text: write them as they are,
    as in Meta's own description of the format."""


@dataclass(frozen=True, kw_only=True)
class MistralConfig(RendererConfig):
    """The format of Mistral's instruct models, versions 3 and 7."""

    variant: Literal["auto", "v3", "v7"] = "auto"
    """v7 (Mistral Small 2501, Large 2411): system messages of their own. v3 with Tekken's
    vocabulary (NeMo, Ministral 8B): their text goes before the last user's. auto: what the model's
    template says or, without one, the control tokens of its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class JinjaConfig(RendererConfig):
    """The model's own Hugging Face chat template, checked before the first prompt."""

    template: str = ""
    """Path of the template; empty: chat_template.jinja or tokenizer_config.json in the model's
    directory."""
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Variables of the template, by name: renderer.variables.enable_thinking=false."""
    date: str = "2024-07-26"
    """Date that strftime_now formats, such as 2025-08-05, so that prompts repeat."""
    stop_tokens: tuple[str, ...] = ()
    """Names of control tokens that also end a turn, in addition to the template's own."""
    tools: Literal["auto", "template", "text"] = "auto"
    """Form of tools and calls. template: the template's own. text: schemas as text in the system
    message, calls between <tool_call> tags. auto: the template's own form if it extends exactly,
    else text."""
    thinking: Thinking = "keep"
    """Earlier thinking. keep: it stays in the prompt, even if the template leaves it out. drop: it
    goes when the template leaves it out; the dialogue then continues as a new branch, so that
    sampled ids are never rewritten."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            date.fromisoformat(self.date)
        except (TypeError, ValueError):
            raise ConfigError(
                f"renderer.date={self.date!r}: expected a date such as 2025-08-05."
            ) from None
