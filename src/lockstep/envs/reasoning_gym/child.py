"""The child process for reasoning-gym.

    python -m lockstep.envs.reasoning_gym.child          (started by `config.shared_child`)

It is a process of its own for three reasons. Five datasets order sets by Python's string hashes, so
the same seed gives another task in each process unless PYTHONHASHSEED is fixed. Nine verifiers pass
the model's text to `eval`, directly or through sympy, and arithmetic such as 9**9**9**9 never ends:
such text is refused before it is evaluated, and the process can be killed. And the import takes
seconds, which `--help` does not pay.

Facts about reasoning-gym hold for its version 0.1.25.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import enum
import importlib
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import reasoning_gym
import sympy
from reasoning_gym.factory import CURRICULA, DATASETS

from lockstep.agent.tasks import derive_seed, is_held_out
from lockstep.children import serve
from lockstep.config import did_you_mean, from_dict
from lockstep.errors import ConfigError, DataError
from lockstep.system import limit_process
from lockstep.tables import tables_beside

MAX_MEMORY_BYTES = 4 << 30
MAX_DRAWS = 1000
"""Questions drawn at most to find one of the requested split."""

OWNED = ("seed", "size")
"""Fields of a dataset's config that Lockstep sets: each task is item 0 of its own dataset."""

_TABLES = tables_beside(__file__)
REFUSED: dict[str, str] = _TABLES["refused"]
"""Dataset that cannot be trained on -> the reason."""
MATH_FUNCTIONS = frozenset(_TABLES["math_functions"].split())
MAX_EXPRESSION_CHARS = 2000
MAX_EXPONENT = 1000
_SAFE_NODES = (ast.Expression, ast.UnaryOp, ast.UAdd, ast.USub, ast.operator, ast.Load)


# -- answers that are evaluated -------------------------------------------------------------------


def check_expression(text: str) -> None:
    """Raises ValueError unless `text` is arithmetic over numbers, names and known functions with
    small exponents. Evaluating such text ends, and cannot call or reach anything else."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError("the expression is too long")
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in MATH_FUNCTIONS:
                is_safe = name != "factorial" or _is_small(node.args)
            case ast.Name(id=name):
                is_safe = not name.startswith("_")
            case ast.Constant(value=value):
                is_safe = isinstance(value, int | float) and not isinstance(value, bool)
            case ast.BinOp(op=ast.Pow()):
                is_safe = _is_small([node.right])
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
                is_safe = True
            case _:
                is_safe = isinstance(node, _SAFE_NODES)
        if not is_safe:
            raise ValueError(f"{type(node).__name__}: not arithmetic over numbers of bounded size")


def _is_small(nodes: list[ast.expr]) -> bool:
    """True if these contain no power, product or call, and no number above MAX_EXPONENT."""
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        match node:
            case ast.BinOp(op=ast.Pow() | ast.Mult()) | ast.Call():
                return False
            case ast.Constant(value=int() | float() as value) if abs(value) > MAX_EXPONENT:
                return False
    return True


def guard_verifiers() -> None:
    """Replaces each `eval` that an answer can reach by `literal_eval` or a checked parser."""
    for name in _TABLES["literal_modules"]:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]
    parse: Callable[..., Any] = sympy.parse_expr

    @wraps(parse)
    def checked(text: str, *args: Any, **kwargs: Any) -> Any:
        check_expression(text)
        return parse(text, *args, **kwargs)

    sympy.parse_expr = checked
    for name in _TABLES["expression_modules"]:
        importlib.import_module(f"reasoning_gym.{name}").parse_expr = checked  # type: ignore[attr-defined]


# -- datasets -------------------------------------------------------------------------------------


def config_of(dataset: str, settings: Mapping[str, Any], level: int | None) -> Any:
    """The dataset's own config, validated by the dataset. Raises ConfigError naming the setting."""
    if dataset in REFUSED:
        raise ConfigError(f"dataset={dataset} cannot be trained on: {REFUSED[dataset]}.")
    if dataset not in DATASETS:
        known = [name for name in DATASETS if name not in REFUSED]
        raise ConfigError(f"dataset={dataset}: no such dataset.{did_you_mean(dataset, known)}")
    cls: Any = DATASETS[dataset][1]
    for name in OWNED:
        if name in settings:
            raise ConfigError(f"settings.{name}: Lockstep sets it. Leave it out (seed=N is above).")
    config = cls() if level is None else _at_level(dataset, level)
    hints = typing.get_type_hints(cls)
    values = {name: _setting(cls, hints.get(name), name, value) for name, value in settings.items()}
    try:
        config = dataclasses.replace(config, **values)
        getattr(config, "validate", bool)()  # two datasets have none
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"dataset={dataset} refuses its settings: {error}.") from None
    return config


