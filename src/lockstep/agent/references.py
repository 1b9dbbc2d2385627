"""Functions that settings name: `mytools.py:search`, `package.module:search`, or `live:search`.

A live object was handed over in Python, and no import finds it: a lambda, a list, anything defined
in a notebook. It is known to the process that it lives in, and to no other.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.agent.guard import described
from lockstep.config import did_you_mean
from lockstep.errors import ConfigError

LIVE = "live:"

_handed_over: dict[str, Any] = {}
"""Reference -> object that Python handed over. A script's own functions are among them: importing
the file again would run it again."""
_importing: ContextVar[str] = ContextVar("importing", default="")


def reference_to(found: Any, *, name: str = "") -> str:
    """The reference to `found` in a config. `find` resolves it.

    A function of a module is named by it, one of the running script by the script's file, as seen
    from the working directory. name: what to call another object.
    """
    if isinstance(found, str):
        return found
    function = getattr(found, "function", found)
    path = getattr(function, "__qualname__", "") or name
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    reference = f"{LIVE}{path}"
    if module is not None and _attribute(module, path) is found:
        file = getattr(module, "__file__", None) or ""
        if module.__name__ != "__main__":
            reference = f"{module.__name__}:{path}"
        elif file.endswith(".py") and Path(file).is_file():
            reference = f"{os.path.relpath(file)}:{path}"
    _handed_over[reference] = found
    return reference


def is_reference(text: str) -> bool:
    """Whether `text` is of the form of a reference, and no file is called so."""
    place, _, name = text.rpartition(":")
    return bool(place) and name.replace(".", "_").isidentifier() and not Path(text).exists()


def find(reference: str, *, setting: str) -> Any:
    """The object that a setting names. Raises ConfigError if it cannot be had."""
    where = f"{setting}={reference}"
    if reference in _handed_over:
        return _handed_over[reference]
    if reference.startswith(LIVE):
        raise ConfigError(
            f"{where}: this object was defined in a notebook or handed over by a program, and "
            "ended with that process. Call lockstep.train there again (resume=True continues a "
            f"run), or keep it in a file and name it: mytools.py:{reference.removeprefix(LIVE)}."
        )
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{where}: expected FILE.py:NAME or PACKAGE.MODULE:NAME.")
    module = imported(place, where=where)
    if (found := _attribute(module, name)) is None:
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{where}: {place} has no {name!r}.{did_you_mean(name, public)}")
    return found


def check_not_importing() -> None:
    """Raises ConfigError inside of an import by `find`: a script without a guard would train again
    in every process that imports its functions."""
    if where := _importing.get():
        raise ConfigError(
            f"{where} starts a run when it is imported. Put its call of lockstep.train below "
            '`if __name__ == "__main__":`.'
        )


def _attribute(module: ModuleType, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def imported(place: str, *, where: str) -> ModuleType:
    """The module of a user's FILE.py, or of that name. where: begins the text of ConfigError."""
    file = Path(place).resolve() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"{where}: there is no such file: {place}, from {Path.cwd()}.")
    main = sys.modules["__main__"]
    if file is not None and Path(getattr(main, "__file__", None) or "").resolve() == file:
        return main
    if file is not None and str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: a file beside it must not shadow a module
    name = place if file is None else file.stem
    token = _importing.set(place)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        raise ConfigError(f"{where}: {place} cannot be imported: {described(error)}.") from error
    finally:
        _importing.reset(token)
    if file is not None and Path(module.__file__ or "").resolve() != file:
        raise ConfigError(f"{where}: another module is called {name}. Rename the file.")
    return module
