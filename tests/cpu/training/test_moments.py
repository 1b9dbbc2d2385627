"""AdamW's moments in 8 bits, and its state in the host's memory."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from tiny_training import KINDS, assert_same_bits, make_rows, make_trainer, snapshot
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import CheckpointError, ConfigError
from lockstep.objectives.losses import TokenLoss
from lockstep.training import moments
from lockstep.training.config import TrainerConfig
from lockstep.training.moments import QuantizedMoment, quantized_adamw, zero_moments
from lockstep.training.optimizer import Optimizer
from lockstep.training.precision import is_quantized, moment_bytes

WIDE = {"hidden_size": 96, "intermediate_size": 80, "head_dim": 24}  # matrices of 8-bit size
SHAPE = (40, 700)  # two whole blocks and a short one per row


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment_of(values, *, is_signed=True):
    moment = QuantizedMoment.zeros_like(values, is_signed=is_signed)
    moment.write(values)
    return moment


# -- codes ----------------------------------------------------------------------------------------


def test_a_value_comes_back_within_half_a_code_of_the_fourth_root():
    values = randn(*SHAPE) * torch.exp(3 * randn(*SHAPE, seed=1))
    top = torch.cat(
        [part.abs().amax(-1, keepdim=True).expand_as(part) for part in values.split(256, -1)], -1
    )
    for is_signed, levels in ((True, 127), (False, 255)):
        given = values if is_signed else values.abs()
        found = moment_of(given, is_signed=is_signed).read()
        gap = (found.abs() / top).pow(0.25) - (given.abs() / top).pow(0.25)
        assert gap.abs().max() <= (0.5 if is_signed else 1.0) / levels + 1e-5
        assert (found * given >= 0).all()
        largest = given.abs() == top
        # Two multiplications and a division, each rounded: a few units of the last place.
        torch.testing.assert_close(found[largest], given[largest], rtol=1e-6, atol=0)


def test_a_second_moment_never_becomes_zero_beside_a_first_one_that_has_not():
    gradient = torch.full((1, 256), 1e-9)
    gradient[0, 0] = 1.0
    second = moment_of(gradient.square(), is_signed=False)
    assert (second.read() > 0).all() and int(second.codes.min()) == 1


def test_nothing_is_made_of_a_zero():
    zeros = torch.zeros(SHAPE)
    assert torch.equal(moment_of(zeros).read(), zeros)
    assert torch.equal(moment_of(zeros, is_signed=False).read(), zeros)
    tiny = moment_of(torch.full(SHAPE, 1e-44))  # a denormal number
    assert torch.isfinite(tiny.read()).all()


def test_rows_that_are_sharded_have_the_codes_of_the_whole():
    values = randn(*SHAPE)
    whole, parts = moment_of(values), [moment_of(part) for part in values.split([13, 20, 7])]
    assert torch.equal(whole.codes, torch.cat([p.codes for p in parts]))
    assert torch.equal(whole.scales, torch.cat([p.scales for p in parts]))


def test_embeddings_norms_and_small_tensors_keep_32_bits():
    wide = torch.Size((512, 64))
    assert is_quantized("layers.0.mlp.down_proj.weight", wide)
    assert is_quantized("untied_head", wide)
    for name, shape in (("embedding", wide), ("final_norm", (9000,)), ("weight", (32, 64))):
        assert not is_quantized(name, torch.Size(shape)), name


# -- the update -----------------------------------------------------------------------------------


def test_the_first_update_is_that_of_float32():
    start, gradient = randn(*SHAPE), randn(*SHAPE, seed=1)
    stock = start.clone().requires_grad_()
    stock.grad = gradient.clone()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    torch.optim.AdamW([stock], **settings).step()
    pair = zero_moments(start)
    ours = start.clone()
    quantized_adamw(ours, gradient.t().contiguous().t(), pair, update=1, **settings)
    torch.testing.assert_close(ours, stock.detach(), rtol=1e-6, atol=1e-7)


def test_no_moment_is_ever_float32_as_a_whole(monkeypatch):
    monkeypatch.setitem(moments.CHUNK_ELEMENTS, "cpu", 2048)
    start, gradient = randn(64, 1024), randn(64, 1024, seed=1)
    pair = zero_moments(start)
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
                largest.append(out.untyped_storage().nbytes())
            return out

    with Watch():
        quantized_adamw(
            start, gradient, pair, update=1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
    assert largest and max(largest) <= 4 * 2048


@pytest.mark.parametrize("kind", KINDS)
def test_training_in_8_bits_tracks_training_in_32(tmp_path, kind):
    """12 updates, in which float32 learns the rows; the band is 2 % of where it began."""
    losses = {}
    for bits in (32, 8):
        trainer = make_trainer(tmp_path, kind, hf=WIDE, lr=3e-3, optimizer_bits=bits)
        rows = make_rows([30] * 6)
        losses[bits] = [learn(trainer, rows) for _ in range(12)]
    first, last = losses[32][0], losses[32][-1]
    assert last < first / 100
    gaps = np.abs(np.array(losses[8]) - losses[32])
    assert gaps.max() < 0.02 * first, (gaps.max(), first)
    assert gaps.max() > 0


def learn(trainer, rows):
    """One update towards the rows' own tokens; their mean negative log-prob before it."""
    found = trainer.forward_backward(rows, lambda tokens: TokenLoss(loss=-tokens.logprobs))
    trainer.optim_step()
    return found["train/loss"]


