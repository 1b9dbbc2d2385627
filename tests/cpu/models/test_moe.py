"""The MoE layer: what a config turns on, values and gradients, memory, loads.

# T tokens  D model width  E experts  A active experts  F expert width
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_configs import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.models import experts as moe_experts
from lockstep.models.decoder import Decoder
from lockstep.models.experts import ExpertProjection, mix_experts
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.moe import MLP, MoE, Routing
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps

ops = Ops()

CONFIG = tiny_config(
    "gpt_oss", vocab_size=31, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=2,
    num_kv_heads=1, max_positions=64, windows=(None,), has_sinks=False, has_attention_bias=False,
    tie_embeddings=False,
)  # fmt: skip
PLAIN = replace(CONFIG, has_router_bias=False, has_expert_bias=False, swiglu_limit=0.0)


# -- what a config turns on -----------------------------------------------------------------------


def test_a_mixture_without_biases_has_no_bias():
    names = {name for name, _ in Decoder(PLAIN).named_parameters()}
    assert not [name for name in names if name.startswith("layers.0.mlp") and "bias" in name]
    assert "layers.0.mlp.gate_up_bias" in dict(Decoder(CONFIG).named_parameters())


def test_shares_of_all_experts_are_the_chosen_ones_softmax_times_their_sum():
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    own, chosen = ops.route(logits, 2)
    shares, same = ops.route(logits, 2, is_normalized=False)
    assert torch.equal(chosen, same)
    torch.testing.assert_close(shares, logits.softmax(-1).gather(1, chosen))
    torch.testing.assert_close(shares / shares.sum(-1, keepdim=True), own)


def test_dense_layers_in_between_are_not_counted_as_routed():
    config = replace(
        PLAIN, num_layers=4, windows=(None,) * 4, dense_layers=(0, 2), dense_intermediate_size=24
    )
    model = Decoder(config)
    kinds = [type(block.mlp) for block in model.layers]
    assert kinds == [MLP, MoE, MLP, MoE] and config.routed_layers == (1, 3)
    assert model.layers[2].mlp.down_proj.weight.shape == (16, 24)
    routing = Routing()
    model(torch.arange(5), torch.arange(5), PackedContext.of([5]), routing)
    assert sorted(routing.chosen) == [0, 1] and routing.stacked().shape == (5, 2, 2)


# -- values and gradients -------------------------------------------------------------------------


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def alone(ops):
    """The inputs of an MLP, which reads no context."""
    return LayerInputs(ops, None, None, None)


def one_by_one(x_TD, weights_TA, experts_TA, gate_up, down, activation):
    """Each pair by itself, under autograd."""

    def project(p, x, expert):
        out = p.weight[expert] @ x
        if p.bias is not None:
            out = out + p.bias[expert]
        if p.A is not None:
            out = out + p.scale * (p.B[expert] @ (p.A[expert] @ x))
        return out

    rows = []
    for x, weights, experts in zip(x_TD, weights_TA, experts_TA.tolist(), strict=True):
        outs = [project(down, activation(project(gate_up, x, e)), e) for e in experts]
        rows.append(sum(w * out for w, out in zip(weights, outs, strict=True)))
    return torch.stack(rows)


def distinct(num_tokens, num_experts, num_active, *, seed=0, among=None):
    generator = torch.Generator().manual_seed(seed)
    among = torch.arange(num_experts) if among is None else torch.tensor(among)
    rows = [torch.randperm(len(among), generator=generator)[:num_active] for _ in range(num_tokens)]
    return among[torch.stack(rows)]


def inputs(kind, *, T=23, D=6, E=5, F=4, rank=2, dtype=torch.float64):
    """x, weights and two projections, all with a gradient."""
    has_bias, rank = kind != "without bias", rank if kind == "adapted" else 0

    def projection(N, K, seed):
        A = B = None
        if rank:
            A = normal(E, rank, K, seed=seed + 2).to(dtype).requires_grad_()
            B = normal(E, N, rank, seed=seed + 3).to(dtype).requires_grad_()
        return ExpertProjection(
            normal(E, N, K, seed=seed).to(dtype).requires_grad_(),
            normal(E, N, seed=seed + 1).to(dtype).requires_grad_() if has_bias else None,
            A,
            B,
            scale=0.5,
        )

    x = normal(T, D).to(dtype).requires_grad_()
    weights = normal(T, 2, seed=1).softmax(-1).to(dtype).requires_grad_()
    return x, weights, projection(2 * F, D, 10), projection(D, F, 20)


ACTIVATIONS = {"swiglu": ops.swiglu, "swiglu_clamped": partial(ops.swiglu, alpha=1.702, limit=1.0)}
ROUTES = {"even": None, "all to two experts": (3, 1), "one expert empty": (0, 1, 2, 4)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["with bias", "without bias", "adapted"])
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("num_chunk_tokens", [7, 1000])
def test_values_and_gradients_are_those_of_each_pair_by_itself(
    monkeypatch, activation, kind, routes, num_chunk_tokens
):
    monkeypatch.setattr(moe_experts, "ALL_EXPERTS_MULTIPLIES", 0)
    x, weights, gate_up, down = inputs(kind)
    experts = distinct(23, 5, 2, among=ROUTES[routes])
    leaves = [x, weights, *(t for p in (gate_up, down) for t in p.tensors if t is not None)]
    grad, results = normal(*x.shape, seed=5), []
    run = partial(mix_experts, ops=ops, num_chunk_tokens=num_chunk_tokens)
    for function in (run, one_by_one):
        how = {"gate_up": gate_up, "down": down, "activation": ACTIVATIONS[activation]}
        out = function(x, weights, experts, **how)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("T", [0, 1, 23])
def test_few_tokens_go_through_all_experts_with_the_same_result(T):
    x, weights, gate_up, down = inputs("with bias", T=T)
    experts = distinct(T, 5, 2) if T else torch.empty(0, 2, dtype=torch.int64)
    how = {"gate_up": gate_up, "down": down, "activation": ops.swiglu, "ops": ops}
    out = mix_experts(x, weights, experts, **how)
    assert out.shape == x.shape
    grads = torch.autograd.grad(out, (x, weights, gate_up.weight), normal(*x.shape, seed=5))
    assert [g.shape for g in grads] == [x.shape, weights.shape, gate_up.weight.shape]
    if T:
        torch.testing.assert_close(out, one_by_one(x, weights, experts, gate_up, down, ops.swiglu))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_do_not_depend_on_the_chunk(monkeypatch, dtype):
    """Nor on whether there is a gradient, or on which path few tokens take."""
    x, weights, gate_up, down = inputs("adapted", T=90, D=24, F=16, rank=8, dtype=dtype)
    experts = distinct(90, 5, 2)
    ops = InvariantOps()
    activation = partial(ops.swiglu, alpha=1.702, limit=1.0)

    def run(part, **settings):
        return mix_experts(
            x[part],
            weights[part],
            experts[part],
            gate_up=gate_up,
            down=down,
            activation=activation,
            ops=ops,
            **settings,
        )

    whole = run(slice(None))
    with torch.no_grad():
        assert torch.equal(run(slice(3, 5)), whole[3:5])
        monkeypatch.setattr(moe_experts, "ALL_EXPERTS_MULTIPLIES", 0)
        for num_chunk_tokens in (1, 16, 33, 1000):
            found = run(slice(None), num_chunk_tokens=num_chunk_tokens)
            assert torch.equal(found, whole), num_chunk_tokens


def test_gradients_of_bfloat16_experts_are_summed_over_chunks_in_float32(monkeypatch):
    monkeypatch.setattr(moe_experts, "ALL_EXPERTS_MULTIPLIES", 0)
    leaves, grads = inputs("with bias", T=400, dtype=torch.bfloat16), []
    x, weights, gate_up, down = leaves
    experts = distinct(400, 5, 2)
    for num_chunk_tokens in (8, 1000):
        out = mix_experts(
            x,
            weights,
            experts,
            gate_up=gate_up,
            down=down,
            activation=ops.swiglu,
            ops=ops,
            num_chunk_tokens=num_chunk_tokens,
        )
        grads.append(torch.autograd.grad(out.float().sum(), gate_up.weight)[0].float())
    # Sums of 50 chunks, each rounded to 8 bits, would be off by about sqrt(50) * 2^-9 = 1.4 %.
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert error < 2**-8


# -- memory ---------------------------------------------------------------------------------------


class Sizes(TorchDispatchMode):
    """The largest tensor that any op makes, and how often each op is called."""

    def __init__(self):
        super().__init__()
        self.largest, self.calls = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("routes", [None, (3, 1)])
def test_nothing_that_is_made_is_larger_than_the_input_the_weights_or_a_chunk(is_training, routes):
    """No copy of tokens by expert, none of weights by token, whoever all the tokens go to."""
    T, D, E, F, A = 2000, 16, 8, 8, 2
    x, weights, gate_up, down = inputs("with bias", T=T, D=D, E=E, F=F, dtype=torch.float32)
    run = partial(
        mix_experts,
        x,
        weights,
        distinct(T, E, A, among=routes),
        gate_up=gate_up,
        down=down,
        activation=ops.swiglu,
        ops=ops,
        num_chunk_tokens=100,
    )
    with Sizes() as sizes:
        if is_training:
            run().backward(torch.ones(T, D))
        else:
            with torch.no_grad():
                run()
    chunk = 100 * A * 2 * F * 4
    limit = max(T * D * 4, T * A * 8, E * 2 * F * D * 4, chunk)  # T * A * 8: the routes themselves
    assert sizes.largest <= limit < T * A * D * 4


class Products(TorchDispatchMode):
    """Collects (rows, dtype) of products with a vector."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mv" in func.__name__ or (func.__name__.startswith("mm") and 1 in args[0].shape):
            self.seen.add((max(args[0].shape), args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_biases_of_bfloat16_experts_leave_no_kernel_per_number_of_rows(monkeypatch):
    """On CPUs with bfloat16 arithmetic oneDNN compiles one for each shape of such a product, and
    keeps a thousand of them: 600 MiB."""
    layer = Decoder(CONFIG).to(torch.bfloat16).layers[0].mlp
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr(moe_experts, "ALL_EXPERTS_MULTIPLIES", 0)
    with Products() as found:
        layer(x.requires_grad_(), alone(InvariantOps())).sum().backward()
    assert found.seen and {dtype for _, dtype in found.seen} == {torch.float32}


def test_frozen_experts_cost_no_product_and_no_memory_for_their_gradient(monkeypatch):
    monkeypatch.setattr(moe_experts, "ALL_EXPERTS_MULTIPLIES", 0)
    calls = []
    for is_frozen in (False, True):
        x, weights, gate_up, down = inputs("adapted")
        for p in (gate_up, down):
            for t in (p.weight, p.bias):
                t.requires_grad_(not is_frozen)
        out = mix_experts(
            x,
            weights,
            distinct(23, 5, 2),
            gate_up=gate_up,
            down=down,
            activation=ops.swiglu,
            ops=ops,
        )
        with Sizes() as sizes:
            out.sum().backward()
        calls.append(sizes.calls["addmm_"])
        assert (gate_up.weight.grad is None) == is_frozen == (down.bias.grad is None)
        assert gate_up.B.grad is not None and x.grad is not None
    assert calls == [5 * 6, 5 * 4]  # per expert: two matrices and two adapters of two factors


def test_a_layer_with_every_parameter_frozen_keeps_nothing_for_backward():
    layer = MoE(CONFIG, 0).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    assert layer(normal(9, 16, dtype=torch.float32), alone(ops)).grad_fn is None
