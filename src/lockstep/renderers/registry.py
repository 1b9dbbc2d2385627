"""Makes the renderer that a config describes, and chooses the one of a model: the format of its
architecture, or its own chat template. And makes the template of an exported model, so that other
programs send the trained tokens.

Fine-tunes keep the architecture and change the format: Qwen3-Coder writes calls as tags, Qwen3's
thinking models open each turn with `<think>`, a Llama may speak ChatML. So the format is used only
if it writes the probes of `proof` as the template does, token for token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import singledispatch
from pathlib import Path
from typing import Any

from lockstep.config import read_json, tag
from lockstep.errors import ConfigError, LockstepError, MissingExtraError, RendererError
from lockstep.renderers.base import Renderer
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import (
    ChatMLConfig,
    HarmonyConfig,
    JinjaConfig,
    Llama3Config,
    MistralConfig,
    RendererConfig,
)
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.renderers.jinja.proof import DIALOGUES, REPLIES, TOOL, USER, WITH_TOOLS
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.renderers.jinja.template import (
    BrokenTemplateError,
    TemplateRefusal,
    has_template,
    read_template,
)
from lockstep.renderers.llama3 import Llama3Renderer
from lockstep.renderers.mistral import MistralRenderer
from lockstep.renderers.pieces import first_difference
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolSchema


@singledispatch
def make_renderer(config: object, tokenizer: Tokenizer) -> Renderer:
    """Makes the renderer for `config` over `tokenizer`.

    The type of the config decides. Register a renderer of your own for the type of its config:

        @make_renderer.register
        def _(config: MyConfig, tokenizer: Tokenizer) -> Renderer:
            return MyRenderer(tokenizer, config)

    Raises RendererError, which lists all control tokens that the tokenizer lacks.
    """
    known = sorted(t.__name__ for t in make_renderer.registry if t is not object)
    raise ConfigError(
        f"no renderer for a {type(config).__name__}; expected one of {', '.join(known)}, or a type "
        "registered with make_renderer.register (see --plugin)."
    )


def _register(config_type: type[Any], renderer: Callable[[Tokenizer, Any], Renderer]) -> None:
    @make_renderer.register(config_type)
    def _(config: Any, tokenizer: Tokenizer) -> Renderer:
        return renderer(tokenizer, config)


_register(HarmonyConfig, HarmonyRenderer)
_register(ChatMLConfig, ChatMLRenderer)
_register(Llama3Config, Llama3Renderer)
_register(MistralConfig, MistralRenderer)
_register(JinjaConfig, JinjaRenderer)


# -- the renderer of a model -----------------------------------------------------------------------

_SPECIFIED: dict[type, tuple[str, str]] = {
    HarmonyConfig: ("openai-harmony", "<|channel|>"),
    MistralConfig: ("mistral-common", "[INST]"),
}
"""Formats that their makers define by a library, which engines use in place of the template: the
library, and a token that a template of the format writes."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A renderer, and why it is used."""

    config: RendererConfig
    renderer: Renderer
    why: str = ""
    """One line; empty if there was nothing to choose from."""

    @property
    def line(self) -> str:
        tools_line = self.renderer.tools_line if isinstance(self.renderer, JinjaRenderer) else ""
        said = "; ".join(part for part in (self.why, tools_line) if part)
        return f"{tag(type(self.config))}: {said}" if said else ""


