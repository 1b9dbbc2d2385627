"""A tree of frozen dataclasses and the dotted overrides, files and help that go with it. No torch.

A configurable thing is a frozen, keyword-only dataclass with a docstring under each field. A choice
between kinds is the type of the value: a field annotated with a union of dataclasses, or with a
base class whose subclasses are the kinds. On the command line and in a file a kind is its tag, made
of the class name (`EmbeddedConfig` is `embedded`, `PPOClip` is `ppo_clip`):

    engine=embedded engine.max_num_sequences=32        {"type": "embedded", "max_num_sequences": 32}

A field annotated `Mapping[str, T]` holds named entries. Each entry is a `T`, which may be a kind:

    task.parts.sums=arithmetic task.parts.sums.digits=3        task.weights.sums=0.5
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import errno
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from functools import cache
from itertools import pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import yaml

from lockstep.errors import ConfigError, LockstepError, SettingError
from lockstep.habits import KINDS, VALUES, hint

T = TypeVar("T")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses of this machine that no other one reaches."""


def resolve(config: T, overrides: Sequence[str]) -> T:
    """`config` with `path.to.field=value` overrides applied, left to right.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     steps: int = 10
    >>> resolve(Run(), ["steps=30"])
    Run(steps=30)

    Raises ConfigError for an unknown key (with the nearest known one), a value of another type, and
    whatever a dataclass' own checks refuse.
    """
    return from_settings(type(config), to_dict(config), overrides)


class _Text(str):
    """A value as the command line spells it. The type of its setting reads it."""


def from_settings(cls: type[T], tree: Mapping[str, Any], overrides: Sequence[str]) -> T:
    """The dataclass `cls` from its JSON form and overrides as in `resolve`.

    It is checked once, with the overrides in it. So a file may be valid only with the settings of a
    command line.
    """
    tree = merged(_defaults(cls), tree)
    given: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not (equals and key):
            raise ConfigError(f"{override!r} is not of the form key=value.{_joined(overrides)}")
        tree = merged(tree, nested({key: _Text(text)}))
        known = flatten(tree)
        lost = [path for path in given if path.startswith(f"{key}.") and path not in known]
        if lost and text.strip() != "none":  # which has no settings that could be lost
            raise ConfigError(
                f"{lost[0]} is given before {override}, which begins with its own defaults. Give "
                "it after that, or leave it out."
            )
        given.append(key)
    return from_dict(cls, tree)


def overlaid(config: T, tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> T:
    """`config` with the settings of a tree, as a file holds them, and with overrides over these. A
    kind may be its tag alone, and a path may be written with dots: {"engine": "vllm",
    "trainer.lr": 1e-6}.

    Raises ConfigError as `resolve` does.
    """
    hints = _hints(type(config))
    plain = {key: _plain(value, hints.get(key)) for key, value in tree.items()}
    return from_settings(type(config), merged(to_dict(config), nested(plain)), overrides)


def nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}: the reverse of `flatten`."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        below = nested(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        for part in reversed(str(key).split(".")):
            below = {part: below}
        _add(out, below)
    return out