def test_matrices_take_little_more_than_two_bytes_of_state_per_weight(tmp_path):
    trainer = make_trainer(tmp_path, "gpt_oss", optimizer_bits=8, hf=WIDE | {"hidden_size": 2880})
    learn(trainer, make_rows([12]))
    state = trainer.optimizer.state_tensors()
    weights = num_bytes = planned = 0
    for name, parameter in trainer.model.named_parameters():
        if is_quantized(name, parameter.shape) and parameter.shape[-1] == 2880:
            weights += parameter.numel()
            planned += 2 * moment_bytes(name, parameter.shape, bits=8)
            num_bytes += sum(
                t.numel() * t.element_size()
                for key, t in state.items()
                if key.endswith("/" + name) and not key.startswith("step/")
            )
    assert weights > 1_000_000
    assert num_bytes == planned
    assert num_bytes / weights == pytest.approx(2 + 2 * 4 * 12 / 2880, abs=1e-3)  # 2.033


# -- its checkpoint -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_resumed_run_continues_with_the_same_bits(tmp_path, dtype):
    options = {"hf": WIDE, "dtype": dtype, "optimizer_bits": 8}
    straight = make_trainer(tmp_path / "model", "gpt_oss", **options)
    rows = make_rows([20, 14])
    learn(straight, rows)
    learn(straight, rows)
    straight.save(tmp_path / "kept")
    resumed = make_trainer(tmp_path / "model", "gpt_oss", seed=9, **options)
    resumed.load(tmp_path / "kept")
    assert_same_bits(snapshot(resumed), snapshot(straight))
    assert learn(resumed, rows) == learn(straight, rows)
    assert_same_bits(snapshot(resumed), snapshot(straight))


@pytest.mark.parametrize(("before", "after"), [(32, 8), (8, 32)])
def test_moments_of_other_bits_are_converted_and_the_log_says_so(tmp_path, caplog, before, after):
    rows = make_rows([20, 14])
    written = make_trainer(tmp_path / "model", hf=WIDE, optimizer_bits=before)
    learn(written, rows)
    written.save(tmp_path / "kept")
    reader = make_trainer(tmp_path / "model", hf=WIDE, optimizer_bits=after)
    with caplog.at_level(logging.WARNING):
        reader.load(tmp_path / "kept")
    assert f"converted to trainer.optimizer_bits={after}" in caplog.text
    name = "layers.0.mlp.down_proj.weight"
    found, given = (first_moment(t.optimizer, name) for t in (reader, written))
    # Half a code of the fourth root: 4 / 2 / 127 of the block's largest value.
    assert given.abs().max() > 0 and (found - given).abs().max() <= 0.016 * given.abs().max()
    learn(reader, rows)
    assert not reader.last_skip


def first_moment(optimizer, name):
    state = optimizer.state_tensors()
    if f"exp_avg/{name}" in state:
        return state[f"exp_avg/{name}"]
    return QuantizedMoment(state[f"exp_avg_codes/{name}"], state[f"exp_avg_scales/{name}"]).read()


def test_codes_of_another_shape_are_refused_and_nothing_is_changed(tmp_path):
    trainer = make_trainer(tmp_path, hf=WIDE, optimizer_bits=8)
    learn(trainer, make_rows([20]))
    before = snapshot(trainer)
    state = dict(trainer.optimizer.state_tensors())
    name = "layers.0.mlp.down_proj.weight"
    state[f"exp_avg_sq_scales/{name}"] = torch.zeros(3, 1)
    del state["exp_avg_codes/layers.1.mlp.down_proj.weight"]
    with pytest.raises(CheckpointError) as error:
        trainer.optimizer.load_state_tensors(state, where="there")
    assert f"exp_avg_sq_scales/{name}: expected [96, 1], found [3, 1]" in str(error.value)
    assert "unexpected exp_avg_scales/layers.1.mlp.down_proj.weight" in str(error.value)
    assert_same_bits(before, snapshot(trainer))


# -- in the host's memory -------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_in_another_place_gives_the_same_bits(tmp_path, dtype, bits):
    """Both places are the CPU here: what is tested is that gradients, masters and weights find each
    other; copies between devices are not."""
    model = make_trainer(tmp_path, "gpt_oss", hf=WIDE, dtype=dtype).model
    config = TrainerConfig(lr=1e-2, weight_decay=0.1, optimizer_bits=bits)
    found = []
    for offload in ("none", "optimizer"):
        parameters = {
            n: torch.nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()
        }
        optimizer = Optimizer(parameters.items(), dataclasses.replace(config, offload=offload))
        for update in range(3):
            for _ in range(2):  # micro-batches
                for name, parameter in parameters.items():
                    parameter.grad = randn(*parameter.shape, seed=update + len(name)).to(dtype)
                optimizer.collect_gradients()
            norm = float(optimizer.gradient_norm())
            optimizer.step(lr=1e-2, gradient_scale=1 / norm)
        state = optimizer.state_tensors()
        found.append({n: p.detach() for n, p in parameters.items()} | state)
        is_apart = [optimizer.masters[n] is not p for n, p in parameters.items()]
        assert all(is_apart) == (offload == "optimizer" or dtype == torch.bfloat16)
    assert_same_bits(*found)


def test_masters_elsewhere_follow_weights_that_are_loaded(tmp_path):
    model = make_trainer(tmp_path).model
    optimizer = Optimizer(model.named_parameters(), TrainerConfig(offload="optimizer"))
    with torch.no_grad():
        model.final_norm.fill_(3.0)
    optimizer.read_parameters()
    assert (optimizer.masters["final_norm"] == 3.0).all()


def test_offloading_what_is_on_the_cpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"offload=optimizer .* on the CPU: it is there already"):
        make_trainer(tmp_path, offload="optimizer")
