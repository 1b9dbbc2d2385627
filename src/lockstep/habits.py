"""Finds the setting behind a misspelt name, or behind another library's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from lockstep.tables import tables_beside

_TABLES = tables_beside(__file__)
"""habits.toml, which explains each table: our word -> theirs, separated by blanks."""


def _by_word(table: str) -> dict[str, str]:
    """Their word -> ours."""
    return {each: ours for ours, theirs in _TABLES[table].items() for each in theirs.split()}


SETTINGS, WHOLE, VERBS, VALUES = map(_by_word, ("settings", "whole", "verbs", "values"))
KINDS: dict[str, str] = _TABLES["kinds"]


COMMAND_LINE = ("out", "from", "resume", "method")
"""Words that a command takes beside the settings of a run."""


def hint(key: str, text: str, paths: Iterable[str]) -> str:
    """End of a message about an unknown setting: ' Did you mean x?', or a list without a guess.

    text: the value that was given; "" if the setting comes from a file. paths: the known settings.

    >>> hint("learning_rate", "1e-5", ["steps", "trainer.lr"])
    " Did you mean 'trainer.lr=1e-5'?"
    """
    known = {path: path.rpartition(".")[2] for path in paths if not path.endswith(".type")}
    plain = key.lstrip("+~-").replace("-", "_")
    room, _, last = plain.rpartition(".")
    meant = WHOLE.get(plain) or SETTINGS.get(last, "")
    if not text and (word := meant or plain) in COMMAND_LINE:
        place = "in Python as start=" if word == "from" else "in Python"
        return f" {word} is given beside the settings, on the command line or {place}."
    if re.split(r"\W", meant)[0] not in {"out", "resume", *(p.split(".")[0] for p in known)}:
        meant = ""
    if plain in known:
        found = [plain]
    elif ":" in meant:
        return f" Lockstep has {meant}."
    elif meant:
        found = [meant]
    elif not (found := [path for path, end in known.items() if end == last]):
        found = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
        ends = difflib.get_close_matches(last, known.values(), n=1, cutoff=0.6)
        found = found or [path for path, end in known.items() if end in ends]
    if found:
        found = sorted(found, key=lambda path: path.count("."))[:3]
        written = [f"{p}={text}" if text and "=" not in p else p for p in found]
        return f" Did you mean {' or '.join(map(repr, written))}?"
    beside = [path.removeprefix(f"{room}.") for path in known if path.startswith(f"{room}.")]
    return f" Known: {', '.join(dict.fromkeys(p.split('.')[0] for p in beside or known))}."