def _add(tree: dict[str, Any], more: Mapping[str, Any], path: str = "") -> None:
    for key, value in more.items():
        old = tree.setdefault(key, value)
        if isinstance(old, dict) and isinstance(value, dict) and old is not value:
            _add(cast("dict[str, Any]", old), cast("dict[str, Any]", value), f"{path}{key}.")
        elif old is not value:
            raise ConfigError(
                f"{path}{key} is given twice. Give it once; a kind with settings below it is "
                f"{path}{key}={{type: KIND, ...}}."
            )


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with `changes` over it; another kind begins with its own defaults."""
    out = dict(tree)
    for key, value in changes.items():
        old = _opened(out.get(key)) if isinstance(value, Mapping) else out.get(key)
        if isinstance(old, Mapping):
            below = cast(Mapping[str, Any], old)
            kind = below.get("type")
            if kind is not None and isinstance(value, str) and value != "none":
                value = {"type": value}
            new = cast(Mapping[str, Any], value)
            if isinstance(value, Mapping) and new.get("type", kind) == kind:
                value = merged(below, new)
        out[key] = value
    return out


def _opened(value: Any) -> Any:
    """The mapping of a kind or preset that is given by its name alone, and of a JSON object on the
    command line."""
    if isinstance(value, _Text) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return {"type": value} if isinstance(value, str) else value


def file_form(config: Any, *, always: Sequence[str] = ()) -> str:
    """The YAML text of a file that holds `config`: what differs from the defaults, and `always`."""
    tree = {name: getattr(config, name) for name in always} | changes(config)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def changes(config: Any) -> dict[str, Any]:
    """The tree of the settings that differ from their defaults: what a file needs to say."""
    out, defaults = dict[str, Any](), _defaults(_class(config))
    for name, value in to_dict(config).items():
        if name in defaults and value == defaults[name]:
            continue
        if dataclasses.is_dataclass(below := getattr(config, name)):
            value = {key: value[key] for key in value if key == "type"} | changes(below)
        out[name] = value
    return out


def from_dict(cls: type[T], tree: Mapping[str, Any], *, path: str = "") -> T:
    """The dataclass `cls` from its JSON form, with every key and type checked."""
    try:
        return _from_dict(cls, tree, path)
    except _UnknownSettingError as error:  # settings of other sections may be meant
        error.known += [] if path else _paths(cls)
        raise ConfigError(error.answer()) from None


class _UnknownSettingError(Exception):
    """No setting has the path `where`."""

    def __init__(self, where: str, value: Any, known: list[str]) -> None:
        self.where, self.value, self.known = where, value, known

    def answer(self) -> str:
        """The message, with the settings that may be meant: those beside it come first."""
        (where, value), *_ = flatten({self.where: self.value}).items()
        text = value if isinstance(value, _Text) else ""
        hinted = hint(where, text, self.known)
        if where in self.known and (room := where.rpartition(".")[0]):
            hinted = f" It is one of another {room}: choose that first, as in {room}=KIND."
        elif repr(f"{where}={text}") in hinted:
            hinted = ""
        return f"unknown setting {where!r}.{hinted}"


def _from_dict(cls: type[T], tree: Mapping[str, Any], path: str) -> T:
    hints, fields = _hints(cls), _field_names(cls)
    prefix = f"{path}." if path else ""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key in fields:
            values[key] = _value(hints[key], value, prefix + key)
        elif key != "type":
            raise _UnknownSettingError(prefix + key, value, [prefix + name for name in fields])
    missing = [
        f.name
        for f in dataclasses.fields(cast(Any, cls))
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{path or cls.__name__}: the settings {missing} have no value.")
    try:
        return cls(**values)
    except SettingError as error:
        owner = str(error).partition(".")[0]
        raise ConfigError(str(error).replace(f"{owner}.", prefix)) from None
    except ConfigError as error:
        is_named = str(error).startswith(path)
        raise ConfigError(str(error) if is_named else f"{path}: {error}") from None


def to_dict(config: Any) -> dict[str, Any]:
    """The JSON form; a value of a choice carries its tag under "type"."""
    hints = _hints(_class(config))
    names = _field_names(_class(config))
    return {name: _plain(getattr(config, name), hints[name]) for name in names}


def dumps(config: Any) -> str:
    """The text of a config.json."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping):
            out.update(flatten(cast(Mapping[str, Any], value), path))
        else:
            out[path] = value
    return out


