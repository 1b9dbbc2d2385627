"""Adapters on the decoder: what they add, what is trained, what is off, what is merged."""

import copy

import pytest
import torch
from tiny_configs import tiny_config

from lockstep.errors import ConfigError
from lockstep.models.attention_config import LatentShape
from lockstep.models.decoder import Decoder
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.lora import ExpertLowRank, LowRank, adapter_scaled, add_adapter, merged
from lockstep.models.lora_config import LoraConfig, adapter_shapes, lora_shape, lora_sites
from lockstep.models.shapes import num_elements
from lockstep.models.variants import without_sinks
from lockstep.ops.context import PackedContext

COMMON = {"vocab_size": 41, "max_positions": 64, "windows": (8, None), "tie_embeddings": False}
MODELS = {
    "dense": tiny_config("qwen3", **COMMON | {"tie_embeddings": True}),
    "moe": tiny_config("gpt_oss", **COMMON),
    "mixed": tiny_config(
        "qwen3", intermediate_size=24, num_experts=4, num_active_experts=2, dense_layers=(0,),
        dense_intermediate_size=40, **COMMON,
    ),
    "latent": tiny_config(
        "deepseek_v3", head_dim=12,
        latent=LatentShape(
            query_rank=14, kv_rank=20, nope_dim=8, rope_dim=4, value_dim=10, is_interleaved=True
        ),
        **COMMON | {"windows": (None, None)},
    ),
}  # fmt: skip
LENGTHS = [20, 9]


