"""A chat template, rendered in a child process within bounded time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.children import Child
from lockstep.errors import (
    ChildError,
    ChildRefusal,
    ChildTimeoutError,
    RendererError,
    require_package,
)

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
        self._child = Child.of_module(
            "lockstep.renderers.jinja.template_worker",
            name="the process that renders the chat template",
            opening={"source": source, "date": date},
        )
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