def differences(*trees: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """path -> values of every setting that is not the same in all of these JSON forms; None where
    one has no such setting."""
    flat = [flatten(tree) for tree in trees]
    found = {path: tuple(of.get(path) for of in flat) for each in flat for path in each}
    return {path: values for path, values in found.items() if any(v != values[0] for v in values)}


FILE_FORMS = (".json", ".yaml", ".yml", ".toml")
MAX_FILE_BYTES = 1 << 18
MAX_VALUES, MAX_LEVELS = 100_000, 64
"""Limits of a file of settings. An alias in YAML counts as often as it is used."""
_LONG_PATH = re.compile(rf"""(?m)(?:^|[\[{{,])\s*+(?:[\w"'-]++\s*+\.\s*+){{{MAX_LEVELS}}}""")


def read_tree(path: Path) -> dict[str, Any]:
    """The settings of a JSON, YAML or TOML file, with dotted paths nested. Raises ConfigError if it
    cannot be read, or gives a key twice."""
    form = path.suffix.lstrip(".").upper()
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise ConfigError(f"{size:,} bytes; a file of settings has at most {MAX_FILE_BYTES:,}.")
        text = path.read_text("utf-8")
        tree: Any
        if path.suffix == ".json":
            tree = json.loads(text)
            # JSON without tabs is YAML, and YAML's reader reports lines.
            _check_keys(cast(Any, yaml).compose(text.replace("\t", " ")))
        elif path.suffix == ".toml":  # its own reader refuses a key that is given twice
            if _LONG_PATH.search(text):  # which takes it quadratic time and memory
                raise RecursionError
            tree = tomllib.loads(text)
        else:
            tree = _read_yaml(text)
        if not isinstance(tree, dict):
            raise ConfigError(f"expected settings by name, found {type(tree).__name__}.")
        return nested(cast("dict[str, Any]", tree))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested over {MAX_LEVELS} levels.") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not {form}: {' '.join(str(error).split())}.") from None


class _YamlLoader(yaml.SafeLoader):
    """Reads 1e-6 as a number, as YAML 1.2 does, and leaves a date the text that it is."""


cast(Any, _YamlLoader).yaml_implicit_resolvers = {
    first: [kind for kind in kinds if kind[0] != "tag:yaml.org,2002:timestamp"]
    for first, kinds in cast(Any, yaml.SafeLoader).yaml_implicit_resolvers.items()
}
cast(Any, _YamlLoader).add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read_yaml(text: str) -> Any:
    loader: Any = _YamlLoader(text)
    node = loader.get_single_node()
    _check_keys(node)  # before anything is made of aliases
    return {} if node is None else loader.construct_document(node)


def _check_keys(root: yaml.Node | None) -> None:
    """Raises ConfigError for a key that is given twice, and for more than a file may hold."""
    waiting: list[tuple[yaml.Node, tuple[str | int, ...]]] = [] if root is None else [(root, ())]
    num_values, lines = 0, dict[tuple[str | int, ...], int]()
    while waiting:
        each, path = waiting.pop()
        num_values += 1 if isinstance(each, yaml.ScalarNode) else len(each.value)
        if num_values > MAX_VALUES or len(path) > MAX_LEVELS:
            raise ConfigError(
                f"line {each.start_mark.line + 1}: more than {MAX_VALUES:,} values (aliases written"
                f" out), or nested over {MAX_LEVELS} levels."
            )
        if isinstance(each, yaml.SequenceNode):
            waiting += [(value, (*path, at)) for at, value in enumerate(each.value)]
        elif isinstance(each, yaml.MappingNode):
            for key, value in each.value:
                below, line = (*path, *str(key.value).split(".")), key.start_mark.line + 1
                if below in lines:
                    first, second = sorted((lines[below], line))
                    name = ".".join(map(str, below))
                    text = f"{name} is given twice, first on line {first}."
                    raise ConfigError(f"line {second}: {text}")
                lines[below] = line
                waiting.append((value, below))


