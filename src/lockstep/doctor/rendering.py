"""`lockstep render`: reads a dialogue and prints its tokens, coloured by origin. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.dialogues import read_dialogue, read_messages, read_tools
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.terminal import as_html
from lockstep.doctor.tokenization import find_tokenization
from lockstep.errors import ConfigError, DataError
from lockstep.renderers.base import Renderer
from lockstep.renderers.origins import ORIGINS, Origin, Rendering, trace
from lockstep.types import Message, ToolSchema

NUM_AROUND = 12
"""Ids that are shown of each side, from the first difference of two prompts."""
_COLOURS: Mapping[Origin, str] = dict(
    zip(ORIGINS, ("bright_black", "magenta", "cyan", "yellow", "green"), strict=True)
)


@dataclass(frozen=True, repr=False)
class Rendered:
    """A dialogue as tokens, by origin."""

    rendering: Rendering
    renderer: Renderer
    model: str
    why: str = ""
    """Why the model's files chose the renderer; empty if they left no choice."""

    def __repr__(self) -> str:
        return f"Rendered({self.model}, {len(self.rendering.tokens)} tokens)"

    def _repr_html_(self) -> str:
        return as_html(self.show)

    def show(self, console: Console) -> None:
        """Prints the tokens by origin, their counts, and whether the prefix property holds."""
        found, renderer = self.to_json(), self.renderer
        counts = found["counts"]
        head = Text(f"{self.model} ({renderer.name}): {len(found['tokens'])} tokens", style="bold")
        for origin in ORIGINS:
            if counts[origin]:
                head.append(", " if origin != "template" else ": ", style="not bold")
                head.append(f"{counts[origin]} {origin}", style=f"not bold {_COLOURS[origin]}")
        head.append(f"; {counts['control']} of them control tokens", style="not bold")
        console.print(head)
        if self.why:
            console.print(Text(f"{renderer.name}: {self.why}"))
        console.print(_table(found["tokens"]))
        for prompt in found["prompts"]:
            where = f"prompt before message {prompt['before_message']}: "
            where += f"{prompt['extended_tokens']} ids"
            if prompt["same"]:
                console.print(f"{where}, the template's over the whole too")
                continue
            text = f"{where}; the template over the whole gives {prompt['whole_tokens']}, other "
            text += f"ones from place {prompt['first_difference']} on"
            console.print(Text(text, style="red"))
            for name in ("extended", "whole"):
                ids = prompt[f"{name}_ids"]
                words = json.dumps(renderer.tokenizer.decode(ids), ensure_ascii=False)
                console.print(Text(f"    {name:<8} {' '.join(map(str, ids))}  {words}"))
        if not self.rendering.has_prefix_property:
            console.print(
                "The prefix property does not hold: a program that renders the history anew sends, "
                "and trains, other ids than were sampled. Extend the ids turn by turn."
            )

    def to_json(self) -> dict[str, Any]:
        """The rendering as `--json` prints it."""
        rendering, renderer = self.rendering, self.renderer
        counts = Counter(token.origin for token in rendering.tokens)
        control = sum(token.is_control for token in rendering.tokens)
        return {
            "model": self.model,
            "renderer": renderer.name,
            **({"why": self.why} if self.why else {}),
            "counts": {**{origin: counts[origin] for origin in ORIGINS}, "control": control},
            "has_prefix_property": rendering.has_prefix_property,
            "tokens": [
                {
                    "id": token.id,
                    "text": renderer.tokenizer.decode([token.id]),
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
                    "extended_ids": prompt.extended_ids[prompt.first_difference :][:NUM_AROUND],
                    "whole_ids": prompt.whole_ids[prompt.first_difference :][:NUM_AROUND],
                }
                for prompt in rendering.prompts
            ],
        }