def make(kind, *, dtype=torch.float32, is_trained=True, **lora):
    """An adapted decoder; is_trained: B is not 0 either."""
    model = Decoder(MODELS[kind])
    model.init_weights(std=0.3, seed=0)
    model.to(dtype)
    add_adapter(model, lora_shape(LoraConfig(**{"rank": 3, **lora}), model.config), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (is_trained and ".B" in name) or name.endswith("_lora.B"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def run(model):
    ids = torch.randint(41, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return model.logits(model(ids, positions, PackedContext.of(LENGTHS)))


@pytest.mark.parametrize("kind", MODELS)
def test_a_fresh_adapter_leaves_the_model_as_it_is(kind):
    model = Decoder(MODELS[kind])
    model.init_weights(std=0.3, seed=0)
    before = run(model)
    add_adapter(model, lora_shape(LoraConfig(rank=3), model.config), seed=1)
    assert torch.equal(run(model), before)


@pytest.mark.parametrize("kind", MODELS)
def test_the_merged_model_computes_what_the_adapted_one_does(kind):
    model = make(kind)
    own = {n: merged(model, n, p) for n, p in model.named_parameters() if "lora" not in n}
    plain = Decoder(model.config)
    plain.load_state_dict(own)
    found, wanted = run(plain), run(model)
    with adapter_scaled(model, 0):
        moved = (run(model) - wanted).abs().max()
    assert moved > 0.1
    # Two orders of summing some 48 products of size about 1, in float32.
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_switched_off_it_is_the_base_also_after_an_error():
    model = make("moe")
    adapted = run(model)
    base = Decoder(model.config)
    own = {n: p for n, p in model.named_parameters() if "lora" not in n}
    base.load_state_dict(own)
    with adapter_scaled(model, 0):
        assert torch.equal(run(model), run(base))
        with adapter_scaled(model, 0):
            pass
        assert torch.equal(run(model), run(base))
    with pytest.raises(KeyboardInterrupt), adapter_scaled(model, 0):
        raise KeyboardInterrupt
    assert torch.equal(run(model), adapted)


@pytest.mark.parametrize("kind", MODELS)
def test_only_the_adapter_gets_a_gradient(kind):
    model = make(kind)
    run(model).log_softmax(-1)[:, 0].sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("lora" in name), name
        assert "lora" not in name or parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", ["moe", "latent"])
def test_the_gradient_is_that_of_the_merged_weights(kind):
    """With dW of the model whose weights are merged: dA = scale * B^T dW, dB = scale * dW A^T."""
    model = make(kind, alpha=5.0)
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_("lora" not in name)
    run(model).log_softmax(-1)[:, 0].sum().backward()
    run(twin).log_softmax(-1)[:, 0].sum().backward()
    adapters, others = dict(model.named_modules()), dict(twin.named_modules())
    for name, adapter in adapters.items():
        owner = others[name.rpartition(".")[0]]
        if isinstance(adapter, ExpertLowRank):
            grad = getattr(owner, name.rpartition(".")[2].replace("lora", "proj")).grad
            wanted = adapter.scale * adapter.B.transpose(1, 2) @ grad
            torch.testing.assert_close(adapter.A.grad, wanted, rtol=1e-4, atol=1e-5)
            wanted = adapter.scale * grad @ adapter.A.transpose(1, 2)
            torch.testing.assert_close(adapter.B.grad, wanted, rtol=1e-4, atol=1e-5)
        elif isinstance(adapter, LowRank):
            for number, grad in enumerate(owner.weight.grad.split(adapter.sizes)):
                A, B = adapter.factors(number)
                wanted = adapter.scale * grad @ A.T
                torch.testing.assert_close(adapter.B[number].grad, wanted, rtol=1e-4, atol=1e-5)
                mine = adapter.A.grad[number * adapter.rank : (number + 1) * adapter.rank]
                wanted = adapter.scale * B.T @ grad
                torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_targets_choose_by_group_and_by_name():
    names = lambda kind, *targets: [  # noqa: E731
        site.name for site in lora_shape(LoraConfig(targets=targets), MODELS[kind]).sites
    ]
    assert names("dense") == [site.name for site in lora_sites(MODELS["dense"])]
    assert names("moe", "experts")[:2] == [
        "layers.0.mlp.experts.gate_up_proj",
        "layers.0.mlp.experts.down_proj",
    ]
    assert names("mixed", "mlp") == [f"layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")]
    chosen = names("dense", "*.q_proj", "layers.1.*.v_proj")
    assert chosen == ["layers.0.attention.q_proj"] + [f"layers.1.attention.{x}_proj" for x in "qv"]


def test_a_part_of_a_fused_projection_can_be_adapted_alone():
    model = make("dense", targets=("*.v_proj", "*.up_proj"))
    adapter = model.layers[0].attention.qkv_proj.lora
    x = torch.randn(5, 32)
    base = torch.nn.functional.linear(x, model.layers[0].attention.qkv_proj.weight)
    found = model.layers[0].attention.qkv_proj(x, LayerInputs(model.ops, None, None, None))
    A, B = adapter.factors(0)
    assert torch.equal(found[:, :-16], base[:, :-16])
    torch.testing.assert_close(found[:, -16:], base[:, -16:] + adapter.scale * x @ A.T @ B.T)
    assert model.layers[0].attention.o_proj.lora is None


def test_a_target_that_no_projection_has_is_an_error_with_the_names():
    with pytest.raises(ConfigError, match=r"experts,\*\.q_prj.*layers\.0\.atten"):
        lora_shape(LoraConfig(targets=("attention", "experts", "*.q_prj")), MODELS["dense"])


def test_the_scale_is_alpha_over_rank_or_over_its_root():
    config = MODELS["dense"]
    assert lora_shape(LoraConfig(rank=4, alpha=6), config).scale == 1.5
    assert lora_shape(LoraConfig(rank=4, alpha=6, rslora=True), config).scale == 3
    for bad in ({"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}):
        with pytest.raises(ConfigError, match=r"LoraConfig\.(rank|alpha)="):
            LoraConfig(**bad)


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_counted_without_a_model(kind):
    model = make(kind)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.lora is not None and num_elements(adapter_shapes(model.lora)) == trained


def test_the_start_depends_on_the_seed_alone():
    starts = [make("dense", is_trained=False, dtype=d) for d in (torch.float32, torch.bfloat16)]
    for name, parameter in starts[0].named_parameters():
        other = starts[1].get_parameter(name)
        assert torch.equal(parameter.to(torch.bfloat16), other), name


def test_a_decoder_of_faults_shares_the_adapter_and_what_is_frozen():
    model = make("moe")
    twin = without_sinks(model)
    for name, parameter in model.named_parameters():
        assert twin.get_parameter(name) is parameter
        assert parameter.requires_grad == ("lora" in name)
