"""Custom losses that a client has traced with torch.fx and uploaded, rebuilt from an allow-list.

The upload is data: nodes that name a function or method, with arguments that are numbers, names and
references to earlier nodes. Each name is looked up in the tables below; nothing is evaluated,
imported or read by attribute. What is not in the tables is refused when the loss is created, with
the name of its node. A run is bounded in the elements of each result and in time.

A loss is called once per datum, with the log-probs of its target_tokens and the inputs that it
names, and returns a number and metrics.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.fx.node import map_aggregate

from lockstep.agent.json_schema import mismatch
from lockstep.objectives.losses import TokenBatch
from lockstep.tables import tables_beside
from lockstep.tinker.losses import Sums, wrong_input
from lockstep.tinker.requests import TARGETS, Datum, TinkerError, invalid

Tensor = torch.Tensor
Function = Callable[..., Any]

LOGPROBS = "logprobs"

MAX_NODES = 1000
MAX_INPUTS = 16  # as the client has it
MAX_ARGUMENTS = 10_000  # values in the arguments of all nodes
MAX_DEPTH = 8  # lists in lists in the arguments of one node
MAX_ELEMENTS = 1 << 24  # of one result: 64 MB in float32
MAX_TOTAL = 1 << 28  # elements of all results of one datum: they live until backward has read them
MAX_SECONDS = 10.0  # of the thread, for one datum; checked between nodes
MAX_INTEGER = 1 << 62

# -- what a graph may call -------------------------------------------------------------------------

_TABLES = tables_beside(__file__)
_SCHEMA: Mapping[str, Any] = _TABLES.pop("upload")
_NAMES: Mapping[str, Sequence[str]] = {table: names.split() for table, names in _TABLES.items()}


def _named(prefix: str, owner: Any, *tables: str) -> dict[str, Function]:
    """The functions of some tables by name. Leaves out names that the owner lacks: a function may
    have no method of its name."""
    every = [name for table in tables for name in _NAMES[table]]
    return {f"{prefix}{name}": getattr(owner, name) for name in every if hasattr(owner, name)}


_SHARED = ("elementwise", "reducing", "shaping", "gathering")

FUNCTIONS: dict[str, Function] = {
    **_named("torch.", torch, *_SHARED, "creating"),
    **_named("torch.nn.functional.", F, "functional"),
    **_named("torch.special.", torch.special, "special"),
    **_named("math.", math, "math"),
    **_named("operator.", operator, "operators"),
    # torch.fx names some by the module that implements them.
    "torch._C._nn.gelu": F.gelu,
    "torch._C._nn.softplus": F.softplus,
    "torch._C._nn.log_sigmoid": F.logsigmoid,
    **_named("torch._C._special.special_", torch.special, "special"),
    "torch._C._linalg.linalg_norm": torch.linalg.norm,
    "torch.functional.norm": torch.norm,
}
METHODS: dict[str, Function] = _named("", Tensor, *_SHARED, "methods")
ATTRIBUTES: dict[str, Function] = {
    "shape": lambda x: tuple(x.shape),
    "ndim": lambda x: x.ndim,
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "T": lambda x: x.t(),
}
"""Attributes of a tensor that a graph may read; torch.fx records them as calls of getattr."""
DTYPES = {name: getattr(torch, name) for name in _NAMES["dtypes"]}
# Results that may be larger than their broadcast arguments.
_SIZED = {*_NAMES["gathering"], *_NAMES["creating"], "new_full", "new_ones", "new_zeros", "pad"}
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")


# -- a rebuilt loss --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ref:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    target: str
    function: Function
    args: list[Any]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name} ({self.target})"


class GraphLoss:
    """A loss that a client uploaded, with the methods of `losses.Loss`.

    >>> loss = GraphLoss("nll", [{"name": "logprobs", "rank": 1}], {"format": 1, "nodes": [
    ...     {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    ...     {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "logprobs"}]},
    ...     {"op": "call_function", "name": "n", "target": "operator.neg", "args": [{"ref": "s"}]},
    ...     {"op": "output", "name": "output", "target": "output", "args": [
    ...         {"tuple": [{"ref": "n"}, {"dict": {"custom/nll:sum": {"ref": "n"}}}]}]},
    ... ]})
    >>> loss(torch.tensor([-0.5, -0.25]), {})
    (tensor(0.7500), {'custom/nll:sum': tensor(0.7500)})
    """

    def __init__(
        self, name: str, inputs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any]
    ) -> None:
        """inputs, graph: as `create_custom_loss` has them. Raises TinkerError naming the node that
        is not allowed."""
        self.name = name
        if problem := mismatch({"inputs": inputs, "graph": graph}, _SCHEMA, "upload"):
            raise self._error(f"{problem.removeprefix('upload.')}.")
        self.ranks = self._read_inputs(inputs)
        """Input -> dimensions that each datum's value has; `logprobs` comes first."""
        self._num_values = 0
        self._nodes: list[_Node] = []
        self._read_nodes(graph["nodes"])

    def check(self, index: int, datum: Datum) -> None:
        """Raises TinkerError unless the datum has each input with its declared rank. The log-probs
        have the rank of its target_tokens."""
        num_dims = datum.inputs[TARGETS].ndim
        if (rank := self.ranks[LOGPROBS]) != num_dims:
            text = f"it has {num_dims} dimensions, and the loss {self.name} declared logprobs with "
            raise wrong_input(index, TARGETS, f"{text}rank {rank}")
        for name, rank in [*self.ranks.items()][1:]:
            values = datum.inputs.get(name)
            if values is None or values.ndim != rank:
                found = "it is missing" if values is None else f"it has {values.ndim} dimensions"
                text = f"{found}, and the loss {self.name} declared it with rank {rank}"
                raise wrong_input(index, name, text)

    def columns_of(self, data: Sequence[Datum]) -> dict[str, npt.NDArray[np.float32]]:
        """None: each datum is read by itself, as its inputs may have any shape."""
        return {}

    def is_live(self, columns: Mapping[str, Tensor], *, like: Tensor) -> Tensor:
        """[M] bool, all True."""
        return torch.ones_like(like, dtype=torch.bool)

    def summed(self, tokens: TokenBatch, data: Mapping[int, Datum], totals: Sums) -> Tensor:
        """[] the sum over whole datums, by their numbers in the request."""
        totals.add("tokens:sum", torch.ones_like(tokens.logprobs))
        total = tokens.logprobs.new_zeros(()).cpu()  # its tensors are small, its operations many
        targets = [datum.inputs[TARGETS] for datum in data.values()]
        parts = tokens.logprobs.cpu().split([each.size for each in targets])
        for (index, datum), of_datum in zip(data.items(), parts, strict=True):
            shape = datum.inputs[TARGETS].shape
            found, metrics = self(of_datum.view(shape), datum.inputs, index=index)
            total = total + found
            for name, value in ({"loss:sum": found} | metrics).items():
                totals.add(name, value)
        return total

    def __call__(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, npt.NDArray[Any]],
        *,
        index: int = 0,
        max_seconds: float = MAX_SECONDS,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss [], metrics [] each) of one datum. index: its number, for errors."""
        given = {name: torch.from_numpy(np.array(inputs[name])) for name in [*self.ranks][1:]}
        given[LOGPROBS] = logprobs
        values: dict[str, Any] = {node: given[name] for node, name in self._placeholders.items()}
        # The first operation without memory imports much of torch, for seconds: before the clock.
        _ = torch.zeros((), device="meta") + 0
        # Seconds of this thread: a busy machine is not the graph's fault.
        deadline, num_elements = time.thread_time() + max_seconds, 0
        for node in self._nodes:
            try:
                result = values[node.name] = _call(node, values)
                num_elements += sum(x.numel() for x in _leaves(result) if isinstance(x, Tensor))
                _check_size(num_elements, MAX_TOTAL)
            except Exception as error:
                raise self._error(f"node {node} fails on datum {index}: {error}") from error
            if time.thread_time() > deadline:
                text = f"it ran longer than {max_seconds:g} s on datum {index}, up to node {node}."
                raise self._error(text)
        outputs = {name: values[node] for name, node in self._output.items()}
        for name, value in outputs.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                found = list(value.shape) if isinstance(value, Tensor) else repr(value)
                text = f"its {name or 'loss'} of datum {index} is {found}"
                raise self._error(f"{text}; expected a tensor of one element.")
        loss = outputs.pop("").reshape(())
        return loss, {name: value.detach().reshape(()) for name, value in outputs.items()}

    # -- reading ----------------------------------------------------------------------------------

    def _read_inputs(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        ranks = {entry["name"]: entry["rank"] for entry in inputs}
        are_names = len(ranks) == len(inputs) and all(map(_INPUT_NAME.fullmatch, ranks))
        is_few = 0 < len(ranks) <= MAX_INPUTS
        if not (are_names and is_few and next(iter(ranks)) == LOGPROBS and ranks[LOGPROBS]):
            raise self._error(
                f"its inputs are {[*inputs]}; expected 1 to {MAX_INPUTS} with different names in "
                "lowercase, first logprobs, with the rank 1 or 2."
            )
        return ranks

    def _read_nodes(self, nodes: Sequence[Any]) -> None:
        self._placeholders: dict[str, str] = {}
        """Node -> the input that it holds."""
        self._output: dict[str, str] = {}
        """Metric -> its node; the loss is named ""."""
        known: set[str] = set()
        if not 0 < len(nodes) <= MAX_NODES:
            raise self._error(f"its graph has {len(nodes)} nodes; expected 1 to {MAX_NODES}.")
        for node in nodes:
            op, name, target = node["op"], node["name"], node["target"]
            where = f"node {name}"
            if name in known or self._output:
                raise self._error(f"{where} has the name of another, or follows the output.")
            args = [self._read(arg, where, known) for arg in node.get("args", [])]
            kwargs = {k: self._read(arg, where, known) for k, arg in node.get("kwargs", {}).items()}
            if op == "placeholder":
                self._placeholders[name] = target
            elif op == "output":
                self._output = self._read_output(args)
            else:
                self._nodes.append(self._read_call(where, node, args, kwargs))
            known.add(name)
        if list(self._placeholders.values()) != list(self.ranks):
            raise self._error(
                f"its graph reads {list(self._placeholders.values())} and declares the inputs "
                f"{list(self.ranks)}."
            )
        if not self._output:
            raise self._error("its graph has no output.")

    def _read_call(
        self, where: str, node: Mapping[str, Any], args: list[Any], kwargs: dict[str, Any]
    ) -> _Node:
        op, target = node["op"], node["target"]
        function: Function | None = None
        if op == "call_function" and target in ("getattr", "builtins.getattr"):
            name = args[1] if len(args) == 2 and not kwargs else None
            function = ATTRIBUTES.get(name) if isinstance(name, str) else None
            target, args = f"getattr {name!r}", args[:1]
        elif op == "call_function":
            function = FUNCTIONS.get(target)
        elif op == "call_method":
            function = METHODS.get(target)
        if function is None:
            raise self._error(
                f"{where}: {op} of {target} is not among the operations that this server runs. Use "
                "arithmetic, comparisons, reductions and indexing of torch."
            )
        if unknown := sorted(set(kwargs) - set(_NAMES["keywords"])):
            raise self._error(f"{where} ({target}): the keyword {unknown[0]!r} is not allowed.")
        return _Node(name=node["name"], target=target, function=function, args=args, kwargs=kwargs)

    def _read_output(self, args: list[Any]) -> dict[str, str]:
        match args:
            case [[_Ref(loss), dict(metrics)] | (_Ref(loss), dict(metrics))]:
                pass
            case _:
                raise self._error("its output must be (loss, metrics): a node, a dict of nodes.")
        for name, value in metrics.items():
            if not _METRIC_NAME.fullmatch(name) or not isinstance(value, _Ref):
                raise self._error(
                    f"its metric {name!r} must be a node, named custom/NAME:sum or "
                    "custom/NAME:mean in lowercase."
                )
        return {"": loss} | {name: value.name for name, value in metrics.items()}

    def _read(self, arg: Any, where: str, known: set[str], depth: int = 0) -> Any:
        """An argument as a Python value; nodes are `_Ref`s."""
        self._num_values += 1
        if self._num_values > MAX_ARGUMENTS or depth > MAX_DEPTH:
            raise self._error(
                f"{where}: the arguments of a graph may have {MAX_ARGUMENTS} values, nested "
                f"{MAX_DEPTH} deep."
            )

        def read(inner: Any) -> Any:
            return self._read(inner, where, known, depth + 1)

        if isinstance(arg, bool | str | None) or (isinstance(arg, float) and math.isfinite(arg)):
            return arg
        if isinstance(arg, int) and abs(arg) <= MAX_INTEGER:
            return arg
        if isinstance(arg, list):
            return [read(inner) for inner in arg]
        entries = [*arg.items()] if isinstance(arg, dict) else []
        match entries:
            case [("ref", str(name))] if name in known:
                return _Ref(name)
            case [("tuple", list(values))]:
                return tuple(read(inner) for inner in values)
            case [("dict", dict(values))]:
                return {str(key): read(inner) for key, inner in values.items()}
            case [("slice", [start, stop, step])]:
                return slice(read(start), read(stop), read(step))
            case [("ellipsis", _)]:
                return ...
            case [("float", "inf" | "-inf" | "nan" as text)]:
                return float(text)
            case [("dtype", str(name))] if name in DTYPES:
                return DTYPES[name]
            case [("device", "cpu")]:
                return torch.device("cpu")
        raise self._error(
            f"{where} has the argument {str(arg)[:80]!r}; expected a number, a text, an earlier "
            "node, a list, tuple, dict or slice of these, or a dtype."
        )

    def _error(self, text: str) -> TinkerError:
        return invalid(f"custom loss {self.name!r}: {text}")


# -- running ---------------------------------------------------------------------------------------


def _call(node: _Node, values: Mapping[str, Any]) -> Any:
    """The result of a node. Raises ValueError before it takes too much memory."""
    args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
    tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
    is_index, is_sized = node.function is operator.getitem, node.target.split(".")[-1] in _SIZED
    _check_python(node, args, kwargs, tensors)
    _check_size(math.prod(_broadcast([x.shape for x in tensors])))
    if is_sized or (is_index and any(x.dtype != torch.bool for x in tensors[1:])):
        # The shape is found on the meta device, without memory.
        device = {"device": "meta"} if "device" in kwargs or not tensors else {}
        _check_result(node.function(*_on_meta(args), **_on_meta(kwargs) | device))
    result = node.function(*args, **kwargs)
    _check_result(result)
    return result


def _check_python(
    node: _Node, args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor]
) -> None:
    """Keeps Python's own arithmetic to numbers: its integers and sequences grow without limit."""
    if node.target.startswith(("operator.", "math.")) and node.function is not operator.getitem:
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Tensor | bool | int | float):
                raise ValueError(f"it is called with {str(value)[:40]!r}, which is no number")
    if tensors:
        return
    is_whole = all(isinstance(x, int) for x in _leaves(args))
    if node.target == "operator.pow" and is_whole:
        raise ValueError("a power of integers; make one of them a float")
    if node.target == "torch.arange" and not is_whole:
        raise ValueError("arange takes integers only")