def choose_renderer(format: RendererConfig | None, tokenizer: Tokenizer) -> Choice | None:
    """Returns the renderer of a tokenizer's model; None if the model has neither a format nor a
    chat template.

    format: the format of the model's architecture, if it has one of ours. Raises RendererError if
    the template differs from the format and cannot be used.
    """
    has_own = has_template(Path(tokenizer.where).parent)
    if format is None:
        return _template_choice(tokenizer, "") if has_own else None
    name = tag(type(format))
    try:
        made = make_renderer(format, tokenizer)
    except RendererError:
        if not has_own:
            raise
        return _template_choice(tokenizer, f"; the tokenizer lacks the tokens of {name}")
    if not has_own:
        return Choice(config=format, renderer=made)
    if library := library_of(format, tokenizer):
        return Choice(config=format, renderer=made, why=f"as {library} writes it")
    try:
        template = JinjaRenderer(tokenizer, JinjaConfig(tools="template"))
    except (MissingExtraError, BrokenTemplateError) as error:
        why = f"the architecture's format, not compared with the model's chat template: {error}"
        return Choice(config=format, renderer=made, why=why)
    except RendererError as error:
        raise RendererError(
            f"{error} It may differ from {name}, the format of this architecture: set "
            f"renderer={name} to use that."
        ) from None
    difference = ""
    for variant in _variants(format, template):
        drops = {"thinking": "drop"} if hasattr(variant, "thinking") else {}  # as templates do
        wanted = make_renderer(replace(variant, **drops), tokenizer)
        num_probes, found = compare(wanted, template, has_tools=has_tools(template))
        if not found:
            lacks = "" if has_tools(template) else "; the template has no tools"
            why = f"equals the model's chat template on {num_probes} probes{lacks}"
            return Choice(config=variant, renderer=make_renderer(variant, tokenizer), why=why)
        difference = difference or found
    return _template_choice(tokenizer, f", which differs from {name} in {difference}")


def library_of(format: RendererConfig, tokenizer: Tokenizer) -> str:
    """The library that writes a format for engines, if the model's template is of the format."""
    library, token = _SPECIFIED.get(type(format), ("", ""))
    return library if library and token in read_template(tokenizer, JinjaConfig())[0] else ""


def _template_choice(tokenizer: Tokenizer, why: str) -> Choice:
    made = JinjaRenderer(tokenizer)
    return Choice(config=made.config, renderer=made, why=f"the model's chat template{why}")


def _variants(format: RendererConfig, template: JinjaRenderer) -> Iterator[RendererConfig]:
    """The format, and for a template without thinking the format without empty thinking."""
    yield format
    if isinstance(format, ChatMLConfig) and template.shape.thinking is None:
        yield replace(format, has_empty_thinking=False)


def has_tools(template: JinjaRenderer) -> bool:
    """True if a template writes declared tools or calls in any way."""
    with suppress(RendererError):
        return bool(template.shape.calls or template.render_whole((USER,), (TOOL,)))
    return False


def compare(
    made: Renderer, template: JinjaRenderer, *, has_tools: bool, is_declared: bool = True
) -> tuple[int, str]:
    """Returns how many probes a renderer and a template write alike, and the first difference, ""
    if there is none. Probes that the template or both refuse are left out.

    has_tools: also compares probes with calls. is_declared: these declare their tool.
    """
    num_same, show = 0, template.tokenizer.decode
    has_thinking = template.shape.thinking is not None
    tools = (TOOL,) if is_declared else ()
    for name, probe in _probes(tools, has_thinking=has_thinking, has_tools=has_tools):
        is_reply = isinstance(probe, Message)
        expected = _ids(template.reply_ids if is_reply else template.render_whole, probe)
        found = _ids(made.render_reply if is_reply else made.render, probe)
        errors = [ids for ids in (expected, found) if isinstance(ids, RendererError)]
        if len(errors) == 2 or any(isinstance(error, TemplateRefusal) for error in errors):
            continue
        if isinstance(found, RendererError) or isinstance(expected, RendererError):
            return num_same, f"{name}: {errors[0]}"
        if found != expected:
            at = first_difference(found, expected)
            theirs, ours = show(expected[at : at + 6]), show(found[at : at + 6])
            return num_same, f"{name}, token {at}: {theirs!r}, not {ours!r}"
        num_same += 1
    return num_same, ""


_Prompt = tuple[tuple[Message, ...], tuple[ToolSchema, ...]]


