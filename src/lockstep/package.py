"""The Python package itself: its version, and its names that are imported on first use."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NAME = "lockstep-rl"


def package_version() -> str:
    """Version of this package; 0+unknown in a checkout that is not installed."""
    try:
        return version(NAME)
    except PackageNotFoundError:
        return "0+unknown"


def lazily(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """(`__getattr__`, `__all__`) of a package, for the names that its file imports for type
    checkers: those under `if TYPE_CHECKING:`.

    >>> from lockstep import correction
    >>> get, names = lazily("lockstep.correction", correction.__file__)
    >>> "Rule" in names, get("Rule").__module__
    (True, 'lockstep.correction.config')
    """
    tree = ast.parse(Path(file).read_text("utf-8"))
    nodes = [node for part in tree.body if isinstance(part, ast.If) for node in part.body]
    places = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1)
            hint = f" Did you mean {package}.{near[0]}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}")
        module, attribute = places[name]
        return getattr(import_module(module), attribute)

    return get, [*places]