def _check_result(result: Any) -> None:
    for value in _leaves(result):
        if isinstance(value, Tensor):
            _check_size(value.numel())
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"an integer is beyond {MAX_INTEGER}")
        elif not isinstance(value, bool | int | float | torch.dtype | torch.device | None):
            raise ValueError(f"its result is a {type(value).__name__}")


def _check_size(num_elements: int, limit: int = MAX_ELEMENTS) -> None:
    if num_elements > limit:
        raise ValueError(f"its result has {num_elements} elements; {limit} are allowed")


def _broadcast(shapes: Sequence[torch.Size]) -> Sequence[int]:
    """The shape that all broadcast to; the longest in each dim if they do not."""
    width = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (width - len(shape)) + tuple(shape) for shape in shapes]
    return [max(sizes) for sizes in zip(*padded, strict=True)]


def _filled(arg: Any, values: Mapping[str, Any]) -> Any:
    """The argument with its references replaced."""
    return map_aggregate(arg, lambda x: values[str(x.name)] if isinstance(x, _Ref) else x)


def _on_meta(arg: Any) -> Any:
    """Replaces tensors by tensors of the same shape that take no memory."""
    return map_aggregate(arg, lambda x: x.to("meta") if isinstance(x, Tensor) else x)


def _leaves(arg: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(arg, found.append)
    return found
