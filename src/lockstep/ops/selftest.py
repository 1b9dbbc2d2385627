"""Tests at start whether this machine keeps the contract for a model, on the model's own shapes.

A short forward of the model is recorded. Then each op gets the same rows in other batches: alone,
few, many, at other places, on one thread, in inference mode as in the engine. Attention gets the
same positions through a paged cache. Any bit that changes is a failure, reported with the op and
the shape. Composed ops are compared with their parts. On a CPU the row quantum is raised until
nothing changes; on a GPU all products take one tile if two tiles do not agree.

Cost: a forward over some 300 tokens (1100 on a GPU) and a few more calls of each op; a second for
small models.

# T tokens  H query heads  G key heads  D head width  E experts  R token-expert pairs
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lockstep.ops import onednn
from lockstep.ops.base import Ops
from lockstep.ops.chunks import States, StateStep
from lockstep.ops.context import KEY_BLOCK, SPLIT_KEYS, AttentionSpec, PackedContext, PagedContext
from lockstep.ops.contract import CHUNK, COVERED_DTYPES, Fingerprint
from lockstep.ops.invariant import InvariantOps, Packing, Rules

Tensor = torch.Tensor

LARGEST_QUANTUM = 32
PACKINGS = (
    Packing(torch.bfloat16),
    Packing(torch.bfloat16, onednn.MANY_ROWS),
    Packing(torch.float32),
)
"""Ways to pack a weight, the fastest first."""
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 64, 65, 127)
MANY_ROWS = 2048  # as in a packed batch; tried where it costs little
MANY_ROWS_MULTIPLIES = {False: 1 << 30, True: 1 << 42}
"""Most multiplications of MANY_ROWS: a tenth of a second on one core, or on a GPU (True)."""
EXPERT_ROWS = {False: 2 * KEY_BLOCK, True: 1032}
"""Rows per expert, more than any path for few takes: on a GPU (True) as in a chunk of training."""
ROW_LENGTHS = (2 * KEY_BLOCK + 9, 40)  # of the two rows of the recorded forward
GPU_ROW_LENGTHS = (2 * SPLIT_KEYS + 9, 40)  # so that attention combines splits
NUM_GROUPS = 5  # adapters of one shape that are multiplied at once
MAX_FORWARD_MULTIPLIES = 1 << 34  # a second on one core: longer forwards are shortened

FIRST_ONLY = ("linear", "rms_norm", "swiglu", "geglu", "route", "route_by_sigmoid", "log_softmax")
ROWWISE = dict.fromkeys(FIRST_ONLY, (0,)) | {"rope": (0, 1, 2), "combine": (0, 1)}
"""op -> the positions of its arguments that have a row per token."""
COMPOSED = {"norm_linear": (0,), "norm_swiglu": (0,), "add_linear": (0, 1), "rotary_attention": ()}
"""Like ROWWISE, of ops that a backend may compute at once; each is `Ops`' own composition."""
PRODUCTS = {"linear", "expert_linear", "norm_linear", "norm_swiglu", "add_linear"}
STATEFUL = {"delta_rule": range(5), "short_conv": range(1)}
"""op that reads a sampler's states -> its arguments with a row per token."""
WATCHED = {*ROWWISE, *COMPOSED, *STATEFUL, "expert_linear", "attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of the self-test."""

    ops: Ops
    """Ops that keep the contract; stock `Ops` if none do."""
    failure: str
    """The op and the shape that broke; empty if the contract is kept."""
    num_checks: int
    seconds: float

    @property
    def is_kept(self) -> bool:
        return not self.failure


def prove(model: Any, *, ops: Ops | None = None) -> Proof:
    """Looks for ops that keep the contract for `model`, a `models.decoder.Decoder`, on its device
    and in its dtype.

    ops: candidates; None takes the device's. Leaves the model's ops and the thread count as they
    were.
    """
    began = time.perf_counter()
    weight = model.head
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype not in COVERED_DTYPES:
        failure = f"dtype {dtype} is not covered; covered are {', '.join(COVERED_DTYPES)}"
        return Proof(ops=Ops(), failure=failure, num_checks=0, seconds=0.0)
    num_checks, before, threads = 0, model.ops, torch.get_num_threads()
    try:
        model.ops = ops = ops or _ops_of(model)
        while True:
            op, failure, count = first_failure(model)
            num_checks += count
            if not failure or not _change_rules(ops, op):
                break
    except Exception as error:
        # A package that is missing, a switch that forbids it, a kernel that this device cannot
        # build or launch: whatever it is, these ops are not to be trained with.
        failure = f"{type(error).__name__}: {error}"
    finally:
        model.ops = before
        torch.set_num_threads(threads)
    return Proof(
        ops=Ops() if failure or ops is None else ops,
        failure=failure,
        num_checks=num_checks,
        seconds=time.perf_counter() - began,
    )


def _ops_of(model: Any) -> Ops:
    weight = model.head
    if weight.device.type == "cpu":
        shapes = [(*p.shape[-2:],) for p in (weight, *model.parameters())]
        return InvariantOps(Rules(packed=find_packings(shapes, weight.dtype)))
    from lockstep.ops.cuda import CudaOps

    return CudaOps()


def _change_rules(ops: Ops, failed: str) -> bool:
    """Changes the rules so that they may help; False if none is left that could."""
    if not isinstance(ops, InvariantOps):
        return failed in PRODUCTS and ops.take_one_tile()
    rules = ops.rules
    if rules.packed and failed in PRODUCTS:
        rules = replace(rules, packed={})
    elif failed == "attention" and rules.key_quantum < KEY_BLOCK:
        rules = replace(rules, key_quantum=KEY_BLOCK)
    elif failed in ("attention", "delta_rule"):
        rules = replace(rules, head_quantum=2 * rules.head_quantum)
    else:
        rules = replace(rules, row_quantum=2 * rules.row_quantum)
    if rules == ops.rules or max(rules.row_quantum, rules.head_quantum) > LARGEST_QUANTUM:
        return False
    ops.rules = rules
    return True


# -- the recorded forward -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def describe(self) -> str:
        tensors = [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor)]
        shapes = " x ".join(str(list(t.shape)) for t in tensors[:3])
        threads = f", {torch.get_num_threads()} threads" if tensors[0].device.type == "cpu" else ""
        return f"{str(tensors[0].dtype).removeprefix('torch.')} {shapes}{threads}"


