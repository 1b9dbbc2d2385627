"""A model's chat template: found beside its tokenizer or in the file that the run names, and
rendered in a child process within bounded time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from lockstep.children import Child
from lockstep.config import read_json
from lockstep.errors import (
    ChildError,
    ChildRefusal,
    ChildTimeoutError,
    RendererError,
    require_package,
)
from lockstep.renderers.config import JinjaConfig
from lockstep.renderers.tokenizer import Tokenizer

RENDER_SECONDS = 10.0  # a long dialogue takes about 10 ms
PROBE_SECONDS = 60.0  # some 200 short dialogues, before the first prompt
PROBE_CHARS = 1 << 17
"""Characters that a template may write for a dialogue of a few words."""
_NO_MEMORY = ("MemoryError", "RecursionError", "OverflowError")


class TemplateRefusal(RendererError):
    """The template called `raise_exception`: it has no form for such a dialogue."""


class BrokenTemplateError(RendererError):
    """The template fails, whatever the program that renders it."""


class ChatTemplate:
    """Renders one template. Requests run one at a time; threads wait for each other. A process that
    was killed is started again by the next request."""

    def __init__(self, source: str, *, where: str, date: str) -> None:
        """where: the template's file, for messages. date: the day that strftime_now formats.

        Raises RendererError if the template is malformed, MissingExtraError without jinja2.
        """
        require_package("jinja2", extra="jinja", needed_for="renderer=jinja")
        self.source, self.where = source, where
        self._until = math.inf
        worker, opening = f"{__package__}.template_worker", {"source": source, "date": date}
        name = "the process that renders the chat template"
        self._child = Child.of_module(worker, name=name, opening=opening)
        self._ask(self._child.open)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Returns the rendered text. Raises TemplateRefusal if the template refuses the dialogue,
        RendererError if it fails, breaks out of its sandbox or takes too long."""
        request = {"variables": dict(variables)}
        seconds = min(RENDER_SECONDS, self._until - time.monotonic())
        if seconds <= 0:
            raise self._slow(PROBE_SECONDS)
        text = self._ask(lambda: self._child.ask(request, seconds=seconds))
        if len(text) > PROBE_CHARS and self._until < math.inf:
            raise RendererError(
                f"{self.where}: the chat template writes {len(text)} characters for a few words; "
                f"expected at most {PROBE_CHARS}."
            )
        return text

    @contextmanager
    def probed(self) -> Generator[None, None, None]:
        """Bounds the time of all requests together, and the text of each. Raises RendererError when
        the time is over, also if the code inside caught the error of the template."""
        self._until = time.monotonic() + PROBE_SECONDS
        yield
        if time.monotonic() > self._until:
            raise self._slow(PROBE_SECONDS)
        self._until = math.inf

    def _slow(self, seconds: float) -> RendererError:
        return RendererError(
            f"{self.where}: the chat template did not finish within {seconds:g} s."
        )

    def _ask(self, send: Callable[[], Mapping[str, Any]]) -> str:
        try:
            return send()["text"]
        except ChildRefusal as error:
            text = str(error)[:2000]
            if error.kind == "Raised":
                raise TemplateRefusal(f"the chat template refuses the dialogue: {text}") from None
            text = (text if error.kind == "Malformed" else f"{error.kind}: {text}").rstrip(".")
            why = f"it fails: {text}"
            if error.kind in _NO_MEMORY:
                self._child.close()  # memory that was taken may not come back
                why = "it takes more memory than a template may, or calls itself without end "
                why += f"({text})"
            raise BrokenTemplateError(
                f"{self.where}: the chat template cannot be used: {why}."
            ) from None
        except ChildTimeoutError:
            raise self._slow(RENDER_SECONDS) from None
        except ChildError as error:
            why = "Did the template take more memory than it may?"
            raise RendererError(f"{self.where}: {error} {why}") from None


# -- finding it ------------------------------------------------------------------------------------


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
