"""What a person sees while a dump is read: one line, gone at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep.doctor.checks.rows import Rows
from lockstep.observe.live import format_number

SILENT_SECONDS = 1.0
"""Nothing is shown before: most dumps are read by then."""
INTERVAL_SECONDS = 0.2


class Reading:
    """Counts what is read, and says so on stderr if that is a terminal.

    Every row is read several times: once for each stage of checks, and again where a cause was
    found; the count is of what was read, not of the dump.
    """

    def __init__(
        self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._clock = clock
        self._began = clock()
        self._next = self._began + SILENT_SECONDS
        self._rows = self._tokens = 0

    def on_rows(self, rows: Rows) -> None:
        """For `diagnose(on_rows=...)`."""
        self._rows += len(rows)
        self._tokens += rows.num_tokens
        now = self._clock()
        if now < self._next or not self._console.is_terminal:
            return
        self._next = now + INTERVAL_SECONDS
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        rate = format_number(self._tokens / (now - self._began))
        text = f"> read {self._rows:,} rows, {self._tokens:,} tokens ({rate} tok/s)"
        self._live.update(Text(text, style="dim", no_wrap=True), refresh=True)

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