class _Recorder:
    """Ops that keep one call of each op and shape."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.calls: dict[Any, _Call] = {}

    def __getattr__(self, name: str) -> Any:
        # A composed op is taken apart, so that its parts are recorded too.
        function = (
            partial(getattr(Ops, name), self) if name in COMPOSED else getattr(self._ops, name)
        )
        return partial(self._run, name, function) if name in WATCHED else function

    def _run(self, op: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        spec = next((a for a in args if isinstance(a, AttentionSpec)), None)
        kind = None if spec is None else (spec.window, spec.sinks is None)
        key = (op, tuple(t.shape[1:] for t in (*tensors, first)), kind)
        self.calls.setdefault(key, _Call(op, args, kwargs))
        return out


def _record(model: Any) -> tuple[list[_Call], Tensor]:
    """One call of each op and shape, and the hidden states [T, D]."""
    config, device, ops = model.config, model.head.device, model.ops
    size = sum(p.numel() for p in model.parameters())
    wanted, longest = GPU_ROW_LENGTHS, config.max_positions
    if not ops.reads_work(device):
        wanted = ROW_LENGTHS
        longest = min(longest, max(MAX_FORWARD_MULTIPLIES // size, KEY_BLOCK + 9))
    lengths = [min(length, longest) for length in wanted]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (sum(lengths),), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    recorder = _Recorder(ops)
    model.ops = recorder
    try:
        with torch.no_grad():
            hidden = model(ids, positions, PackedContext.of(lengths, device=device))
    finally:
        model.ops = ops
    return list(recorder.calls.values()), hidden


# -- the checks -----------------------------------------------------------------------------------


def first_failure(model: Any) -> tuple[str, str, int]:
    """(first of the model's ops that is not invariant, its shapes in words, checks made); the first
    two are empty if all are invariant."""
    ops = model.ops
    calls, hidden = _record(model)
    with torch.no_grad():
        logits = model.logits(hidden)
        sampled = ops.log_softmax(logits)
        ids = sampled.argmax(-1)
        trained, _ = model.log_probs(hidden, ids)
    of_head = [_Call("linear", (hidden, model.head), {}), _Call("log_softmax", (logits,), {})]
    failed, where, count = _first_failure(ops, [*calls, *of_head])
    if failed:
        return failed, where, count
    if not torch.equal(trained, sampled.gather(1, ids[:, None])[:, 0]):
        return "log_probs", "log_probs: differs from the sampler's log_softmax", count
    for call in [*calls, *of_head]:
        if call.op == "linear":
            ops.learn_library(call.args[1])
    return "", "", count + 1


def adapter_failure(
    ops: Ops, shapes: Iterable[Sequence[int]], *, dtype: torch.dtype, device: torch.device
) -> str:
    """The first shape whose products are not invariant, in words; empty if all are.

    shapes: of an adapter's factors, [N, K] or, for experts, [E, N, K]. In addition to the tests of
    a model's products, several factors of one shape are multiplied at once, as for a batch whose
    rows have different adapters.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator) - 0.5).to(dtype).to(device)

    calls: list[_Call] = []
    for shape in dict.fromkeys(tuple(shape) for shape in shapes):
        x, weight = draw(sum(ROW_LENGTHS), shape[-1]), draw(*shape)
        if len(shape) == 2:
            calls += [_Call("linear", (x, weight), {}), _Call("grouped", (x, weight), {})]
        else:
            counts = [len(x), *[0] * (shape[0] - 1)]
            calls.append(_Call("expert_linear", (x, weight, None, counts), {}))
            calls.append(_Call("expert_linear", (x, weight.repeat(NUM_GROUPS, 1, 1), None, []), {}))
    return _first_failure(ops, calls)[1]