def render(
    model: str,
    messages: str | Path | Sequence[Message | Mapping[str, Any]],
    *,
    tools: str | Path | Sequence[Mapping[str, Any]] = "",
    renderer: str = "",
) -> Rendered:
    """Renders a dialogue as tokens, by origin, and finds whether rendering it anew changes them.

    messages, tools: lists, or JSON files. renderer: its name; empty is the model's own.

    >>> render("tiny-qwen3", [{"role": "user", "content": "hi"}])
    Rendered(tiny-qwen3, 9 tokens)
    """
    if isinstance(messages, (str, Path)):
        if not isinstance(tools, (str, Path)):
            raise ConfigError("messages is a file, so tools must be one, too.")
        dialogue, schemas = read_dialogue_file(messages, tools_path=tools)
    else:
        given = [one.to_dict() if isinstance(one, Message) else one for one in messages]
        dialogue = read_messages(given, where="messages")
        listed = [] if isinstance(tools, (str, Path)) else tools
        schemas = read_tools(listed)
    made, why = find_renderer(model, renderer=renderer)
    return Rendered(trace(made, dialogue, schemas), made, model, why)


def find_renderer(model: str, *, renderer: str = "") -> tuple[Renderer, str]:
    """The renderer of a model, by name or directory, and why it is that one; "" if there was no
    choice. Raises ConfigError or RendererError."""
    try:
        found = find_tokenization(Facts(), tokenizer=model, renderer=renderer)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--tokenizer ", "MODEL ", 1)) from None
    if found.renderer is None:
        raise ConfigError(f"{model}: {found.lacks['renderer']}")
    return found.renderer, found.why


def read_dialogue_file(
    path: str | Path, *, tools_path: str | Path = ""
) -> tuple[tuple[Message, ...], tuple[ToolSchema, ...]]:
    """The messages and the tools of a JSON file, or of a JSONL file's first line.

    The file holds a list of messages, or an object with `messages` and optional `tools`.
    tools_path: a JSON list of tools that replaces the file's own. Raises DataError.
    """
    source = _read_json(path)
    source = dict(source) if isinstance(source, dict) else {"messages": source}
    if tools_path:
        source["tools"] = ()
    found, tools = read_dialogue(source, where=str(path)), ()
    if not found.messages:
        raise DataError(f"{path}: the list of messages is empty. There is nothing to render.")
    if tools_path:
        tools = read_tools(_read_json(tools_path), where=f"{tools_path}: tools")
    return found.messages, tools or found.tools


def _read_json(path: str | Path) -> Any:
    """The JSON of a file, or else of its first line."""
    try:
        text = Path(path).read_bytes().strip()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    reason = ""
    for part in (text, text.partition(b"\n")[0]):
        try:
            return json.loads(part)
        except (ValueError, RecursionError) as error:
            reason = reason or str(error)
    raise DataError(
        f"{path} is not JSON: {reason}. Expected UTF-8 text of a list of messages, as "
        '[{"role": "user", "content": "hi"}], or one object with `messages` per line.'
    )


# -- shown ----------------------------------------------------------------------------------------


def _table(tokens: Sequence[Mapping[str, Any]]) -> Table:
    """Runs of tokens of one origin, separated by bars; control tokens are underlined."""
    table = Table(box=None, padding=(0, 1), header_style="dim", show_edge=False)
    table.add_column("at", justify="right", style="dim")
    table.add_column("message")
    table.add_column("n", justify="right")
    table.add_column("tokens", overflow="fold")
    table.add_column("ids", overflow="fold", style="dim")
    at = 0
    for (origin, message), run in groupby(tokens, key=lambda t: (t["origin"], t["message"])):
        pieces, words = list(run), Text()
        for number, token in enumerate(pieces):
            words.append("|" if number else "", style="dim")
            text = json.dumps(token["text"], ensure_ascii=False)[1:-1].replace('\\"', '"')
            words.append(text, style=_COLOURS[origin] + " underline" * token["control"])
        who = Text(origin if message is None else f"{message} {origin}", style=_COLOURS[origin])
        ids = " ".join(str(token["id"]) for token in pieces)
        table.add_row(str(at), who, str(len(pieces)), words, ids)
        at += len(pieces)
    return table
