"""`lockstep render`: reads a dialogue and prints its tokens, coloured by origin. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.messages import read_messages
from lockstep.doctor.tokenization import find_tokenization
from lockstep.errors import ConfigError, DataError
from lockstep.renderers.base import Renderer
from lockstep.renderers.origins import ORIGINS, Origin, OriginatedToken, Prompt, Rendering
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolSchema

NUM_AROUND = 12
"""Ids that are shown of each side, from the first difference of two prompts."""
_COLOURS: Mapping[Origin, str] = {
    "template": "bright_black",
    "system": "magenta",
    "user": "cyan",
    "tool": "yellow",
    "assistant": "green",
}


def find_renderer(model: str, *, renderer: str = "") -> Renderer:
    """The renderer of a model, by name or directory. Raises ConfigError or RendererError."""
    try:
        found = find_tokenization(Facts(), tokenizer=model, renderer=renderer)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--tokenizer ", "MODEL ", 1)) from None
    if found.renderer is None:
        raise ConfigError(f"{model}: {found.lacks['renderer']}")
    return found.renderer


def read_dialogue(
    path: str | Path, *, tools_path: str | Path = ""
) -> tuple[tuple[Message, ...], tuple[ToolSchema, ...]]:
    """The messages and the tools of a JSON file, or of a JSONL file's first line.

    The file holds a list of messages, or an object with `messages` and optional `tools`.
    tools_path: a JSON list of tools that replaces the file's own. Raises DataError.
    """
    source = _read_json(path)
    tools: Any = []
    if isinstance(source, dict):
        if "messages" not in source:
            raise DataError(
                f"{path}: found an object with the keys {sorted(map(str, source))}; expected a "
                "list of messages, or an object with `messages`."
            )
        source, tools = source["messages"], source.get("tools") or []
    messages = read_messages(source, where=str(path))
    if not messages:
        raise DataError(f"{path}: the list of messages is empty. There is nothing to render.")
    where = str(path)
    if tools_path:
        tools, where = _read_json(tools_path), str(tools_path)
    listed = tools if isinstance(tools, list) else [tools]
    return messages, tuple(
        ToolSchema.from_dict(tool, where=f"{where}: tool {at}") for at, tool in enumerate(listed)
    )


def _read_json(path: str | Path) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; expected JSON.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        whole = str(error)
    try:
        return json.loads(next(line for line in text.splitlines() if line.strip()))
    except (ValueError, RecursionError, StopIteration):
        raise DataError(
            f"{path} is not JSON: {whole}. Expected a list of messages, as "
            '[{"role": "user", "content": "hi"}], or one object with `messages` per line.'
        ) from None


# -- shown ----------------------------------------------------------------------------------------


def to_json(rendering: Rendering, renderer: Renderer, model: str) -> dict[str, Any]:
    """The rendering as `--json` prints it."""
    show = renderer.tokenizer.decode
    return {
        "model": model,
        "renderer": renderer.name,
        "counts": _counts(rendering),
        "has_prefix_property": rendering.has_prefix_property,
        "tokens": [
            {
                "id": token.id,
                "text": show([token.id]),
                "origin": token.origin,
                "control": token.is_control,
                "message": None if token.message < 0 else token.message,
            }
            for token in rendering.tokens
        ],
        "prompts": [
            {
                "before_message": prompt.before,
                "extended_tokens": len(prompt.extended_ids),
                "whole_tokens": len(prompt.whole_ids),
                "same": prompt.is_same,
                "first_difference": None if prompt.is_same else prompt.first_difference,
                "extended_ids": _around(prompt, prompt.extended_ids),
                "whole_ids": _around(prompt, prompt.whole_ids),
            }
            for prompt in rendering.prompts
        ],
    }


def show(rendering: Rendering, renderer: Renderer, model: str, console: Console) -> None:
    """Prints the tokens by origin, their counts, and whether the prefix property holds."""
    tokenizer = renderer.tokenizer
    counts = _counts(rendering)
    total = f"{model} ({renderer.name}): {len(rendering.tokens)} tokens"
    head = Text(total, style="bold")
    for origin in ORIGINS:
        if counts[origin]:
            head.append(", " if origin != "template" else ": ", style="not bold")
            head.append(f"{counts[origin]} {origin}", style=f"not bold {_COLOURS[origin]}")
    head.append(f"; {counts['control']} of them control tokens", style="not bold")
    console.print(head)
    console.print(_table(rendering.tokens, tokenizer))
    for prompt in rendering.prompts:
        console.print(_verdict(prompt, tokenizer))
    if not rendering.has_prefix_property:
        console.print(
            "The prefix property does not hold: a program that renders the history anew sends, and "
            "trains, other ids than were sampled. Extend the ids turn by turn."
        )


def _table(tokens: Sequence[OriginatedToken], tokenizer: Tokenizer) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", show_edge=False)
    table.add_column("at", justify="right", style="dim")
    table.add_column("message")
    table.add_column("n", justify="right")
    table.add_column("tokens", overflow="fold")
    table.add_column("ids", overflow="fold", style="dim")
    at = 0
    for (origin, message), run in groupby(tokens, key=lambda t: (t.origin, t.message)):
        pieces = list(run)
        who = origin if message < 0 else f"{message} {origin}"
        table.add_row(
            str(at),
            Text(who, style=_COLOURS[origin]),
            str(len(pieces)),
            _words(pieces, tokenizer),
            " ".join(str(token.id) for token in pieces),
        )
        at += len(pieces)
    return table


def _words(tokens: Sequence[OriginatedToken], tokenizer: Tokenizer) -> Text:
    """The tokens separated by bars; control tokens are underlined."""
    out = Text()
    for number, token in enumerate(tokens):
        if number:
            out.append("|", style="dim")
        words = json.dumps(tokenizer.decode([token.id]), ensure_ascii=False)[1:-1]
        style = _COLOURS[token.origin] + (" underline" if token.is_control else "")
        out.append(words.replace('\\"', '"'), style=style)
    return out


def _verdict(prompt: Prompt, tokenizer: Tokenizer) -> RenderableType:
    where = f"prompt before message {prompt.before}"
    if prompt.is_same:
        return Text(f"{where}: {len(prompt.extended_ids)} ids, the template's over the whole too")
    at = prompt.first_difference
    head = Text(
        f"{where}: {len(prompt.extended_ids)} ids; the template over the whole gives "
        f"{len(prompt.whole_ids)}, other ones from place {at} on",
        style="red",
    )
    lines: list[RenderableType] = [head]
    for name, ids in (("extended", prompt.extended_ids), ("whole", prompt.whole_ids)):
        shown = _around(prompt, ids)
        words = json.dumps(tokenizer.decode(shown), ensure_ascii=False)
        lines.append(Text(f"    {name:<8} {' '.join(map(str, shown))}  {words}"))
    return Group(*lines)


def _around(prompt: Prompt, ids: Sequence[int]) -> list[int]:
    if prompt.is_same:
        return []
    return list(ids[prompt.first_difference : prompt.first_difference + NUM_AROUND])


def _counts(rendering: Rendering) -> dict[str, int]:
    counts = Counter(token.origin for token in rendering.tokens)
    control = sum(token.is_control for token in rendering.tokens)
    return {**{origin: counts[origin] for origin in ORIGINS}, "control": control}