def read_json(path: Path, error: type[LockstepError]) -> dict[str, Any]:
    """Reads a JSON object. Raises `error` if the file is missing, torn or something else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise error(
            f"{path} does not exist: {path.parent} is another directory than expected, or a part "
            "of it is missing."
        ) from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem}).") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} cannot be read: it is not JSON ({problem}). A torn copy?") from problem
    if not isinstance(found, dict):
        raise error(f"{path}: expected a JSON object, found {type(found).__name__}.")
    return cast("dict[str, Any]", found)


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """The numbers that a setting may have, in its annotation; None is always allowed.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Draw(Checked):
    ...     top_p: typing.Annotated[float, Interval("(0, 1]")] = 1.0
    >>> Draw(top_p=0.0)
    Traceback (most recent call last):
    lockstep.errors.SettingError: Draw.top_p=0.0 must be in (0, 1].
    """

    text: str
    """As in mathematics: a round bracket leaves its end out. "[1, inf)" has no upper end."""

    def expected(self, value: float) -> str:
        """Describes the interval if `value` is outside of it; else empty."""
        low, high = map(float, self.text[1:-1].split(","))
        is_above = value > low if self.text[0] == "(" else value >= low
        is_below = value < high if self.text[-1] == ")" else value <= high
        if is_above and is_below and math.isfinite(value):
            return ""
        if high < math.inf:
            return f"in {self.text}"
        if low == -math.inf:
            return "a finite number"
        if self.text[0] == "(":
            return f"a finite number above {low:g}"
        return f"{'' if isinstance(value, int) else 'a finite number of '}at least {low:g}"


def at_least(least: float) -> Interval:
    return Interval(f"[{least}, inf)")


ABOVE_0 = Interval("(0, inf)")
FINITE = Interval("(-inf, inf)")


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """The form of a setting's text, or of each of its texts, in its annotation.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Program(Checked):
    ...     args: typing.Annotated[tuple[str, ...], Form("--.+", "--NAME=VALUE each")] = ()
    >>> Program(args=("--seed=1", "fast"))
    Traceback (most recent call last):
    lockstep.errors.SettingError: Program.args=('--seed=1', 'fast') must be --NAME=VALUE each.
    """

    pattern: str
    """A regular expression of the whole text."""
    text: str
    """The form in words."""

    def expected(self, value: str | tuple[str, ...]) -> str:
        """Describes the form if a text has another; else empty."""
        texts, form = (value,) if isinstance(value, str) else value, re.compile(self.pattern, re.S)
        return "" if all(map(form.fullmatch, texts)) else self.text


class Checked:
    """Base of settings with bounds: checks each field that is annotated with an Interval, a Form, a
    Literal or a tuple, and `CONFLICTS`, however the object is made."""

    CONFLICTS: ClassVar[Mapping[str, str]] = {}
    """Settings of the class that exclude each other: `conflicts_in`."""

    def __post_init__(self) -> None:
        limits, choices, tuples = _limits(type(self))
        for name, (size, kind, text) in tuples.items():
            value = cast(Sequence[Any] | None, getattr(self, name))
            is_tuple = isinstance(value, tuple | list) and size in (0, len(value))
            is_right = value is None or (is_tuple and all(isinstance(x, kind) for x in value))
            require(self, **{name: (is_right, text)})
        for name, limit in limits.items():
            value = getattr(self, name)
            expected = "" if value is None else limit.expected(value)
            require(self, **{name: (not expected, expected)})
        for name, annotation in choices.items():
            _value(annotation, getattr(self, name), f"{type(self).__name__}.{name}")
        for problem in conflicts_in(self, self.CONFLICTS, at=f"{type(self).__name__}."):
            raise SettingError(problem)


def require(config: Any, **rules: tuple[bool, str]) -> None:
    """Raises SettingError for the first rule that does not hold. rules: setting -> (whether it
    holds, the text of the rule)."""
    for name, (holds, expected) in rules.items():
        if not holds:
            value = getattr(config, name)
            raise SettingError(f"{_class(config).__name__}.{name}={value!r} must be {expected}.")


_CONDITION = re.compile(r"([\w.]+?)(?:(=|!=|>=|>|\.\*)([\w.-]*))?")


def check_conflicts(config: Any, conflicts: Mapping[str, str]) -> None:
    """Raises ConfigError for settings that exclude each other, as `conflicts_in` finds them.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Run:
    ...     steps: int = 10
    ...     is_tested: bool = False
    >>> check_conflicts(Run(), {"steps>5 with is_tested=false": "test it."})
    Traceback (most recent call last):
    lockstep.errors.ConfigError: steps=10 with is_tested=false: test it.
    """
    for problem in conflicts_in(config, conflicts):
        raise ConfigError(problem)


def conflicts_in(config: Any, conflicts: Mapping[str, str], *, at: str = "") -> Iterator[str]:
    """A message for each of the conflicts that `config` has.

    conflicts: conditions that may not hold together -> the reason and the next step. A condition
    compares an attribute with a value, or with another attribute (`>`, `>=`); `name.*` is a section
    that differs from its defaults. The message begins with the conditions as they are in `config`,
    each after `at`, without those in brackets. A name alone is only shown there.
    """
    for rule, text in conflicts.items():
        shown, _, hidden = rule.removesuffix("]").partition("[")
        words = [word for word in f"{shown} {hidden}".split() if word != "with"]
        if all(_holds(config, condition) for condition in words):
            stated = [w if w == "with" else _stated(config, w, at) for w in shown.split()]
            yield f"{' '.join(stated)}: {text}" if stated else text


def _holds(config: Any, condition: str) -> bool:
    name, sign, value = _parts(condition)
    found = _at(config, name)
    if found is None:
        return (sign, value) == ("=", "none")
    match sign:
        case "=" | "!=":
            return (_written(found) == value) is (sign == "=")
        case ">" | ">=":
            limit = float(value) if value.isdecimal() else _at(config, value)
            return limit is not None and bool(found > limit or (sign == ">=" and found == limit))
        case ".*":
            return bool(found != _class(found)())
        case _:
            return True


def _stated(config: Any, condition: str, at: str) -> str:
    """The settings of a condition, with their values. `chosen_x` is the setting `x`."""
    name, sign, value = _parts(condition)
    shown = at + name.removeprefix("chosen_")
    if sign == ".*":
        return f"{shown}.*"
    if (sign, value) != ("!=", "none"):
        shown += f"={_written(_at(config, name))}"
    is_compared = sign in (">", ">=") and not value.isdecimal()
    return f"{shown} and {_stated(config, value, at)}" if is_compared else shown


def _parts(condition: str) -> tuple[str, str, str]:
    """(path, sign, value) of a condition."""
    match = _CONDITION.fullmatch(condition)
    assert match is not None, f"{condition!r} is no condition"
    return match[1], match[2] or "", match[3] or ""


def _at(config: Any, path: str) -> Any:
    """The attribute at a dotted path; None if a section on the way is not there."""
    for part in path.split("."):
        config = getattr(config, part, None)
    return config


def _written(value: Any) -> str:
    """A value as a setting spells it: a choice by its tag."""
    if dataclasses.is_dataclass(value):
        return tag(_class(value))
    return f"{value:g}" if isinstance(value, float) else _show(value)


def check_key(key: str, *, host: str, where: str) -> None:
    """Raises ConfigError unless `key` may open a server that listens on `host`; "" is none."""
    if host not in LOOPBACK and not key:
        raise ConfigError(
            f"{where} can be reached from other machines, so it needs a key: set LOCKSTEP_KEY. "
            "Without one a server listens on 127.0.0.1 alone."
        )
    if key and (not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError("the server's key must be printable ASCII without spaces.")


def cannot_listen(error: Exception, where: str) -> ConfigError:
    """The error for an address that a server cannot take. where: its settings."""
    is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    hint = " Another program listens there; port=0 takes a free one." if is_taken else ""
    return ConfigError(f"{where}: {getattr(error, 'strerror', None) or error}.{hint}")


def tag(cls: type) -> str:
    """The name of a kind: its own `TAG`, or its class name in words: `EmbeddedConfig` -> embedded,
    `PPOClip` -> ppo_clip."""
    if own := cls.__dict__.get("TAG"):
        return str(own)
    name = cls.__name__.removesuffix("Config")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def choices(annotation: Any) -> dict[str, type]:
    """tag -> class of a choice; empty if the annotation leaves none."""
    classes = [cast(type, m) for m in _union(annotation) if dataclasses.is_dataclass(m)]
    if len(classes) == 1:
        classes = _subclasses(classes[0])
    return {tag(c): c for c in classes}


def describe(config: Any, prefix: str = "") -> Iterable[tuple[str, str, str, str]]:
    """(path, type, value, docstring) of every setting below `config`, for --help."""
    cls = _class(config)
    hints, docs = _hints(cls), field_docs(cls)
    for field in dataclasses.fields(config):
        path, doc = f"{prefix}{field.name}", docs.get(field.name, "")
        yield from _describe_value(hints[field.name], getattr(config, field.name), path, doc)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """field -> the docstring below it, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for field, doc in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
                and isinstance(doc.value.value, str)
            ):
                docs[field.target.id] = " ".join(doc.value.value.split())
    return docs


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: ' Did you mean x?', or a list of the known names."""
    names = list(known)
    name = VALUES.get(name.lower(), name)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(names)}."


# -- mechanism ----------------------------------------------------------------------------------


def _describe_value(
    annotation: Any, value: Any, path: str, doc: str
) -> Iterable[tuple[str, str, str, str]]:
    kinds, inner = choices(annotation), _entry_of(annotation)
    if dataclasses.is_dataclass(value):
        if kinds:
            yield path, " | ".join(kinds), tag(_class(value)), doc
        yield from describe(value, f"{path}.")
    elif choices(inner) and isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value)
        yield f"{path}.NAME", " | ".join(choices(inner)), _show(list(entries)), doc
        for name, entry in entries.items():
            yield from _describe_value(inner, entry, f"{path}.{name}", doc)
    else:
        kind = " | ".join([*kinds, "none"]) if kinds else _name(annotation)
        yield path, kind, _show(value), doc


def _defaults(cls: type) -> dict[str, Any]:
    """The JSON form of the settings that have a default."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, cls)):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is not dataclasses.MISSING:
            out[field.name] = _plain(default, _hints(cls)[field.name])
    return out


