"""The package bfcl_eval: its entries, simulated APIs and checkers. Only this file imports it.

Its own runner builds Python source from the model's text and passes it to `eval`. Here nothing of
the model is evaluated: a call is the name of a method of the entry's simulations, with JSON
arguments.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.agent.tasks import read_jsonl
from lockstep.errors import DataError, MissingExtraError
from lockstep.types import ToolSchema

VERSION = "2026.3.23"
"""Version that this adapter is written for and tested with."""

MULTI_TURN = (
    "multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context",
)  # fmt: skip
SINGLE_TURN = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple",
    "live_parallel", "live_parallel_multiple",
)  # fmt: skip
RELEVANCE = ("irrelevance", "live_irrelevance", "live_relevance")
CATEGORIES = (*MULTI_TURN, *SINGLE_TURN, *RELEVANCE)

_MODEL = "lockstep"  # the checkers look it up in their table of models

ERROR = "Error during execution: "
"""Beginning of the result of a call that raised, in the package's words."""

_LARGEST = {
    ("power", "exponent"): 10_000,
    ("logarithm", "precision"): 10_000,
    ("square_root", "precision"): 10_000,
    ("round_number", "decimal_places"): 10_000,
}
"""(function, argument) -> largest value, of arguments that decide how long a call takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of the benchmark."""

    id: str
    category: str
    turns: tuple[tuple[Mapping[str, str], ...], ...]
    """Messages of each user turn: {"role", "content"}. () for a turn that brings functions
    instead."""
    functions: tuple[Mapping[str, Any], ...]
    """Functions, as the package describes them."""
    later_functions: Mapping[int, tuple[Mapping[str, Any], ...]]
    """turn -> functions that the model gets only then."""
    answer: Sequence[Any]
    """Ground truth. Multi-turn: per user turn, calls as Python source. Single turn: per call,
    {function: {argument: [accepted values]}}. () for relevance."""
    classes: tuple[str, ...] = ()
    """Simulations of a multi-turn entry."""
    initial: Mapping[str, Any]
    """Initial states of the simulations."""


def require_package() -> Path:
    """Folder of the package. Raises MissingExtraError without it, DataError for another version.
    Does not import it."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError.of("bfcl-eval", extra="bfcl", needed_for="task=bfcl")
    try:
        found = importlib.metadata.version("bfcl-eval")
    except importlib.metadata.PackageNotFoundError:
        found = "unknown"
    if found != VERSION:
        raise DataError(
            f"bfcl-eval {found} is installed; task=bfcl was written for {VERSION}, and another "
            f"version has other entries and other checkers. Install bfcl-eval=={VERSION}."
        )
    return Path(next(iter(spec.submodule_search_locations)))


@lru_cache
def entries(category: str) -> tuple[Entry, ...]:
    """Entries of a category, in the package's order."""
    data = require_package() / "data"
    questions = _read(data / f"BFCL_v4_{category}.json")
    answers: dict[str, Any] = {}
    if category not in RELEVANCE:
        answers = {
            record["id"]: record["ground_truth"]
            for record in _read(data / "possible_answer" / f"BFCL_v4_{category}.json")
        }
    return tuple(_entry(record, category, answers, data) for record in questions)


def _read(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(path)]


def _entry(
    record: Mapping[str, Any], category: str, answers: Mapping[str, Any], data: Path
) -> Entry:
    classes = tuple(record.get("involved_classes", ()))
    functions = list(record.get("function", ()))
    for name in classes:
        functions += _documented(data, name)
    later: dict[int, tuple[Mapping[str, Any], ...]] = {}
    for turn, names in record.get("missed_function", {}).items():
        later[int(turn)] = tuple(f for f in functions if f["name"] in names)
        functions = [f for f in functions if f["name"] not in names]
    return Entry(
        id=record["id"],
        category=category,
        turns=tuple(tuple(messages) for messages in record["question"]),
        functions=tuple(functions),
        later_functions=later,
        answer=answers.get(record["id"], ()),
        classes=classes,
        initial=record.get("initial_config", {}),
    )


@lru_cache
def _documented(data: Path, class_name: str) -> list[dict[str, Any]]:
    files = _module("bfcl_eval.constants.executable_backend_config")
    return _read(data / "multi_turn_func_doc" / files.MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name])


# -- tools -----------------------------------------------------------------------------------------


def tool_name(function_name: str) -> str:
    """Name of a function for the model: most protocols allow no period in it."""
    return function_name.replace(".", "_")


