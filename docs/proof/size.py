"""Code lines of the library by room: lines that hold code, without blanks, comments, docstrings.

python docs/proof/size.py            # the table
python docs/proof/size.py --files    # and every file
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "lockstep"

LIMIT = 60_897
"""Code lines that the library may have. Who adds some removes as many; a commit that raises the
limit says for which capability, and why nothing could go for it."""

ROOMS = {
    "nouns: types, errors, config": (
        "types",
        "errors",
        "config",
        "display",
        "habits",
        "dialogues",
        "__init__",
    ),
    "tinker": ("tinker", "tinker_config", "tinker_server"),
    "run": (
        "run",
        "run_config",
        "memory",
        "model_server",
        "supervised",
        "verbs",
        "cli",
        "completion",
    ),
    "renderers": ("renderers",),
    "models and ops": ("models", "ops"),
    "engines, sync, launch": ("engines", "sync", "launch", "children", "system"),
    "agent": ("agent",),
    "learn: training, correction, objectives": ("training", "correction", "objectives"),
    "doctor": ("doctor",),
    "store, observe, report": ("store", "observe", "report"),
    "environments and recipes": ("envs", "recipes"),
    "testing": ("testing",),
}
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
    """Code lines of every Python file, by its path inside the package."""
    return {
        path.relative_to(PACKAGE): code_lines(path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def by_room(files: dict[Path, int]) -> Counter[str]:
    """Code lines of each room. KeyError for a file that belongs to none."""
    room_of = {part: room for room, parts in ROOMS.items() for part in parts}
    total = Counter(dict.fromkeys(ROOMS, 0))
    for path, count in files.items():
        total[room_of[path.parts[0].removesuffix(".py")]] += count
    return total


def main() -> None:
    files = sizes()
    if "--files" in sys.argv[1:]:
        for path, count in files.items():
            print(f"{count:6,}  {path}")
        print()
    for room, count in by_room(files).items():
        print(f"{count:6,}  {room}")
    print(f"{sum(files.values()):6,}  in all, of at most {LIMIT:,}")


if __name__ == "__main__":
    main()
