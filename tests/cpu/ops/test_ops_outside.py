"""The decoder computes nothing by itself: all sums and products go through its ops."""

import pytest
import torch
from cpu.ops.ops_outside import ops_outside

from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import hf_config
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps

KINDS = ("qwen3", "gpt_oss")
VOCAB = 97


def make_model(kind, *, dtype=torch.float32):
    model = Decoder(ModelConfig.from_hf(hf_config(kind, VOCAB, None)), ops=InvariantOps())
    model.init_weights(std=0.4, seed=0)
    return model.to(dtype)


def outside(model, length=5):
    ids = torch.arange(length)
    return ops_outside(model, ids, ids, PackedContext.of([length]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "invariant"])
def test_the_decoder_computes_nothing_by_itself(monkeypatch, kind, dtype, name):
    model = make_model(kind, dtype=dtype)
    model.ops = Ops() if name == "plain" else InvariantOps()
    assert outside(model) == []
    monkeypatch.setattr("lockstep.models.experts.ALL_EXPERTS_MULTIPLIES", 0)  # tokens are sorted
    assert outside(model) == []


class Then(torch.nn.Module):
    """`compute` on what `inner` gives."""

    def __init__(self, inner, compute):
        super().__init__()
        self.inner, self.compute = inner, compute

    def forward(self, x, *rest, **named):
        return self.compute(self.inner(x, *rest, **named))


SQUARE = torch.eye(64)


@pytest.mark.parametrize(
    ("compute", "op"),
    [
        (torch.nn.functional.gelu, "gelu"),
        (torch.nn.functional.silu, "silu"),
        (torch.sigmoid, "sigmoid"),
        (torch.tanh, "tanh"),
        (torch.exp, "exp"),
        (torch.rsqrt, "rsqrt"),
        (lambda x: x @ SQUARE, "mm"),
        (lambda x: torch.nn.functional.linear(x, SQUARE, SQUARE[0]), "addmm"),
        (lambda x: torch.bmm(x[None], SQUARE[None])[0], "bmm"),
        (lambda x: x.softmax(-1), "_softmax"),
        (lambda x: x - x.mean(-1, keepdim=True), "mean"),
        (lambda x: x / x.norm(dim=-1, keepdim=True), "linalg_vector_norm"),
        (lambda x: torch.nn.functional.layer_norm(x, (64,)), "native_layer_norm"),
        (lambda x: x * x.sum(), "sum"),
        (lambda x: x.cumsum(-1), "cumsum"),
        (lambda x: torch.zeros_like(x).index_add_(0, torch.arange(len(x)), x), "index_add_"),
        (lambda x: torch.add(x, x, alpha=0.5), "add"),
        (lambda x: torch.addcmul(x, x, x), "addcmul"),
        (lambda x: x + torch.rand(1), "rand"),
        (lambda x: Ops().linear(x, SQUARE), "mm"),  # the backend itself, and not by the API
    ],
)
def test_an_op_outside_of_the_api_is_named_with_its_module(compute, op):
    model = make_model("qwen3")
    model.layers[1].mlp = Then(model.layers[1].mlp, compute)
    assert f"aten.{op} in Decoder.layers.1.mlp" in outside(model)


def test_moving_numbers_and_single_roundings_are_a_models_own_affair():
    model = make_model("qwen3")

    def compute(x):
        x = (x * 2.0 - 1).clamp(-4, 4).relu().div(3).neg()
        order = x[:, 0].argsort()
        x = torch.stack([x[order], torch.where(x > 0, x, 0)])[0].roll(1, -1).to(torch.float64)
        return x.flip(0).to(torch.float32).contiguous().add_(torch.arange(5).cumsum(0)[:, None])

    model.layers[0].mlp = Then(model.layers[0].mlp, compute)
    assert outside(model) == []
