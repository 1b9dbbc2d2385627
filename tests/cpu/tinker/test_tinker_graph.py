"""Custom losses: what the client traces runs as it does there, and nothing else is let in."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datums import call, gradients, make_datum, make_learner, weighted_datum

from lockstep.tinker import graph
from lockstep.tinker.graph import GraphLoss
from lockstep.tinker.requests import TinkerError

# -- as the client sends them ----------------------------------------------------------------------


def nll(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def clipped(logprobs, old, advantages, weights):
    ratio = torch.exp(logprobs - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (old - logprobs)[weights.bool()].mean()
    share = weights.sum() / logprobs.shape[0]
    loss = -(surrogate * weights).sum() / weights.sum().clamp(min=1) + 0.01 * kl
    return loss, {"custom/kl:mean": kl.detach(), "custom/share:mean": share}


def by_sequence(logprobs, reference, beta):
    margin = beta * (logprobs.sum() - reference.sum())
    loss = -F.logsigmoid(margin) + F.softplus(-margin) + F.huber_loss(margin, beta)
    return loss, {"custom/accuracy:mean": (margin > 0).float()}


def distilled(logprobs, teacher):
    """[T, K] both."""
    shares = torch.softmax(teacher, dim=-1)
    student = logprobs - torch.logsumexp(logprobs, dim=-1, keepdim=True)
    loss = (shares * (shares.log() - student)).sum(-1).mean()
    top = logprobs.max(dim=-1)[0].mean()
    return loss, {"custom/top:mean": top, "custom/width:sum": top * 0 + logprobs.size(-1)}


def indexed(logprobs, weights):
    shifted = logprobs[1:] - logprobs[:-1]
    stacked = torch.stack([shifted, shifted.abs()], dim=0)
    scale = math.sqrt(logprobs.shape[0]) + math.log(2.0)
    filled = torch.where(weights > 0.5, logprobs, torch.full_like(logprobs, float("-inf")))
    loss = torch.logsumexp(filled, 0) / scale + stacked.transpose(0, 1)[..., -1].pow(2).sum()
    loss = loss + (logprobs.new_zeros(3).sum() if True else 0) + logprobs.to(torch.float64).std()
    return loss, {"custom/any:sum": torch.any(weights > 0.5).float()}


TRACED = {
    "nll": (nll, {"logprobs": 1, "weights": 1}),
    "clipped": (clipped, {"logprobs": 1, "old": 1, "advantages": 1, "weights": 1}),
    "by_sequence": (by_sequence, {"logprobs": 1, "reference": 1, "beta": 0}),
    "distilled": (distilled, {"logprobs": 2, "teacher": 2}),
    "indexed": (indexed, {"logprobs": 1, "weights": 1}),
}


def uploaded(fn, ranks):
    """(the client's handle, the loss rebuilt from the JSON that it uploads)."""
    client = pytest.importorskip("tinker.lib.public_interfaces.custom_loss")
    handle = client.trace_loss(fn, ranks, "session")
    sent = json.loads(client.encode_graph(handle).model_dump_json())
    inputs = [json.loads(i.model_dump_json()) for i in handle.inputs]
    return handle, GraphLoss(handle.name, inputs, sent)


@pytest.mark.parametrize("name", TRACED)
def test_a_loss_that_the_client_traced_gives_the_same_numbers_here(name):
    fn, ranks = TRACED[name]
    handle, loss = uploaded(fn, ranks)
    assert loss.ranks == ranks
    rng = np.random.default_rng(0)
    shapes = {0: (), 1: (7,), 2: (7, 4)}
    inputs = {
        key: rng.uniform(0.1, 1, shapes[rank]).astype(np.float32) for key, rank in ranks.items()
    }
    found, wanted = (torch.from_numpy(-inputs.pop("logprobs")) for _ in "1"), None
    logprobs = next(found).requires_grad_()
    twin = logprobs.detach().clone().requires_grad_()
    value, metrics = loss(logprobs, inputs)
    wanted, their_metrics = handle.graph(twin, *(torch.from_numpy(v) for v in inputs.values()))
    assert torch.equal(value, wanted)
    assert {k: v.item() for k, v in metrics.items()} == {
        k: v.item() for k, v in their_metrics.items()
    }
    value.backward()
    wanted.backward()
    assert torch.equal(logprobs.grad, twin.grad)


def test_a_custom_loss_trains_as_the_named_one_that_it_is(tmp_path):
    _, loss = uploaded(nll, {"logprobs": 1, "weights": 1})
    data = [weighted_datum(5 + i, seed=i) for i in range(3)]
    named, custom = make_learner(tmp_path), make_learner(tmp_path)
    wanted = call(named, data)
    found = call(custom, data, "custom", custom=loss, loss_id="loss-1")
    total = wanted.metrics["loss:sum"]
    assert found.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)
    assert found.metrics["custom/nll:sum"] == pytest.approx(total, rel=1e-6)
    for left, right in zip(found.logprobs, wanted.logprobs, strict=True):
        assert np.array_equal(left, right)
    for name, gradient in gradients(named).items():
        assert torch.allclose(gradients(custom)[name], gradient, rtol=1e-5, atol=1e-7), name


