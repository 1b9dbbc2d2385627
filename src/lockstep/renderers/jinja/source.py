"""Finds a model's chat template: beside its tokenizer, or in the file that the run names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lockstep.config import read_json
from lockstep.errors import RendererError
from lockstep.renderers.config import JinjaConfig
from lockstep.renderers.tokenizer import Tokenizer


def has_template(directory: Path) -> bool:
    """True if a model's directory has a chat template."""
    has_file = (directory / "chat_template.jinja").is_file()
    return has_file or bool(_tokenizer_config(directory).get("chat_template"))


def read_template(tokenizer: Tokenizer, config: JinjaConfig) -> tuple[str, str, dict[str, str]]:
    """Reads the template: (text, its place, the special tokens that templates write, such as
    bos_token, by name). Raises RendererError if there is none."""
    directory = Path(tokenizer.where).parent if Path(tokenizer.where).is_file() else None
    fields: Mapping[str, Any] = {} if directory is None else _tokenizer_config(directory)
    special = {
        name: text
        for name, token in fields.items()
        if name.endswith("_token") and (text := _content(token)) is not None
    }
    path = Path(config.template).expanduser() if config.template else None
    if path is None and directory is not None and (directory / "chat_template.jinja").is_file():
        path = directory / "chat_template.jinja"
    if path is not None:
        try:
            return path.read_text(encoding="utf-8"), str(path), special
        except (OSError, UnicodeDecodeError) as error:
            raise RendererError(f"the chat template {path} cannot be read: {error}.") from None
    text = fields.get("chat_template")
    if isinstance(text, list):  # several, by name: transformers takes the default one
        several = cast("list[Mapping[str, Any]]", text)
        text = next((t.get("template") for t in several if t.get("name") == "default"), None)
    if not isinstance(text, str) or not text:
        raise RendererError(
            f"renderer=jinja: {directory or 'the tokenizer'} has no chat template. Name one with "
            "renderer.template=FILE."
        )
    return text, f"{directory}/tokenizer_config.json", special


def _tokenizer_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_json(path, RendererError) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """Returns the text of a special token, which files write as a string or as an object."""
    if isinstance(token, dict):
        token = cast("Mapping[str, Any]", token).get("content")
    return token if isinstance(token, str) else None
