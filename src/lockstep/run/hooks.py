"""Hooks: code from outside can change a run at these named places. By default there is none.

A run asks `current_hooks()` once, at its start. Production code gives no hooks: they are for tests
and for faults that are injected on purpose (`lockstep.testing.faults`, `lockstep train --fault`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from lockstep.types import Float32Array, Sample

if TYPE_CHECKING:
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.engines.config import EngineConfig
    from lockstep.models.config import FallbackConfig, ModelConfig
    from lockstep.models.decoder import Decoder
    from lockstep.renderers.base import Renderer
    from lockstep.run_config import Config

LogProbs = Callable[[Sequence[Sample]], Sequence[Float32Array]]
"""Rows -> [T] float32 per row: the trainer's log-probs of its trained tokens, NaN elsewhere."""


class RunHooks:
    """The methods that a run calls, in this order. Each default leaves the run as it is.

    >>> class DoubledRows(RunHooks):
    ...     def change_rows(self, rows, renderer, log_probs):
    ...         return [*rows, *rows]
    >>> with hooked(DoubledRows()):
    ...     current_hooks().change_rows(["a"], None, None)
    ['a', 'a']
    """

    verifies_sync: bool = True
    """Verify the weights after each sync. False for hooks whose weights differ on purpose."""
    no_contract: str = ""
    """Why contract=auto must not promise equal log-probs; empty if it may."""
    recorded: Sequence[Mapping[str, Any]] = ()
    """Entries of `faults` in environment.json. A resumed run must have the same."""

    def check(
        self, config: Config, model: ModelConfig | FallbackConfig, renderer: Renderer
    ) -> None:
        """Called before a model is loaded. Raises ConfigError if the hooks do not fit the run."""

    def plan(self) -> list[str]:
        """Lines for the plan that a run prints at its start."""
        return []

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        """Opens the engine that samples."""
        from lockstep.engines.registry import open_engine

        return open_engine(config, context)

    def make_trained(self, model: Decoder) -> Decoder:
        """The decoder that the trainer runs; it must share the parameters of `model`."""
        return model

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        """The rows to train on in place of `rows`, which must not be changed. A row without a
        change is returned as the same object."""
        return list(rows)

    def after_update(self, rows: Sequence[Sample], log_probs: LogProbs) -> None:
        """Called with the rows that were just trained on. log_probs: by the updated weights."""


_HOOKS: ContextVar[RunHooks] = ContextVar("run hooks", default=RunHooks())  # noqa: B039


def current_hooks() -> RunHooks:
    return _HOOKS.get()


@contextmanager
def hooked(hooks: RunHooks) -> Iterator[None]:
    """Runs that are started inside of this block call `hooks`."""
    token = _HOOKS.set(hooks)
    try:
        yield
    finally:
        _HOOKS.reset(token)
