"""Code lines by room: lines that hold code, without blanks, comments and docstrings.

python docs/proof/size.py            # the table
python docs/proof/size.py --files    # and every file
python docs/proof/size.py --settings # the number of settings, by the installed package
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"

CEILINGS = {
    "types, errors, config": 1_886,
    "tinker": 3_649,
    "run": 4_768,
    "renderers": 3_179,
    "models and ops": 8_501,
    "engines, sync, launch": 8_970,
    "agent": 6_583,
    "learn: training, correction, objectives": 5_063,
    "doctor": 7_314,
    "integrations": 1_246,
    "store, observe, report": 2_651,
    "environments and recipes": 3_415,
    "testing": 1_481,
    "tests": 59_874,
    "proofs and benchmarks": 8_832,
}
"""Code lines that a room may have. Who adds some removes as many; where a room shrinks, its ceiling
follows."""
SETTINGS = 300
"""Settings that all kinds of runs and servers may have together."""
SLACK = 20
"""Lines that a room may be below its ceiling."""
ROOMS = {
    "types, errors, config": "types errors config display habits dialogues package tables __init__",
    "tinker": "tinker tinker_config",
    "run": "run run_config memory model_server supervised verbs cli",
    "renderers": "renderers",
    "models and ops": "models ops",
    "engines, sync, launch": "engines sync launch children system",
    "agent": "agent",
    "learn: training, correction, objectives": "training correction objectives",
    "doctor": "doctor",
    "integrations": "integrations",
    "store, observe, report": "store observe report",
    "environments and recipes": "envs recipes",
    "testing": "testing",
}
"""Room of the library -> its modules."""
OUTSIDE = {
    "tests": "tests",
    "docs/proof": "proofs and benchmarks",
    "benchmarks": "proofs and benchmarks",
}
"""Folder outside of the library -> its room."""
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Physical lines with at least one token that is neither a comment nor part of a docstring.

    >>> code_lines('def one():\\n    "One."\\n\\n    return 1  # always\\n')
    2
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def sizes() -> dict[Path, int]:
    """Code lines of every Python file, by its path from the root."""
    folders = [PACKAGE, *(ROOT / folder for folder in OUTSIDE)]
    return {
        path.relative_to(ROOT): code_lines(path.read_text("utf-8"))
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }


def by_room(files: dict[Path, int]) -> Counter[str]:
    """Code lines of each room. KeyError for a module of the library that belongs to none."""
    room_of = {part: room for room, parts in ROOMS.items() for part in parts.split()}
    total = Counter(dict.fromkeys(CEILINGS, 0))
    for path, count in files.items():
        outside = [room for folder, room in OUTSIDE.items() if path.is_relative_to(folder)]
        total[outside[0] if outside else room_of[path.parts[2].removesuffix(".py")]] += count
    return total


def in_library(counts: Mapping[str, int]) -> int:
    """The sum over the rooms of the library."""
    return sum(counts[room] for room in ROOMS)


def count_settings() -> int:
    """Settings of runs and servers, each where it is first declared. A section or a kind does not
    count itself: the settings below it do."""
    import lockstep.recipes  # noqa: F401  with them come the kinds of tasks
    from lockstep.config import choices
    from lockstep.run_config import Config, ServeConfig, SupervisedConfig

    waiting: list[Any] = [Config, SupervisedConfig, ServeConfig]
    seen: set[Any] = set()
    declared: set[tuple[Any, str]] = set()
    while waiting:
        if (cls := waiting.pop()) in seen:
            continue
        seen.add(cls)
        hints = get_type_hints(cls)
        for field in fields(cls):
            below = _dataclasses(hints[field.name])
            waiting += [kind for one in below for kind in (one, *choices(one).values())]
            bases = [base for base in cls.__mro__ if is_dataclass(base)]
            owners = [base for base in bases if field.name in base.__dataclass_fields__]
            declared |= set() if below else {(owners[-1], field.name)}
    return len(declared)


def _dataclasses(annotation: Any) -> list[Any]:
    if is_dataclass(annotation):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _dataclasses(inner)]


def main() -> None:
    if "--settings" in sys.argv[1:]:
        print(f"{count_settings()} of {SETTINGS} settings")
        return
    files = sizes()
    if "--files" in sys.argv[1:]:
        for path, count in files.items():
            print(f"{count:6,}  {path}")
        print()
    rooms = by_room(files)
    for room, count in rooms.items():
        print(f"{count:6,} of {CEILINGS[room]:6,}  {room}")
    print(f"{in_library(rooms):6,} of {in_library(CEILINGS):6,}  in the library")


if __name__ == "__main__":
    main()
