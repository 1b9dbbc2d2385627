"""What is computed of an object that does not change, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """Base of what several checks ask the same of, `Rows` and `Setting`."""

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """What `compute` gave when it was first asked for by this name. Nobody may change it.

        >>> things = Once()
        >>> things.once("answer", lambda: 42), things.once("answer", lambda: 43)
        (42, 42)
        """
        known = self._known
        if name not in known:
            known[name] = compute()
        return known[name]

    @cached_property
    def _known(self) -> dict[str, Any]:
        return {}