def test_means_of_a_custom_loss_are_over_datums(tmp_path):
    _, loss = uploaded(distilled, {"logprobs": 2, "teacher": 2})
    data = [
        make_datum(4 + i, seed=i, width=3, teacher=np.ones((4 + i, 3), np.float32))
        for i in range(2)
    ]
    result = call(make_learner(tmp_path), data, "custom", custom=loss)
    tops = [logprobs.max(-1).mean() for logprobs in result.logprobs]
    assert result.metrics["custom/top:mean"] == pytest.approx(np.mean(tops), rel=1e-6)
    assert result.metrics["custom/width:sum"] == 6.0


@pytest.mark.parametrize(
    "datum, sentence",
    [
        (make_datum(4, width=2), r"target_tokens.*\b2\b.*rank 1\b"),
        (make_datum(4), r"rank 1\b"),
        (weighted_datum(4, width=2), "target_tokens"),
        (make_datum(4, weights=np.float32(1)), r"\b0\b.*rank 1\b"),
    ],
)
def test_a_datum_without_the_declared_inputs_is_refused(tmp_path, datum, sentence):
    _, loss = uploaded(nll, {"logprobs": 1, "weights": 1})
    with pytest.raises(TinkerError, match=f"datum 1, .*{sentence}"):
        call(make_learner(tmp_path), [weighted_datum(), datum], "custom", custom=loss)


# -- as nobody should send them --------------------------------------------------------------------

REF = {"ref": "logprobs"}