_FOREIGN = (date, time, bytes, set)
"""Values of YAML and TOML that JSON does not have."""
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _parse(annotation: Any, text: str, path: str) -> Any:
    """The JSON value that `text` spells, by the field's type; the text itself if it spells none,
    which `_value` refuses."""
    lowered = text.lower()
    for member in _union(annotation):
        origin, inner = typing.get_origin(member) or member, typing.get_args(member)
        is_list, is_json = origin in (tuple, list), text.startswith(("[", "{"))
        if origin is bool and lowered in _WORDS:
            return _WORDS[lowered]
        if origin in (int, float):
            with contextlib.suppress(ValueError):
                return origin(text)
        elif origin is typing.Literal:  # a choice may be a number, which its digits name
            return next((a for a in inner if str(a) == text), text)
        elif is_list and not (is_json and inner and dataclasses.is_dataclass(inner[0])):
            return [_Text(p.strip()) for p in text.strip("[]() ").split(",") if p.strip()]
        elif origin is Any:
            with contextlib.suppress(ValueError):
                return json.loads(
                    {"none": "null"}.get(lowered, lowered if lowered in _WORDS else text)
                )
        elif is_list or origin in (dict, Mapping):
            expected = "a JSON list of objects" if is_list else "a JSON object"
            try:
                return json.loads(text)
            except ValueError as error:
                raise ConfigError(f"{path}: expected {expected} ({error}).") from None
    return text


