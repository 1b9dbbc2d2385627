"""Completion in bash, zsh and fish: verbs, recipes, settings and their kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config import describe
from lockstep.errors import LockstepError
from lockstep.recipes.registry import RECIPES, SUPERVISED_RECIPES

SCRIPTS = {
    "bash": r"""_lockstep() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$' \t\n'
  local current="${line##* }"
  local -a typed=($line)
  [[ -z $current ]] && typed+=("")
  IFS=$'\n'
  COMPREPLY=($(lockstep completion bash "${typed[@]:1}" 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")  # bash replaces what follows the =
}
complete -o default -o nospace -F _lockstep lockstep""",
    "zsh": r"""_lockstep() {
  local -a found
  found=("${(@f)$(lockstep completion zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  [[ -n $found ]] && compadd -Q -S '' -- $found || _files
}
compdef _lockstep lockstep""",
    "fish": r"""function __lockstep
  set -l typed (commandline -opc)
  lockstep completion fish $typed[2..] "$(commandline -ct)" 2>/dev/null | string trim
end
complete -c lockstep -a '(__lockstep)'""",
}
"""Each asks `lockstep completion SHELL WORD...`, whose last word is the one that is being typed."""


def candidates(words: Sequence[str], flags: Mapping[str, Sequence[str]]) -> list[str]:
    """The words that could stand in place of the last one; a blank ends those that are whole.

    flags: verb -> its flags.

    >>> candidates(["se"], {"train": [], "serve": []})
    ['serve ']
    """
    *before, last = words
    recipes: Mapping[str, Any] = {"train": RECIPES, "sft": SUPERVISED_RECIPES}.get(
        before[0] if before else "", {}
    )
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