def node(target, *args, op="call_function", name="x", **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def output(loss="x", metrics=()):
    pair = [{"ref": loss}, {"dict": {key: {"ref": value} for key, value in dict(metrics).items()}}]
    return {"op": "output", "name": "output", "target": "output", "args": [{"tuple": pair}]}


def build(*nodes, last=None, inputs=({"name": "logprobs", "rank": 1},), form=1):
    first = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    every = [first, *nodes, *([last] if last else [output()])]
    return GraphLoss("hostile", list(inputs), {"format": form, "nodes": every})


def deep(levels):
    out = 1
    for _ in range(levels):
        out = [out]
    return out


NOT_ALLOWED = {
    "eval": (node("builtins.eval", "1"), "node x: call_function of builtins.eval is not among"),
    "a module": (node("os.system", "true"), "of os.system"),
    "a file": (node("torch.load", "/etc/passwd"), "of torch.load"),
    "a library": (node("torch.ops.load_library", "x"), "of torch.ops.load_library"),
    "getattr of an operator": (node("operator.attrgetter", "x"), "of operator.attrgetter"),
    "a dunder": (node("getattr", REF, "__class__"), "getattr '__class__'"),
    "storage": (node("getattr", REF, "data"), "getattr 'data'"),
    "getattr of a node": (node("getattr", REF, REF), "getattr"),
    "getattr with a default": (node("getattr", REF, "shape", 1), "getattr"),
    "a private method": (node("__reduce_ex__", REF, 2, op="call_method"), "of __reduce_ex__"),
    "backward": (node("backward", REF, op="call_method"), "of backward"),
    "a host value": (node("item", REF, op="call_method"), "of item"),
    "in place": (node("add_", REF, 1, op="call_method"), "of add_"),
    "a hook": (node("register_hook", REF, 1, op="call_method"), "of register_hook"),
    "a parameter": (node("weight", op="get_attr"), "get_attr of weight"),
    "a submodule": (node("layer", REF, op="call_module"), "call_module of layer"),
    "random numbers": (node("torch.rand_like", REF), "of torch.rand_like"),
    "repeat": (node("repeat", REF, 9, op="call_method"), "of repeat"),
    "out": (node("torch.exp", REF, out=REF), "the keyword 'out' is not allowed"),
    "an earlier name": (node("torch.exp", REF, name="logprobs"), "has the name of another"),
    "a later node": (node("torch.exp", {"ref": "y"}), "argument \"{'ref': 'y'}\""),
    "itself": (node("torch.exp", {"ref": "x"}), "argument \"{'ref': 'x'}\""),
    "a device": (node("torch.exp", REF, device={"device": "cuda"}), "'device': 'cuda'"),
    "a dtype": (node("torch.sum", REF, dtype={"dtype": "__class__"}), "'dtype'"),
    "an unknown object": (node("torch.exp", {"pickle": "x"}), "'pickle'"),
    "two keys": (node("torch.exp", {"ref": "logprobs", "tuple": []}), "expected a number"),
    "a huge integer": (node("torch.add", REF, 1 << 70), "expected a number"),
    "deep lists": (node("torch.exp", deep(50)), "nested 8 deep"),
    "many arguments": (node("torch.exp", [0] * 20_000), "10000 values"),
    "text as args": (node("torch.exp") | {"args": "ab"}, "graph.nodes[1].args must be array"),
    "no target": ({"op": "call_function", "name": "x"}, "graph.nodes[1] lacks 'target'"),
    "no object": ("torch.exp", "graph.nodes[1] must be object, found string"),
}


@pytest.mark.parametrize("case", NOT_ALLOWED)
def test_an_operation_that_is_not_on_the_list_is_refused_with_its_node(case):
    bad, sentence = NOT_ALLOWED[case]
    with pytest.raises(TinkerError) as raised:
        build(bad)
    assert sentence in str(raised.value) and raised.value.status == 422


SUM = node("torch.sum", REF)
BAD_GRAPHS = {
    "another format": (lambda: build(SUM, form=2), "graph.format must be 1, found 2"),
    "too many nodes": (
        lambda: build(*(node("torch.exp", REF, name=f"n{i}") for i in range(1001))),
        "expected 1 to 1000",
    ),
    "no nodes": (lambda: GraphLoss("x", [{"name": "logprobs", "rank": 1}], {"format": 1}), "lacks"),
    "no graph": (lambda: GraphLoss("x", [{"name": "logprobs", "rank": 1}], []), "must be object"),
    "no output": (lambda: build(last=SUM), "has no output"),
    "nodes after the output": (lambda: build(SUM, output(), last=node("torch.exp", REF, name="y")),
                               "follows the output"),
    "no loss": (lambda: build(last=output() | {"args": [1.0]}), "output must be"),
    "a constant loss": (
        lambda: build(last=output() | {"args": [{"tuple": [1.0, {"dict": {}}]}]}), "output must be",
    ),
    "a metric without a reduction": (
        lambda: build(SUM, last=output(metrics={"custom/a": "x"})), "custom/NAME:sum",
    ),
    "a metric with two": (
        lambda: build(SUM, last=output(metrics={"custom/a:b:sum": "x"})), "custom/NAME:sum",
    ),
    "the trainer's own metric": (
        lambda: build(SUM, last=output(metrics={"loss:sum": "x"})), "custom/NAME:sum",
    ),
    "an input that it does not read": (
        lambda: build(SUM, inputs=[{"name": "logprobs", "rank": 1}, {"name": "a", "rank": 1}]),
        "declares the inputs",
    ),
    "another first input": (
        lambda: build(SUM, inputs=[{"name": "a", "rank": 1}]), "first logprobs",
    ),
    "a rank of 3": (lambda: build(SUM, inputs=[{"name": "logprobs", "rank": 3}]), "of [0, 1, 2]"),
    "a rank of true": (
        lambda: build(SUM, inputs=[{"name": "logprobs", "rank": True}]), "one of [0, 1, 2]",
    ),
    "a bad name": (lambda: build(SUM, inputs=[{"name": "X", "rank": 1}]), "names in lowercase"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_graph_of_another_form_is_refused(case):
    make, sentence = BAD_GRAPHS[case]
    with pytest.raises(TinkerError, match="custom loss") as raised:
        make()
    assert sentence in str(raised.value)


BIG = 1 << 26
COLUMN = node("unsqueeze", REF, 1, op="call_method", name="column")
TOO_LARGE = {
    "zeros": ([node("torch.zeros", BIG, BIG)], 4, "elements"),
    "arange": ([node("torch.arange", BIG)], 4, "elements"),
    "a slow arange": ([node("torch.arange", 0.0, 1.0, 1e-12)], 4, "arange takes integers"),
    "new_full": ([node("new_full", REF, [BIG, 2], 1.0, op="call_method")], 4, "elements"),
    "expand": ([node("expand", REF, BIG, 4, op="call_method")], 4, "elements"),
    "an outer product": ([COLUMN, node("torch.mul", {"ref": "column"}, REF)], 8192, "elements"),
    "a matrix product": (
        [COLUMN, node("torch.t", {"ref": "column"}, name="row"),
         node("torch.matmul", {"ref": "column"}, {"ref": "row"})], 8192, "elements",
    ),
    "a gather": (
        [node("torch.zeros", 1 << 24, dtype={"dtype": "int64"}, name="index"),
         node("torch.cat", [{"ref": "index"}, {"ref": "index"}])], 4, "elements",
    ),
    "an index": (
        [COLUMN, node("expand", {"ref": "column"}, 4, 1 << 20, op="call_method", name="wide"),
         node("torch.zeros", 1 << 20, dtype={"dtype": "int64"}, name="index"),
         node("operator.getitem", {"ref": "wide"}, {"ref": "index"})], 4, "elements",
    ),
    "padding": ([node("torch.nn.functional.pad", REF, [0, BIG])], 4, "elements"),
    "many large results": (
        [node("torch.zeros", 1 << 24, name=f"z{i}") for i in range(20)]
        + [node("torch.sum", REF)], 4, "elements",
    ),
    "a power of integers": ([node("operator.pow", 10, BIG)], 4, "a power of integers"),
    "squares": (
        [node("operator.mul", 1 << 40, 1 << 40)], 4, "an integer is beyond",
    ),
    "repeated lists": ([node("operator.mul", [1, 2], 1 << 40)], 4, "which is no number"),
    "repeated text": ([node("operator.mul", "ab", 1 << 40)], 4, "which is no number"),
    "repeated tensors": ([node("operator.mul", [REF], 1 << 40)], 4, "which is no number"),
    "new_zeros elsewhere": (
        [node("new_zeros", REF, [1 << 30], op="call_method", device={"device": "cpu"})],
        4, "elements",
    ),
    "formatted text": ([node("operator.mod", "%1000000000d", 1)], 4, "which is no number"),
    "a text": ([node("operator.getitem", "abc", 0)], 4, "its result is a str"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_result_without_bounds_is_refused_before_it_takes_memory(case):
    nodes, length, sentence = TOO_LARGE[case]
    loss = build(*nodes)
    with pytest.raises(TinkerError, match=r"node \w+ \(.*fails on datum 3") as raised:
        loss(torch.zeros(length), {}, index=3)
    assert sentence in str(raised.value)


def test_a_loss_that_runs_too_long_is_stopped():
    with pytest.raises(TinkerError, match=r"\b0\b.*\b0\b"):
        build(SUM)(torch.zeros(2), {}, max_seconds=0)


@pytest.mark.parametrize(
    "nodes, sentence",
    [
        ([node("torch.exp", REF)], r"\b0\b.*\[2\]"),
        ([node("operator.add", 1, 2)], r"\b0\b.*\b3\b"),
        ([node("torch.sum", REF, dim=5)], r"\(torch.sum\).*\b0\b"),
    ],
)
def test_an_error_while_it_runs_names_the_node_and_the_datum(nodes, sentence):
    with pytest.raises(TinkerError, match=sentence):
        build(*nodes)(torch.zeros(2), {})


def test_no_target_on_the_list_reaches_outside_of_torch_and_numbers():
    """The list itself: a name that were added by mistake would be the hole."""
    for name, function in (graph.FUNCTIONS | graph.METHODS).items():
        short = name.rpartition(".")[2]
        assert not short.startswith("__") and (not short.endswith("_") or "operator" in name), name
        assert callable(function)
    forbidden = {"apply_", "map_", "numpy", "tolist", "item", "backward", "data", "set_", "load"}
    forbidden |= {"repeat", "tile", "einsum", "outer", "factorial", "comb", "lshift", "attrgetter"}
    reached = {name.rpartition(".")[2] for name in (*graph.FUNCTIONS, *graph.METHODS)}
    assert not reached & forbidden