def _value(annotation: Any, value: Any, path: str) -> Any:
    """A JSON value, or the text of an override, as the annotated type; ConfigError if it is
    another."""
    members, is_text = _union(annotation), isinstance(value, _Text)
    if type(None) in members and (value is None or (is_text and _is_none(value))):
        return None
    if section := _section(annotation, value, path):
        return cast(Any, _from_dict(*section, path))
    if is_text:
        value = _parse(annotation, str(value), path)
    if isinstance(cast(object, value), Mapping):
        tree = cast(Mapping[str, Any], value)
        if (inner := _entry_of(annotation)) is None:
            raise ConfigError(
                f"{path}.{next(iter(tree), '')}: {path} is a {_name(annotation)} and has no "
                "settings below."
            )
        return {
            name: _value(inner, entry, f"{path}.{name}")
            for name, entry in tree.items()
            if inner is str or not (isinstance(entry, _Text) and _is_none(entry))
        }
    for member in members:
        origin, inner = typing.get_origin(member) or member, typing.get_args(member)
        if origin is Any and not isinstance(cast(object, value), _FOREIGN):
            return value
        if origin is typing.Literal:
            if value in inner:
                return value
            known = [str(i) for i in inner]
            raise ConfigError(f"{path}={value}: not one of them.{did_you_mean(str(value), known)}")
        if origin in (tuple, list) and isinstance(cast(object, value), list | tuple):
            values = _values(origin, inner, list(cast(Sequence[Any], value)), path)
            return tuple(values) if origin is tuple else list(values)
        if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if origin in (bool, int, str) and type(value) is origin:
            return value
    text, is_whole = str(value), r"\d+(\.0+)?(e\d)?"
    is_number = int in members and re.fullmatch(is_whole, text)
    whole = f" Write {path}={float(text):.0f}." if is_number else ""
    if isinstance(cast(object, value), date | time):
        whole = " Write it in quotes."
    raise ConfigError(
        f"{path}: expected {_name(annotation)}, found {value!r} ({type(value).__name__}).{whole}"
    )


