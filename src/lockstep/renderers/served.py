"""The chat template of an exported model: with it, other programs send the trained tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config import read_json
from lockstep.errors import LockstepError, RendererError
from lockstep.renderers.choice import compare, has_tools, library_of
from lockstep.renderers.config import ChatMLConfig, JinjaConfig, RendererConfig
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.renderers.jinja.template import read_template
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer

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
