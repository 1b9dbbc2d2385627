"""Completion in bash, zsh and fish: verbs, recipes, settings and their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import describe
from lockstep.errors import LockstepError
from lockstep.recipes.registry import RECIPES, SUPERVISED_RECIPES


def script(shell: str) -> str:
    """The script for bash, zsh or fish. It runs `lockstep completion SHELL WORD...`; the user is
    typing the last word."""
    return Path(__file__).with_suffix(f".{shell}").read_text("utf-8").rstrip("\n")


def candidates(words: Sequence[str], flags: Mapping[str, Sequence[str]]) -> list[str]:
    """Completions of the last word. A complete word ends with a blank.

    flags: verb -> its flags.

    >>> candidates(["se"], {"train": [], "serve": []})
    ['serve ']
    """
    *before, last = words
    verbs: Mapping[str, Mapping[str, Any]] = {"train": RECIPES, "sft": SUPERVISED_RECIPES}
    recipes = verbs.get(before[0], {}) if before else {}
    target = next((word for word in before[1:] if word in recipes), "")
    if not before:
        found = [f"{verb} " for verb in flags]
    elif last.startswith("-"):
        found = [f"{flag} " for flag in flags.get(before[0], ())]
    elif target:
        found = _settings(recipes[target], last)
    else:
        found = [f"{name} " for name in recipes]
    return [word for word in found if word.startswith(last)]


def _settings(recipe: Any, last: str) -> list[str]:
    try:
        rows = [(path, kind) for path, kind, _, _ in describe(recipe())]
    except LockstepError:  # a recipe that is right with more settings alone
        return []
    if "=" not in last:
        return ["out=", "resume=", *(f"{path}=" for path, _ in rows)]
    choices = {path: kind.replace("bool", "true | false").split(" | ") for path, kind in rows}
    path = last.partition("=")[0]
    return [f"{path}={kind} " for kind in choices.get(path, ()) if len(choices[path]) > 1]