def _is_none(text: str) -> bool:
    return text.lower() in ("none", "null")


def _values(origin: type, inner: Sequence[Any], found: Sequence[Any], path: str) -> Iterable[Any]:
    """The entries of a list or tuple, each as its annotated type."""
    is_fixed = origin is tuple and inner and inner[-1] is not ...
    if is_fixed and len(inner) != len(found):
        raise ConfigError(f"{path}: expected {len(inner)} values, found {found}.")
    kinds = inner if is_fixed else [inner[0] if inner else Any] * len(found)
    for at, (kind, value) in enumerate(zip(kinds, found, strict=True)):
        yield _value(kind, value, f"{path}[{at}]")


def _section(annotation: Any, value: Any, path: str) -> tuple[type, Mapping[str, Any]] | None:
    """(dataclass, its settings) of a value that a dataclass holds; None for other annotations."""
    found = [member for member in _union(annotation) if dataclasses.is_dataclass(member)]
    if not found:
        return None
    cls, kinds, is_named = cast(type, found[0]), choices(annotation), isinstance(value, str)
    value = {"type": value} if is_named else value
    if not isinstance(value, Mapping):
        raise _has_settings(cls, path)
    tree = cast(Mapping[str, Any], value)
    name, presets = tree.get("type"), {} if kinds else getattr(cls, "PRESETS", {})
    if kinds and name is None:
        if len(kinds) > 1:
            raise ConfigError(
                f"{path}.{next(iter(tree), 'type')}: {path} has no kind. Choose one before its "
                f"settings: {' | '.join(f'{path}={kind}' for kind in kinds)}."
            )
        return next(iter(kinds.values())), tree
    if name is None:
        return cls, tree
    if kinds or presets:
        if name in kinds:
            return kinds[name], tree
        if name in presets:
            return cls, {**to_dict(presets[name]()), **tree}
        meant = KINDS.get(f"{path}={name}")
        near = f" Did you mean {meant!r}?" if meant else did_you_mean(name, kinds or presets)
        raise ConfigError(f"{path}={name}: no such {'kind' if kinds else 'preset'}.{near}")
    if _field_names(cls):
        raise (
            _has_settings(cls, path)
            if is_named
            else ConfigError(f"unknown setting '{path}.type': {path} has one kind.")
        )
    raise ConfigError(
        f"{path}.type={name}: no kind of {cls.__name__} is known here. Import the module that "
        "has it (lockstep.recipes brings the built-in ones; --plugin)."
    )


def _has_settings(cls: type, path: str) -> ConfigError:
    below = ", ".join(f"{path}.{name}" for name in _field_names(cls))
    return ConfigError(f"{path} has settings below it; give one of them: {below}.")