def _at_level(dataset: str, level: int) -> Any:
    if dataset not in CURRICULA:
        raise ConfigError(f"level={level}: dataset={dataset} has no curriculum. Leave it out.")
    curriculum: Any = reasoning_gym.factory.create_curriculum(dataset)
    highest = max(len(each.levels) for each in curriculum.attributes.values()) - 1
    if not 0 <= level <= highest:
        raise ConfigError(f"level={level}: dataset={dataset} has the levels 0 to {highest}.")
    curriculum.set_global_level(level)
    return curriculum.generate_configuration()


def _setting(cls: Any, hint: Any, name: str, value: Any) -> Any:
    """A setting as its type, of a JSON value. Dates, enumerations and sequences are read here, all
    others by `lockstep.config`."""
    entry = next(iter(typing.get_args(hint)), hint)
    kinds = (enum.Enum, datetime.date, datetime.time)
    is_kind = isinstance(entry, type) and issubclass(entry, kinds)
    if not is_kind and typing.get_origin(hint) is not Sequence:
        return getattr(from_dict(cls, {name: value}, path="settings"), name)
    make: Any = getattr(entry, "fromisoformat", entry)
    try:
        return make(value) if entry is hint else [make(each) for each in value]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"settings.{name}={value!r}: {error}.") from None


# -- requests -------------------------------------------------------------------------------------


Item = Callable[[int], tuple[Any, Any]]
"""A seed -> (the dataset of one item that it makes, the item)."""


def answer(
    do: str, dataset: str, settings: Mapping[str, Any], level: int | None, **given: Any
) -> dict[str, Any]:
    """Answers a request about a dataset: `check` its settings, `draw` a task, `score` an answer."""
    if do == "check":
        config_of(dataset, settings, level)
        return {}
    item = partial(_item, dataset, json.dumps(settings), level)
    return draw(item, dataset, **given) if do == "draw" else score(item, **given)


def draw(item: Item, dataset: str, *, seed: int, split: str, eval_share: float) -> dict[str, Any]:
    """The first question of the split in the sequence of `seed`. A question's text decides its
    split, so no question is in both, whatever the seeds."""
    for attempt in range(MAX_DRAWS):
        # 32 bits: some datasets seed numpy, which takes no more.
        own_seed = derive_seed("reasoning-gym", seed, attempt) % 2**32
        _, entry = item(own_seed)
        question = entry["question"]
        if is_held_out(eval_share, dataset, question) == (split == "eval"):
            expected = None if entry["answer"] is None else str(entry["answer"])
            return {"seed": own_seed, "question": question, "answer": expected}
    raise DataError(
        f"dataset={dataset}: none of {MAX_DRAWS} questions belongs to the split {split!r}: with "
        "these settings there are too few different ones. Make it harder (settings, level), or "
        f"hold out another share of them (eval_share={eval_share})."
    )


def score(item: Item, *, seed: int, answer: str) -> dict[str, Any]:
    made, entry = item(seed)
    return {"score": float(made.score_answer(answer, entry))}


@lru_cache(maxsize=4096)  # the episodes of a group ask for one task
def _item(dataset: str, settings: str, level: int | None, seed: int) -> tuple[Any, Any]:
    config = dataclasses.replace(config_of(dataset, json.loads(settings), level), seed=seed, size=1)
    made: Any = DATASETS[dataset][0](config)
    return made, made[0]


def main() -> None:
    limit_process(AS=MAX_MEMORY_BYTES, CORE=0)
    guard_verifiers()
    serve(answer)
