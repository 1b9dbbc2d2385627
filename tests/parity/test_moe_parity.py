"""The MoE layer against transformers' own layers: values, and the gradients of every parameter."""

from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")

from lockstep.models import experts as moe_experts  # noqa: E402
from lockstep.models.config import ModelConfig  # noqa: E402
from lockstep.models.layer_inputs import LayerInputs  # noqa: E402
from lockstep.models.moe import MoE  # noqa: E402
from lockstep.ops.base import Ops  # noqa: E402

T, D, F, E, A = 300, 24, 16, 8, 2
SHAPE = {
    "vocab_size": 8, "hidden_size": D, "intermediate_size": F, "num_layers": 1, "num_heads": 1,
    "num_kv_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_positions": 8,
    "windows": (None,), "num_experts": E, "num_active_experts": A,
}  # fmt: skip


def gpt_oss(dtype):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = transformers.GptOssConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=A
    )
    config._experts_implementation = "eager"
    theirs = GptOssMLP(config).to(dtype)
    ours = MoE(
        ModelConfig(
            architecture="gpt_oss", swiglu_limit=7.0, has_router_bias=True, has_expert_bias=True,
            **SHAPE,
        ), 0,
    ).to(dtype)  # fmt: skip
    experts = theirs.experts

    def parts(x):  # gate and up are interleaved there, one after the other here
        return torch.cat([x[..., ::2], x[..., 1::2]], -1)

    pairs = {
        "router.weight": (theirs.router.weight, lambda x: x),
        "router.bias": (theirs.router.bias, lambda x: x),
        "gate_up_proj": (experts.gate_up_proj, lambda x: parts(x).transpose(1, 2)),
        "gate_up_bias": (experts.gate_up_proj_bias, parts),
        "down_proj": (experts.down_proj, lambda x: x.transpose(1, 2)),
        "down_bias": (experts.down_proj_bias, lambda x: x),
    }
    return ours, theirs, pairs, lambda x: theirs(x[None])[0][0]


def qwen3_moe(dtype, *, norm_topk_prob):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=A,
        norm_topk_prob=norm_topk_prob,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = Qwen3MoeSparseMoeBlock(config).to(dtype)
    shape = ModelConfig(architecture="qwen3", has_normalized_routes=norm_topk_prob, **SHAPE)
    ours = MoE(shape, 0).to(dtype)
    pairs = {
        "router.weight": (theirs.gate.weight, lambda x: x),
        "gate_up_proj": (theirs.experts.gate_up_proj, lambda x: x),
        "down_proj": (theirs.experts.down_proj, lambda x: x),
    }
    return ours, theirs, pairs, lambda x: theirs(x[None])[0]


LAYERS = {
    "gpt_oss": gpt_oss,
    "qwen3_moe": partial(qwen3_moe, norm_topk_prob=True),
    "qwen3_moe, shares of all": partial(qwen3_moe, norm_topk_prob=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_values_and_gradients_are_those_of_transformers(monkeypatch, kind, is_skewed, dtype):
    monkeypatch.setattr(moe_experts, "LEAST_CHUNK", 64)  # several chunks
    monkeypatch.setattr(moe_experts, "ROWS_PER_EXPERT", {"cpu": 16})
    monkeypatch.setattr(moe_experts, "ALL_EXPERTS_MULTIPLIES", 0)
    ours, theirs, pairs, run_theirs = LAYERS[kind](dtype)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(ours.named_parameters())
    assert set(parameters) == set(pairs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
        if is_skewed:  # most tokens to the first experts, none to the last
            router = theirs.router if kind == "gpt_oss" else theirs.gate
            router.weight[:, 0] = torch.linspace(20, -20, E, dtype=dtype)
        for name, (parameter, convert) in pairs.items():
            parameters[name].copy_(convert(parameter))
    x = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
    x[:, 0] = x[:, 0].abs() + 1
    grad = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
    outs, x_grads = [], []
    for run in (lambda x: ours(x, LayerInputs(Ops(), None, None, None)), run_theirs):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.backward(grad)
        outs.append(out.detach())
        x_grads.append(leaf.grad)
    # Qwen3's router weights pass through float32 there, in float64 too.
    digits = 1e-12 if dtype == torch.float64 and kind == "gpt_oss" else 1e-5

    def check(found, wanted, what):
        error = (found - wanted).norm() / wanted.norm().clamp(min=1e-30)
        assert error <= digits, (what, float(error))

    check(*outs, "out")
    check(*x_grads, "x")
    for name, (parameter, convert) in pairs.items():
        check(parameters[name].grad, convert(parameter.grad), name)