def _plain(value: Any, annotation: Any = Any) -> Any:
    """The JSON form of a value of `annotation`: a kind carries its tag."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {"type": tag(_class(value))} if choices(annotation) else {}
        return own | to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in cast(Sequence[Any], value)]
    if isinstance(value, Mapping):
        inner = _entry_of(annotation)
        return {k: _plain(v, inner) for k, v in cast(Mapping[str, Any], value).items()}
    return value


def _paths(cls: type) -> list[str]:
    """The dotted paths of all settings that a `cls` can have, of every kind."""
    out: list[str] = []
    for name, annotation in _hints(cls).items():
        members = cast(list[type], [*choices(annotation).values(), *_union(annotation)])
        below = [f"{name}.{p}" for m in members if dataclasses.is_dataclass(m) for p in _paths(m)]
        out += [name, *below] if name in _field_names(cls) else []
    return list(dict.fromkeys(out))


def _show(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return json.dumps(_plain(value))
    if isinstance(value, tuple | list):
        return ",".join(_show(v) for v in cast(Sequence[Any], value))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _field_names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cast(Any, cls))]


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _limits(cls: type) -> tuple[dict[str, Interval | Form], dict[str, Any], dict[str, Any]]:
    """(field -> its Interval or Form, field -> its annotation with a Literal, field of a tuple ->
    its length, or 0 for any, the class of its values and its annotation in words). A field that a
    subclass declares again keeps its Interval or Form."""
    limits: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in typing.get_type_hints(base, include_extras=True).items():
            for part in typing.get_args(annotation):
                if isinstance(part, Interval | Form):
                    limits[name] = part
    choices = {
        name: _hints(cls)[name] for name in _field_names(cls) if _has_literal(_hints(cls)[name])
    }
    tuples: dict[str, Any] = {}
    for name in _field_names(cls):
        for member in _union(_hints(cls)[name]):
            if typing.get_origin(member) is tuple and name not in choices:
                kind, *rest = typing.get_args(member)
                kind = {float: Real, int: Integral}.get(kind, kind)
                kind = kind if isinstance(kind, type) else object
                tuples[name] = 0 if rest == [...] else 1 + len(rest), kind, f"a {_name(member)}"
    return limits, choices, tuples


def _has_literal(annotation: Any) -> bool:
    is_literal = typing.get_origin(annotation) is typing.Literal
    return is_literal or any(map(_has_literal, typing.get_args(annotation)))


def _union(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _joined(words: Sequence[str]) -> str:
    """A hint for `steps = 10`, `steps =10` and `steps: 10`."""
    for name in words:
        if name.endswith(".py"):
            return f" A file with code of your own is --plugin {name}."
    joined = re.search(r"([\w.]+)\s*[=:]\s*(\S+)", " ".join(words))
    return f" Settings are written without spaces: {joined[1]}={joined[2]}." if joined else ""


def _entry_of(annotation: Any) -> Any:
    """The annotation of a mapping's entries; None if it is no mapping."""
    for member in _union(annotation):
        if member is Any:
            return Any
        if (typing.get_origin(member) or member) in (dict, Mapping):
            arguments = typing.get_args(member)
            return arguments[1] if arguments else Any
    return None


def _class(value: object) -> type:
    return value.__class__


def _subclasses(cls: type) -> list[type]:
    """All subclasses, except bases: they have an IS_BASE of their own, or a name that begins with
    an underscore."""
    out: list[type] = []
    for sub in cls.__subclasses__():
        is_base = sub.__name__.startswith("_") or "IS_BASE" in sub.__dict__
        out += [*([] if is_base else [sub]), *_subclasses(sub)]
    return out


def _name(annotation: Any) -> str:
    members = _union(annotation)
    if len(members) > 1:
        return " | ".join(_name(m) for m in members)
    if annotation is type(None):
        return "none"
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(a) for a in typing.get_args(annotation))
    inner = typing.get_args(annotation)
    name = getattr(annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(_name(i) for i in inner if i is not ...)}]" if inner else name