def find_packings(
    shapes: Iterable[tuple[int, ...]], dtype: torch.dtype
) -> dict[tuple[int, ...], Packing]:
    """How the GEMMs of weights of these shapes [N, K] and this dtype may read them packed: the
    first of `PACKINGS` that is invariant. Shapes for which none is are left out."""
    is_native = dtype == torch.bfloat16 and onednn.has_bfloat16()
    usable = [p for p in PACKINGS if is_native or p.dtype == torch.float32]

    def is_invariant(shape: tuple[int, ...], packing: Packing) -> bool:
        call = _Call("linear", _cancelling(sum(ROW_LENGTHS), shape[0], shape[1], packing.dtype), {})
        return not any(_row_checks(InvariantOps(Rules(packed={shape: packing})), call))

    wide = filter(onednn.is_packable, dict.fromkeys(shapes))
    found = {s: next((p for p in usable if is_invariant(s, p)), None) for s in wide}
    return {shape: packing for shape, packing in found.items() if packing is not None}


def _cancelling(
    num_rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x [T, K] and a weight [N, K]. Each term of x W^T has its negative at another place of the
    sum, and terms differ by powers of two: what is left is the sum's own rounding, which results
    in bfloat16 would hide otherwise."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> Tensor:
        power = torch.randint(-6, 7, (rows, inputs // 2), generator=generator)
        return torch.randn(rows, inputs // 2, generator=generator).ldexp(power).to(dtype)

    place = torch.randperm(inputs, generator=generator)
    half, least = draw(num_rows), draw(min(outputs, 1024))
    rows = least.repeat(-(-outputs // len(least)), 1)[:outputs]
    x, weight = torch.cat([half, -half], 1), torch.cat([rows, rows], 1)
    x, weight = (F.pad(m, (0, inputs % 2))[:, place].contiguous() for m in (x, weight))
    return x, weight


def _first_failure(ops: Ops, calls: Sequence[_Call]) -> tuple[str, str, int]:
    """As `first_failure`, of these calls."""
    checks = {
        "attention": _attention_checks,
        "expert_linear": _expert_checks,
        "grouped": _group_checks,
        "rotary_attention": _rotary_checks,
        **dict.fromkeys(STATEFUL, _state_checks),
        **dict.fromkeys(("norm_linear", "norm_swiglu", "add_linear"), _composed_checks),
    }
    count = 0
    for call in calls:
        for unrounded in _unrounded(ops, call):
            for failed in checks.get(call.op, _row_checks)(ops, unrounded):
                count += 1
                if failed:
                    return failed, f"{failed}: {unrounded.describe()}", count
    return "", "", count


def _unrounded(ops: Ops, call: _Call) -> Iterator[_Call]:
    """The call and, if its op computes in a wider dtype than its operands have, the call with
    operands of the wider dtype: rounding hides nearly every difference of two sums."""
    yield call
    dtype = call.args[0].dtype
    if ops.gradient_dtype(dtype, call.args[1] if call.op == "linear" else None) != dtype:

        def wide(value: Any) -> Any:
            is_number = isinstance(value, Tensor) and value.is_floating_point()
            return value.float() if is_number else value

        kwargs = {name: wide(value) for name, value in call.kwargs.items()}
        yield _Call(call.op, tuple(wide(value) for value in call.args), kwargs)


def _row_checks(ops: Ops, call: _Call) -> Iterator[str]:
    """Yields "" for each comparison that holds, and the op's name for each failure."""
    op, rowwise = getattr(ops, call.op), ROWWISE[call.op]

    def run(rows: slice | Tensor) -> list[Tensor]:
        args = [a[rows] if i in rowwise else a for i, a in enumerate(call.args)]
        out = op(*args, **call.kwargs)
        return list(out) if isinstance(out, tuple) else [out]

    total = len(call.args[0])
    with torch.no_grad():
        full = run(slice(None))
        for rows in _selections(total):
            yield from _twice(call.op, partial(run, rows), [f[rows] for f in full])
        yield from _alone(call, lambda: run(slice(None)), full)
        repeat = MANY_ROWS // total + 1
        per_row = call.args[1].numel() if call.op == "linear" else call.args[0][0].numel()
        most = MANY_ROWS_MULTIPLIES[ops.reads_work(call.args[0].device)]
        if repeat * total * per_row <= most:
            many = run(torch.arange(total, device=call.args[0].device).repeat(repeat))
            yield "" if _same([m[-total:] for m in many], full) else call.op


def _twice(op: str, run: Callable[[], list[Tensor]], expected: list[Tensor]) -> Iterator[str]:
    """Compares a call, and one in a sampler's inference mode, with what is expected."""
    part = run()
    yield "" if _same(part, expected) else op
    with torch.inference_mode():
        fed = run()
    yield "" if _same(fed, part) else op


def _alone(call: _Call, run: Callable[[], list[Tensor]], full: list[Tensor]) -> Iterator[str]:
    """Compares several threads, which computed `full`, with one."""
    count = torch.get_num_threads()
    if call.args[0].device.type != "cpu" or count == 1:
        return
    torch.set_num_threads(1)
    try:
        alone = run()
    finally:
        torch.set_num_threads(count)
    yield "" if _same(alone, full) else call.op


def _selections(total: int) -> Iterator[slice]:
    """Few and many rows, from the beginning, the middle and the end."""
    for i, count in enumerate(ROW_COUNTS):
        if count < total:
            start = (0, (total - count) // 2, total - count)[i % 3]
            yield slice(start, start + count)


def _composed_checks(ops: Ops, call: _Call) -> Iterator[str]:
    """Compares a composed op, for few rows and many, with its parts."""
    stock = getattr(Ops, call.op)
    if getattr(type(ops), call.op) is stock:
        return
    with torch.no_grad():
        full = stock(ops, *call.args, **call.kwargs)
        for rows in [slice(None), *_selections(len(full))]:
            args = [a[rows] if i in COMPOSED[call.op] else a for i, a in enumerate(call.args)]
            found = getattr(ops, call.op)(*args, **call.kwargs)
            yield "" if torch.equal(found, full[rows]) else call.op


def _rotary_checks(ops: Ops, call: _Call) -> Iterator[str]:
    """The first row through pages: at once, and by its parts, with the keys that each writes."""
    if type(ops).rotary_attention is Ops.rotary_attention:
        return
    qkv, rotary, spec, packed = call.args
    spec, length, H = replace(spec, layer=0), int(packed.lengths[0]), rotary.num_heads
    G, part = (qkv.shape[1] - H) // 2, slice(length)
    rotary = rotary._replace(cos=rotary.cos[part], sin=rotary.sin[part])
    with torch.no_grad():
        found: list[list[Tensor]] = []
        for run in (Ops.rotary_attention, type(ops).rotary_attention):
            shape = (2, 1, G, -(-length // KEY_BLOCK), KEY_BLOCK, qkv.shape[2])
            keys, values = qkv.new_zeros(shape)
            table = np.arange(keys.shape[2])[None]
            context = PagedContext.of(keys, values, table, [0], [length], num_heads=H)
            found.append([run(ops, qkv[part], rotary, spec, context), keys, values])
        yield "" if _same(*found) else call.op


def _expert_checks(ops: Ops, call: _Call) -> Iterator[str]:
    x_RK, weight, bias, _ = call.args
    num_experts = len(weight)
    with torch.no_grad():

        def run(counts: list[int]) -> list[Tensor]:
            rows = torch.cat([x_RK[:count] for count in counts])
            return list(ops.expert_linear(rows, weight, bias, counts).split(counts))

        most = min(len(x_RK), EXPERT_ROWS[ops.reads_work(x_RK.device)])
        full = run([most - i % 2 for i in range(num_experts)])  # not everywhere the same number
        for count in ROW_COUNTS:
            if count >= most:
                break
            skewed = [(count, 0, 1, most - 1)[i % 4] for i in range(num_experts)]
            for counts in ([count] * num_experts, skewed):
                expected = [f[:n] for f, n in zip(full, counts, strict=True)]
                yield from _twice(call.op, partial(run, counts), expected)
        yield from _alone(call, lambda: run([most - i % 2 for i in range(num_experts)]), full)


def _group_checks(ops: Ops, call: _Call) -> Iterator[str]:
    """Several weights of one shape at once, against one after the other."""
    x, weight = call.args
    weights = torch.stack([weight.roll(i, 0) for i in range(NUM_GROUPS)])
    with torch.no_grad():
        alone = [ops.linear(x, of_group) for of_group in weights]
        for count in ROW_COUNTS:
            skewed = [(count, 0, 1)[i % 3] for i in range(NUM_GROUPS)]
            for counts in ([count] * NUM_GROUPS, skewed):
                rows = torch.cat([x[:n] for n in counts])
                expected = torch.cat([out[:n] for out, n in zip(alone, counts, strict=True)])
                run = partial(ops.expert_linear, rows, weights, None, counts)
                yield from _twice("expert_linear", lambda run=run: [run()], [expected])


def _attention_checks(ops: Ops, call: _Call) -> Iterator[str]:
    """The first row's positions through a paged cache: in chunks, one by one, and two at once."""
    q, k, v, spec, packed = call.args
    spec, length = replace(spec, layer=0), int(packed.lengths[0])
    num_heads = q.shape[1] if ops.reads_work(q.device) else None
    with torch.no_grad():
        full = ops.attention(q, k, v, spec, packed)
        yield from _alone(call, lambda: [ops.attention(q, k, v, spec, packed)], [full])
        full = full[:length]
        # Two rows that share their first half, against each row by itself.
        kept, shared = 2 * length // 3, length // 2
        rows = [np.arange(kept), np.r_[:shared, kept:length]]
        packed = PackedContext.of_rows(rows, device=q.device)
        found = ops.attention(q[:length], k[:length], v[:length], spec, packed)
        alone: list[Tensor] = []
        for row in rows:
            by_itself = PackedContext.of([len(row)], device=q.device)
            alone.append(ops.attention(q[row], k[row], v[row], spec, by_itself))
        expected = torch.cat([alone[0], alone[1][shared:]])
        yield "" if torch.equal(found, expected) else call.op
        for page_size in (KEY_BLOCK, 16):
            keys, values = k.new_zeros(
                2, 1, k.shape[1], -(-length // page_size), page_size, k.shape[2]
            )
            table = np.arange(keys.shape[2])[None]
            last = length - 1
            stops = [s for s in (1, 2, 37, KEY_BLOCK - 1, KEY_BLOCK, last - 3) if 0 < s < last]
            ends = [0, *sorted(set(stops)), *range(last - 2, length + 1)]
            steps = [(slice(*step), [step[0]], [step[1]]) for step in pairwise(ends)]
            # The same positions again, as decode steps of several sequences over the same pages.
            places = [5, length // 2, last]
            for part, starts, stops in [*steps, (places, places, [at + 1 for at in places])]:
                tables = table.repeat(len(starts), 0)
                context = PagedContext.of(keys, values, tables, starts, stops, num_heads=num_heads)
                with torch.inference_mode():
                    out = ops.attention(q[part], k[part], v[part], spec, context)
                yield "" if torch.equal(out, full[part]) else call.op


def _state_checks(ops: Ops, call: _Call) -> Iterator[str]:
    """The first row's positions through a sampler's states: three parts of a prompt that end at
    different borders, then a token of each at a time; and one sequence alone."""
    rowwise, length = STATEFUL[call.op], int(call.args[-1].lengths[0])
    rows, layer = [call.args[i] for i in rowwise], call.args[-2]
    rest = [a for i, a in enumerate(call.args[:-2]) if i not in rowwise]
    # A convolution has a tail alone: its channels are no heads.
    k, v = rows[1:3] if len(rows) > 2 else (rows[0].new_empty(1, 1, 1),) * 2
    op, keys = getattr(ops, call.op), v.new_empty(0)
    with torch.no_grad():
        full = op(*call.args)
        yield from _alone(call, lambda: [op(*call.args)], [full])
        full = full[:length]
    for count in (3, 1):
        of = {"heads": (k.shape[1], v.shape[1]), "widths": (k.shape[-1], v.shape[-1])}
        of["tail"] = (rest[0].shape[1] - 1, rest[0].shape[0]) if rest else (1, 1)
        states = States.zeros(layer + 1, count, **of, dtype=v.dtype, device=v.device)
        ends = [min(n * CHUNK, (length - 1) // CHUNK * CHUNK) for n in range(1, count + 1)]
        starts = np.zeros(count, np.int64)
        for stops in (np.array(ends), *(np.array(ends) + i for i in range(1, CHUNK + 2))):
            fed = stops - starts
            if not fed.all() or stops.max() > length:
                break
            num_rows = count if starts.any() else 0
            step = StateStep.of(states, np.arange(count), starts, stops, num_rows=num_rows)
            places = np.concatenate([np.arange(*ends) for ends in zip(starts, stops, strict=True)])
            context = PagedContext(keys, keys, keys, states=step)
            with torch.inference_mode():
                out = op(*(row[places] for row in rows), *rest, layer, context)
            yield "" if torch.equal(out, full[places]) else call.op
            starts = stops


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- fingerprint ----------------------------------------------------------------------------------


def fingerprint(ops: Ops, dtype: torch.dtype, device: torch.device) -> Fingerprint:
    """Describes what `ops` compute with in this process."""
    name = str(dtype).removeprefix("torch.")
    settings: dict[str, Any] = {"key_block": ops.key_block, "gemm": ops.describe_gemm(dtype)}
    if isinstance(ops, InvariantOps):
        settings["row_quantum"] = ops.rules.row_quantum
        settings["head_quantum"] = ops.rules.head_quantum
    machine, isa, libraries = _machine(device)
    return Fingerprint(
        ops=ops.name,
        dtype=name,
        device=machine,
        kv_dtype=name,
        isa=isa,
        libraries=libraries,
        probe=_probe(ops, dtype, device),
        **settings,
    )


def _machine(device: torch.device) -> tuple[str, str, str]:
    """(device, instruction set or compute capability, libraries)."""
    libraries = f"torch {torch.__version__}"
    if device.type == "cuda":
        isa = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        libraries += f", cuda {torch.version.cuda}, triton {version('triton')}"
        return torch.cuda.get_device_name(device), isa, libraries
    if match := re.search(r"Math Kernel Library Version (\S+)", torch.__config__.show()):
        libraries += f", mkl {match[1]}"
    isa = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else ""
    return device.type, isa, libraries


def _probe(ops: Ops, dtype: torch.dtype, device: torch.device) -> str:
    """Hash of a GEMM, a norm, an activation and a softmax over numbers that need no generator."""
    count = torch.arange(512 * 96, dtype=torch.float64)
    x = ((count * 0.6180339887498949) % 1.0 - 0.5).view(96, 512).to(dtype).to(device)
    with torch.no_grad():
        hidden = ops.rms_norm(ops.linear(x[:48], x), x.new_ones(96), 1e-6)
        logp = ops.log_softmax(ops.swiglu(hidden) * 8.0)
    return hashlib.sha256(logp.cpu().numpy().tobytes()).hexdigest()[:12]