def _ids(write: Callable[..., list[int]], probe: _Prompt | Message) -> list[int] | RendererError:
    try:
        return write(probe) if isinstance(probe, Message) else write(*probe)
    except RendererError as error:
        return error


def _probes(
    tools: tuple[ToolSchema, ...], *, has_thinking: bool, has_tools: bool
) -> Iterator[tuple[str, _Prompt | Message]]:
    """Prompts (messages, tools) and replies, with their names."""
    dialogues = {name: messages for name, (_, messages) in DIALOGUES.items()}
    for name, messages in {**dialogues, **WITH_TOOLS, **REPLIES}.items():
        calls = any(m.tool_calls or m.role == "tool" for m in messages)
        if (calls and not has_tools) or (any(m.thinking for m in messages) and not has_thinking):
            continue
        is_told = has_tools and (name in WITH_TOOLS or calls)
        dialogue = f"dialogue {name!r}", (messages, tools if is_told else ())
        yield (name, messages[0]) if name in REPLIES else dialogue


# -- the chat template of an exported model --------------------------------------------------------

TEMPLATE_FILE = "chat_template.jinja"


def write_template(
    directory: Path, config: RendererConfig, open_tokenizer: Callable[[], Tokenizer]
) -> tuple[RendererConfig, str]:
    """Makes the chat template of an exported model write what its run wrote: tools as text, and
    variables that the run set, become part of it.

    config: the run's renderer. open_tokenizer: opens the tokenizer of the trained model. Returns
    the renderer for the exported model, and a line for the user, "" if nothing had to change.
    """
    variables: dict[str, Any] = {}
    if isinstance(config, JinjaConfig):
        variables = dict(config.variables)
    elif isinstance(config, ChatMLConfig) and not config.enable_thinking:
        variables = {"enable_thinking": False}
    own = config if isinstance(config, JinjaConfig) else JinjaConfig()
    served = replace(own, tools="template", tools_in_prompt=config.tools_in_prompt)
    line, path, reader = "", directory / TEMPLATE_FILE, config
    try:
        tokenizer = open_tokenizer()
        if library_of(config, tokenizer):
            return config, ""
        trained = make_renderer(config, tokenizer)
        source = read_template(tokenizer, own)[0]
        form = trained.text_tools if isinstance(trained, JinjaRenderer) else {}
        if head := _head(form, variables):
            source = head + source
            line = f"{path} writes what the run wrote: {', '.join([*variables, *form])} included."
        if form:
            line += " vLLM reads its calls with --tool-call-parser hermes."
        if head or own.template:
            path.write_text(source, encoding="utf-8")
            _take_out_others(directory)
            served = replace(served, template=str(path), variables={})
            if own is config:
                reader = replace(served, template="")
        template = JinjaRenderer(tokenizer, served)
        calls = has_tools(trained if isinstance(trained, JinjaRenderer) else template)
        is_declared = config.tools_in_prompt
        _, found = compare(trained, template, has_tools=calls, is_declared=is_declared)
    except LockstepError as error:
        found = str(error)
    if found:
        return config, (
            f"{directory}: with its chat template, other programs send other tokens than the run "
            f"trained ({found}). Serve the run itself, which sends the same: lockstep serve RUN."
        )
    return reader, line


def _head(form: dict[str, Any], variables: dict[str, Any]) -> str:
    """The beginning of a template: variables, which a request may still set, and tools as text.

    Jinja reads Python's literals.
    """
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}\n"
        for name, value in {**variables, **form}.items()
    ]
    overlay = (Path(__file__).parent / "jinja" / "text_tools.jinja").read_text("utf-8")
    return "".join(lines) + (overlay if form else "")


def _take_out_others(directory: Path) -> None:
    """Takes the template out of tokenizer_config.json, where older programs look first."""
    path = directory / "tokenizer_config.json"
    fields = dict(read_json(path, RendererError)) if path.is_file() else {}
    if fields.pop("chat_template", None) is not None:
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")
