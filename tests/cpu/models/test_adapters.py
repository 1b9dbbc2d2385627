"""Decoders over one base, and the products of rows that have different adapters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_configs import tiny_config
from watched_ops import CrowdedOps

from lockstep.models.adapter_rows import Groups
from lockstep.models.adapters import AdapterStacks, decoder_over
from lockstep.models.attention_config import LatentShape
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import copy_decoder
from lockstep.models.lora import adapter_scaled, add_adapter
from lockstep.models.lora_config import LoraConfig, adapter_shapes, lora_shape, product_shapes
from lockstep.models.shapes import num_elements
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps
from lockstep.ops.selftest import adapter_failure
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Sample

CONFIG = tiny_config(
    "gpt_oss", vocab_size=41, max_positions=64, windows=(8, None), tie_embeddings=False
)
LATENT = replace(
    CONFIG, architecture="deepseek_v3", has_sinks=False, has_attention_bias=False,
    windows=(None, None), num_kv_heads=1, num_heads=3, head_dim=12, swiglu_limit=0.0,
    has_router_bias=False, has_expert_bias=False,
    latent=LatentShape(
        query_rank=14, kv_rank=20, nope_dim=8, rope_dim=4, value_dim=10, is_interleaved=True
    ),
)  # fmt: skip
CPU = torch.device("cpu")


def make_base(ops=None, config=CONFIG):
    base = Decoder(config, ops=ops or InvariantOps())
    base.init_weights(std=0.3, seed=0)
    return base


def put_adapter(model, *, seed, rank=4, **lora):
    add_adapter(model, lora_shape(LoraConfig(rank=rank, **lora), model.config), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(model):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def run(model, lengths, adapters=None, *, seed=3):
    ids = torch.randint(41, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        return model(ids, positions, PackedContext.of(lengths), None, adapters)


# -- training ---------------------------------------------------------------------------------


def test_a_decoder_over_a_base_has_its_very_parameters_and_they_are_frozen():
    base = make_base()
    one, other = (put_adapter(decoder_over(base), seed=seed) for seed in (1, 2))
    assert not trained(base)
    for name, parameter in base.named_parameters():
        assert one.get_parameter(name) is parameter is other.get_parameter(name)
    own = num_elements(adapter_shapes(one.lora))
    assert sum(p.numel() for p in trained(one)) == own
    assert one.rope_tables is base.rope_tables and one.ops is base.ops
    assert base.lora is None and not torch.equal(run(one, [9]), run(other, [9]))
    assert torch.equal(run(decoder_over(one), [9]), run(base, [9])), "without its adapter"


def rows_of(seed, *, advantage=1.0):
    rng = np.random.default_rng(seed)
    out = []
    for i, length in enumerate((20, 9, 31)):
        out.append(
            Sample(
                id=f"{seed}/{i}",
                token_ids=rng.integers(0, 41, length).astype(np.int32),
                loss_mask=np.arange(length) > 2,
                columns={"advantages": np.full(length, advantage * rng.normal(), np.float32)},
            )
        )
    return out


def trainer_of(model, **settings):
    return Trainer(model, TrainerConfig(lr=1e-2, **settings), like="unused")


def update(trainer, rows):
    trainer.forward_backward(rows, make_loss(Reinforce()), column="logprobs")
    trainer.optim_step()


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_adapters_trained_in_turn_over_one_base_are_those_trained_on_copies(recompute):
    base = make_base()
    copies = [copy_decoder(base) for _ in range(2)]
    together = [trainer_of(put_adapter(decoder_over(base), seed=i, rank=3 + i)) for i in range(2)]
    alone = [
        trainer_of(put_adapter(copy, seed=i, rank=3 + i), recompute=recompute)
        for i, copy in enumerate(copies)
    ]
    before = {name: p.clone() for name, p in base.named_parameters()}
    for step in range(3):
        for i in (0, 1):
            update(together[i], rows_of(10 * i + step))
    for i in (0, 1):
        for step in range(3):
            update(alone[i], rows_of(10 * i + step))
        for mine, theirs in zip(trained(together[i].model), trained(alone[i].model), strict=True):
            assert torch.equal(mine, theirs)
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None


def test_an_adapter_that_is_not_a_number_or_diverges_leaves_the_other_as_it_is():
    base = make_base()
    calm, wild = (trainer_of(put_adapter(decoder_over(base), seed=i)) for i in range(2))
    alone = trainer_of(put_adapter(copy_decoder(base), seed=0))
    for step in range(3):
        update(wild, rows_of(5, advantage=1e30 if step else 1.0))
        with torch.no_grad():
            trained(wild.model)[0].fill_(float("nan"))
        update(calm, rows_of(step))
        update(alone, rows_of(step))
    assert not np.isfinite(wild.forward(rows_of(5), column=None)[0][5])
    for mine, theirs in zip(trained(calm.model), trained(alone.model), strict=True):
        assert torch.equal(mine, theirs)


# -- rows of several adapters -----------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=90).filter(lambda g: max(g) >= 0))
def test_every_row_is_multiplied_in_its_group_once(group_of_row):
    group_T = np.array(group_of_row)
    groups = Groups.of(group_T, 5, CPU)
    x_T = torch.arange(len(group_T)) + 100
    of_product = torch.arange(5).repeat_interleave(torch.tensor(groups.counts))
    found = torch.stack([x_T[groups.source_P], of_product])[:, groups.places_T]
    is_member = torch.from_numpy(group_T) >= 0
    assert (groups.is_member_T1 is None) == is_member.all()
    assert groups.is_member_T1 is None or torch.equal(groups.is_member_T1[:, 0], is_member)
    assert torch.equal(found[0][is_member], x_T[is_member])
    assert torch.equal(found[1][is_member], torch.from_numpy(group_T)[is_member])


@pytest.mark.parametrize("ops", [Ops(), InvariantOps()], ids=["plain", "invariant"])
@pytest.mark.parametrize(
    ("config", "part"), [(CONFIG, "*.k_proj"), (LATENT, "*.kv_b_proj")], ids=["keys", "latents"]
)
def test_rows_of_several_adapters_compute_what_each_computes_alone(config, part, ops):
    base = make_base(ops, config)
    kinds = [{}, {}, {"rank": 2}, {"targets": ("experts",)}, {"targets": (part,)}]
    models = [base, *(put_adapter(decoder_over(base), seed=i, **k) for i, k in enumerate(kinds))]
    stacks = AdapterStacks()
    for number, model in enumerate(models[1:], 1):
        stacks.put(number, model, base)
    for lengths, numbers in (
        ([1, 1, 1, 1], [1, 2, 1, 2]),
        ([1, 1, 1], [1, 0, 1]),
        ([20, 1, 3, 9, 1, 2, 40, 4], [4, 0, 1, 2, 3, 2, 5, 5]),
        ([60, 60, 60], [1, 2, 3]),
    ):
        found = run(base, lengths, stacks.rows(base, np.repeat(numbers, lengths)))
        for number, part in zip(numbers, range(len(lengths)), strict=True):
            mine = slice(sum(lengths[:part]), sum(lengths[: part + 1]))
            alone = run(models[number], lengths)[mine]
            if isinstance(ops, InvariantOps):
                assert torch.equal(found[mine], alone)
            else:  # other orders of summing, over two layers
                assert torch.allclose(found[mine], alone, atol=1e-4)


def test_rows_without_a_name_have_the_bases_own_adapter():
    base = make_base()
    named = put_adapter(decoder_over(base), seed=1)
    put_adapter(base, seed=2, rank=3)
    stacks = AdapterStacks()
    stacks.put(1, named, base)
    numbers = np.repeat([0, 1], [5, 5])
    wanted = torch.cat([run(base, [5, 5])[:5], run(named, [5, 5])[5:]])
    assert torch.equal(run(base, [5, 5], stacks.rows(base, numbers)), wanted)
    with adapter_scaled(base, 0):
        off = run(base, [5, 5], stacks.rows(base, numbers))
        assert torch.equal(off[:5], run(base, [5, 5])[:5])
    assert torch.equal(off[5:], wanted[5:]) and not torch.equal(off[:5], wanted[:5])


def test_an_adapter_is_replaced_in_place_and_dropped():
    base = make_base()
    models = [put_adapter(decoder_over(base), seed=i) for i in range(3)]
    stacks = AdapterStacks()
    for number in (1, 2):
        stacks.put(number, models[number - 1], base)
    stacks.put(3, models[2], base, replacing=1)
    numbers = np.repeat([2, 3], [4, 4])
    wanted = torch.cat([run(models[1], [4, 4])[:4], run(models[2], [4, 4])[4:]])
    assert torch.equal(run(base, [4, 4], stacks.rows(base, numbers)), wanted)
    stacks.drop(2)
    assert torch.equal(run(base, [4, 4], stacks.rows(base, np.full(8, 3))), run(models[2], [4, 4]))
    wider = put_adapter(decoder_over(base), seed=4, rank=6)
    stacks.put(4, wider, base, replacing=3)
    assert torch.equal(run(base, [4, 4], stacks.rows(base, np.full(8, 4))), run(wider, [4, 4]))


def test_the_self_test_finds_products_that_depend_on_how_many_adapters_there_are():
    shapes = adapter_shapes(lora_shape(LoraConfig(rank=4), CONFIG)).values()
    settings = {"dtype": torch.float32, "device": CPU}
    assert adapter_failure(InvariantOps(), shapes, **settings) == ""
    assert "expert_linear: float32 [305, 32] x [12, 32]" in adapter_failure(
        CrowdedOps(), shapes, **settings
    )


def test_the_self_test_tries_an_adapter_of_latents_head_by_head():
    shape = lora_shape(LoraConfig(rank=4), LATENT)
    of_heads = {(3, 4, 8), (3, 20, 4), (3, 4, 20), (3, 10, 4)}
    assert product_shapes(shape, LATENT) == {*adapter_shapes(shape).values(), *of_heads}
    without = lora_shape(LoraConfig(rank=4, targets=("*.o_proj",)), LATENT)
    assert product_shapes(without, LATENT) == {*adapter_shapes(without).values()}