def tool_schema(function: Mapping[str, Any]) -> ToolSchema:
    """A function of the package as a tool, with the types of JSON schema instead of Python's."""
    types_of = _module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI

    def converted(schema: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key == "type":
                out[key] = types_of[value]
            elif key == "properties":
                out[key] = {name: converted(inner) for name, inner in value.items()}
            elif key == "items":
                out[key] = converted(value)
            elif key in ("description", "required", "enum", "default"):
                out[key] = value
        return out

    return ToolSchema(
        name=tool_name(function["name"]),
        description=function["description"],
        parameters=converted(function["parameters"]),
    )


def later_functions_text(functions: Sequence[Mapping[str, Any]]) -> str:
    """User message that brings withheld functions, in the package's words for models without tools:
    the tools of a prompt cannot change."""
    prompts = _module("bfcl_eval.constants.default_prompts")
    described = [
        {"name": t.name, "description": t.description, "parameters": t.parameters}
        for t in map(tool_schema, functions)
    ]
    return prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(
        functions=json.dumps(described, ensure_ascii=False)
    )


def max_steps_per_turn() -> int:
    """Replies with calls that one user turn may take; with more, the entry has failed."""
    return int(_module("bfcl_eval.constants.default_prompts").MAXIMUM_STEP_LIMIT)


# -- simulations -----------------------------------------------------------------------------------


class Simulation:
    """The simulated APIs of one entry, with their state, for one episode."""

    def __init__(self, entry: Entry) -> None:
        backend = _module("bfcl_eval.constants.executable_backend_config")
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        for name in entry.classes:
            made = getattr(_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backend.STATELESS_CLASSES:
                made._load_scenario(
                    copy.deepcopy(entry.initial.get(name, {})),
                    long_context="long_context" in entry.category,
                )
            self.instances[name] = made
            for method_name, method in inspect.getmembers(made, predicate=inspect.ismethod):
                if not method_name.startswith("_"):
                    self._methods[method_name] = method

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Result of a call, as the package writes it. An exception is a result too."""
        method = self._methods.get(name)
        if method is None:
            return f"{ERROR}name {name!r} is not defined"
        try:
            bound = inspect.signature(method).bind(*args, **kwargs).arguments
            for (of, argument), largest in _LARGEST.items():
                value = bound.get(argument) if of == name else None
                if isinstance(value, int | float) and not abs(value) <= largest:
                    return f"{ERROR}{argument} must be at most {largest}"
            result = method(*args, **kwargs)
        except Exception as error:  # the package's own boundary: whatever a simulation raises
            return f"{ERROR}{error}"
        if isinstance(result, str):
            return result
        if isinstance(result, dict):
            try:
                return json.dumps(result)
            except (TypeError, ValueError, RecursionError):
                pass
        try:
            return str(result)
        except RecursionError as error:
            return f"{ERROR}{error}"

    def call_source(self, source: str) -> str:
        """Result of a call of the ground truth: Python source with literal arguments. Raises
        DataError for any other source; nothing is evaluated."""
        try:
            node = ast.parse(source.strip(), mode="eval").body
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                raise ValueError("not a call of a function by its name")
            args = [ast.literal_eval(each) for each in node.args]
            kwargs = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        except (SyntaxError, ValueError) as error:
            raise DataError(f"bfcl_eval: ground truth {source!r}: {error}.") from error
        return self.call(node.func.id, args, kwargs)


# -- verdicts --------------------------------------------------------------------------------------


def turn_problem(
    model: Simulation,
    truth: Simulation,
    *,
    results: Sequence[str],
    expected: Sequence[str],
    turn: int,
) -> str:
    """Verdict of the package's checkers on a user turn; "" if it passed.

    results: of all calls of the model so far. expected: results of the ground truth in this turn.
    """
    checker = _module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    try:
        found = checker.state_checker(model.instances, truth.instances)
    except RecursionError:  # a folder that was moved into itself
        return "multi_turn:instance_state_mismatch"
    if found["valid"]:
        found = checker.response_checker(list(results), list(expected), turn)
    return "" if found["valid"] else str(found["error_type"])


def single_turn_problem(entry: Entry, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Verdict of the package's AST checker on the calls of a single-turn entry; "" if it passed.
    calls: (name as the model wrote it, arguments)."""
    if entry.category in RELEVANCE:
        is_right = bool(calls) == ("irrelevance" not in entry.category)
        return "" if is_right else f"{entry.category}:{'no call' if not calls else 'called'}"
    enums = _module("bfcl_eval.constants.enums")
    output = [{name: copy.deepcopy(dict(arguments))} for name, arguments in calls]
    try:
        found = _ast_checker()(
            copy.deepcopy(list(entry.functions)),
            output,
            copy.deepcopy(list(entry.answer)),
            enums.Language.PYTHON,
            entry.category,
            _MODEL,
        )
    # It assumes the shape of nested arguments; a value that breaks it is a wrong answer.
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if found["valid"] else str(found["error_type"])


@lru_cache
def _ast_checker() -> Callable[..., Mapping[str, Any]]:
    """The package's `ast_checker`. It reads one flag from a table of models, whose import needs the
    clients of all vendors; a table with our one model replaces it during the import."""
    name = "bfcl_eval.constants.model_config"
    table = types.ModuleType(name)
    flags = types.SimpleNamespace(underscore_to_dot=True)  # periods in names became underscores
    table.__dict__["MODEL_CONFIG_MAPPING"] = {_MODEL: flags}
    before = sys.modules.get(name)
    sys.modules[name] = table
    try:
        return _module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def _module(name: str) -> Any:
    require_package()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError.of(
            error.name or name, extra="bfcl", needed_for=f"task=bfcl ({name})"
        ) from error
