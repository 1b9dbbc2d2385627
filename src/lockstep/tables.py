"""Tables that stand beside a module, as TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def tables_beside(module: str, name: str = "") -> dict[str, Any]:
    """The content of the file `name` beside a module; by default of the module's own, `x.toml`
    beside `x.py`. module: its `__file__`."""
    path = Path(module)
    path = path.with_name(name) if name else path.with_suffix(".toml")
    return tomllib.loads(path.read_text("utf-8"))
