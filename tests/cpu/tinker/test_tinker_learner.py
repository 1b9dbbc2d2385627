"""A learner of Tinker's API: bits of the engine, gradients that add up, saving and loading."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from datums import (
    VOCAB,
    call,
    gradients,
    make_datum,
    make_learner,
    parameters,
    policy_datum,
    step,
    weighted_datum,
)
from test_tinker_graph import REF, build, node

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import CheckpointError
from lockstep.models.lora_config import lora_sites
from lockstep.ops.context import PackedContext
from lockstep.ops.invariant import InvariantOps
from lockstep.tinker.learner import adapter_config
from lockstep.tinker.requests import Datum, ModelSpec, TinkerError
from lockstep.types import Request, SamplingParams

KINDS = ("qwen3", "gpt_oss")
DTYPES = (torch.float32, torch.bfloat16)


def draw(learner, prompts, *, max_tokens=24):
    """(prompt, ids, recorded log-probs) of a reply to each prompt, by the embedded engine over the
    learner's own weights."""
    engine = EmbeddedEngine(learner.decoder, EmbeddedConfig(page_size=16, kv_cache_tokens=4096))

    async def reply(number, prompt):
        request = Request(
            id=str(number),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0),
            seed=number,
        )
        deltas = [delta async for delta in engine.generate(request)]
        ids, logprobs = (
            np.concatenate([getattr(d, name) for d in deltas]) for name in ("token_ids", "logprobs")
        )
        return prompt, ids, logprobs

    async def run():
        return await asyncio.gather(*(reply(i, p) for i, p in enumerate(prompts)))

    return asyncio.run(run())


def sampled_datum(prompt, ids, logprobs):
    """A datum as the cookbook makes it: shifted once, 0 in the prompt."""
    tokens = np.concatenate([prompt, ids])
    blank = np.zeros(len(prompt) - 1, np.float32)
    return Datum(
        token_ids=tokens[:-1],
        inputs={
            "target_tokens": tokens[1:].astype(np.int64),
            "logprobs": np.concatenate([blank, logprobs]),
            "advantages": np.concatenate([blank, np.ones(len(ids), np.float32)]),
        },
    )


def prompts(count=3, length=11):
    rng = np.random.default_rng(5)
    shared = rng.integers(0, VOCAB, length).astype(np.int32)
    other = rng.integers(0, VOCAB, length + 4).astype(np.int32)
    return [shared] * (count - 1) + [other]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_those_that_the_engine_recorded_bit_for_bit(tmp_path, kind, dtype):
    learner = make_learner(tmp_path, kind, ops=InvariantOps(), dtype=dtype)
    for _ in range(2):  # also after an update
        drawn = draw(learner, prompts())
        data = [sampled_datum(*part) for part in drawn]
        for forward_only in (True, False):
            result = call(learner, data, "importance_sampling", forward_only=forward_only)
            for (prompt, _, recorded), logprobs in zip(drawn, result.logprobs, strict=True):
                assert np.array_equal(logprobs[len(prompt) - 1 :], recorded)
            assert result.metrics["kl_sample_train_v1:mean"] == 0.0
            assert result.metrics["kl_sample_train_v2:mean"] == 0.0
            assert result.metrics["ratio:max"] == 1.0
        assert step(learner)["skipped:sum"] == 0.0


def scored_alone(learner, datum):
    """[N] or [N, K] by `Decoder.score`, one column of targets after the other."""
    ids = torch.from_numpy(datum.token_ids).long()
    targets = torch.from_numpy(datum.inputs["target_tokens"]).reshape(len(ids), -1)
    with torch.no_grad():
        columns = [
            learner.decoder.score(
                ids,
                torch.arange(len(ids)),
                PackedContext.of([len(ids)]),
                predictors_N=torch.arange(len(ids)),
                targets_N=column,
            )[0]
            for column in targets.T
        ]
    return torch.stack(columns, -1).numpy().reshape(datum.inputs["target_tokens"].shape)


@pytest.mark.parametrize("budget", [16, 16384])
def test_any_target_is_scored_and_several_of_one_position(tmp_path, budget):
    learner = make_learner(tmp_path, ops=InvariantOps())
    learner.config = replace(learner.config, max_tokens_per_microbatch=budget)
    widths = (None, 3, 1, None, 5)
    data = [weighted_datum(6 + 3 * i, seed=i, width=k) for i, k in enumerate(widths)]
    result = call(learner, data)
    wanted = 0.0
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        assert logprobs.dtype == np.float32
        assert np.array_equal(logprobs, scored_alone(learner, datum))
        wanted -= (logprobs.astype(float) * datum.inputs["weights"]).sum()
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6)


def test_targets_without_a_weight_are_scored_and_give_no_gradient(tmp_path):
    learner = make_learner(tmp_path, ops=InvariantOps())
    whole = weighted_datum(10, width=4)
    weights = whole.inputs["weights"].copy()
    weights[:6] = 0.0
    weights[7, 1:] = 0.0
    inputs = {"target_tokens": whole.inputs["target_tokens"], "weights": weights}
    result = call(learner, [Datum(token_ids=whole.token_ids, inputs=inputs)])
    assert np.array_equal(result.logprobs[0], scored_alone(learner, whole))
    assert result.metrics["tokens:sum"] == (weights != 0).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_autograd_over_the_formula(tmp_path, kind):
    learner = make_learner(tmp_path, kind, dtype=torch.float64)
    data = [weighted_datum(7, seed=1), weighted_datum(9, seed=2, width=3)]
    call(learner, data)
    found = gradients(learner)
    total = 0.0
    for datum in data:
        ids = torch.from_numpy(datum.token_ids).long()
        hidden = learner.decoder(ids, torch.arange(len(ids)), PackedContext.of([len(ids)]))
        logp = (hidden @ learner.decoder.head.T).log_softmax(-1)
        targets = torch.from_numpy(datum.inputs["target_tokens"]).reshape(len(ids), -1)
        weights = torch.from_numpy(datum.inputs["weights"]).reshape(len(ids), -1)
        total = total - (logp.gather(1, targets) * weights).sum()
    parameters = learner.optimizer.parameters
    wanted = torch.autograd.grad(total, list(parameters.values()))
    for name, gradient in zip(parameters, wanted, strict=True):
        # The log-prob head returns float32, and the masters collect in it.
        assert torch.allclose(found[name].double(), gradient, rtol=1e-4, atol=1e-5), name


def test_calls_and_chunks_add_up_to_the_gradient_of_one_call(tmp_path):
    data = [policy_datum(6 + i, seed=i) for i in range(6)]
    one, many = make_learner(tmp_path), make_learner(tmp_path)
    whole = call(one, data, "importance_sampling").metrics
    parts = [call(many, data[i : i + 2], "importance_sampling").metrics for i in (0, 2, 4)]
    assert sum(m["loss:sum"] for m in parts) == pytest.approx(whole["loss:sum"], rel=1e-6)
    for name, gradient in gradients(one).items():
        distance = (gradients(many)[name] - gradient).norm()  # single numbers may nearly cancel
        assert distance <= 1e-5 * gradient.norm(), name
    assert step(one)["grad_norm:mean"] == pytest.approx(step(many)["grad_norm:mean"], rel=1e-5)


def test_a_forward_alone_leaves_no_gradient(tmp_path):
    learner = make_learner(tmp_path)
    before = parameters(learner)
    call(learner, [policy_datum()], "ppo", forward_only=True)
    assert not gradients(learner)
    assert step(learner) == {"skipped:sum": 1.0, "grad_norm:mean": 0.0}
    assert "none had a weight or an advantage" in learner.last_skip
    assert all(torch.equal(p, before[n]) for n, p in parameters(learner).items())
    assert (learner.version, learner.num_skipped) == (0, 1)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_an_update_is_that_of_torch_with_the_settings_of_its_call(tmp_path, clip):
    learner, twin = make_learner(tmp_path), make_learner(tmp_path)
    mine, theirs = (
        [p for _, p in sorted(each.optimizer.parameters.items())] for each in (learner, twin)
    )
    adam = torch.optim.AdamW(theirs, lr=1.0)
    for number in range(3):
        settings = {"lr": 1e-2 / (number + 1), "eps": 1e-3, "weight_decay": 0.1 * number}
        adam.param_groups[0].update(betas=(0.8, 0.95 - 0.1 * number), **settings)
        call(learner, [weighted_datum(8, seed=number)])
        for p, own in zip(theirs, mine, strict=True):
            p.grad = own.grad.clone()
        norm = torch.nn.utils.get_total_norm([p.grad for p in theirs])
        metrics = step(
            learner,
            learning_rate=settings["lr"],
            beta1=0.8,
            beta2=0.95 - 0.1 * number,
            eps=1e-3,
            weight_decay=0.1 * number,
            grad_clip_norm=clip,
        )
        assert metrics == {"skipped:sum": 0.0, "grad_norm:mean": pytest.approx(float(norm))}
        if 0 < clip < norm:
            for p in theirs:
                p.grad.mul_(clip / norm)
        adam.step()
    for name, value in parameters(learner).items():
        assert torch.allclose(value, twin.optimizer.parameters[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("loss", ["cross_entropy", "custom"])
def test_a_gradient_that_is_not_finite_makes_no_update_and_the_next_one_works(tmp_path, loss):
    learner = make_learner(tmp_path)
    call(learner, [weighted_datum()])
    step(learner)
    before = parameters(learner)
    if loss == "custom":
        scaled = node("torch.mul", REF, {"float": "inf"}, name="y")
        infinite = build(scaled, node("torch.sum", {"ref": "y"}))
        call(learner, [make_datum()], "custom", custom=infinite)
        reason = "the gradient is not finite"
    else:
        parameter = next(iter(learner.optimizer.parameters.values()))
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(float("nan"))
        call(learner, [weighted_datum(5, seed=1), weighted_datum(6, seed=2)])
        with torch.no_grad():
            parameter.copy_(kept)
        reason = "datum 1 of a forward_backward has the log-prob nan"
    metrics = step(learner)
    assert metrics["skipped:sum"] == 1.0
    assert np.isfinite(list(metrics.values())).all()
    assert learner.last_skip.startswith(reason)
    assert all(torch.equal(p, before[n]) for n, p in parameters(learner).items())
    call(learner, [weighted_datum()])
    assert step(learner)["skipped:sum"] == 0.0
    assert learner.last_skip == "" and (learner.version, learner.num_skipped) == (2, 1)


def test_a_call_that_fails_half_way_makes_no_update(tmp_path):
    learner = make_learner(tmp_path)
    call(learner, [weighted_datum()])
    square = node("torch.reshape", REF, [3, 3], name="y")
    failing = build(square, node("torch.sum", {"ref": "y"}))
    with pytest.raises(TinkerError, match=r"\b1\b"):
        call(learner, [make_datum(9), make_datum(8)], "custom", custom=failing)
    assert step(learner)["skipped:sum"] == 1.0
    assert "failed before it had ended (custom loss" in learner.last_skip


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize("kind, dtype", [("qwen3", None), ("gpt_oss", torch.bfloat16)])
def test_a_loaded_model_continues_to_the_same_bits(tmp_path, kind, dtype, rank):
    def train(learner, seeds):
        for seed in seeds:
            call(learner, [weighted_datum(8, seed=seed)])
            step(learner, weight_decay=0.1)

    straight = make_learner(tmp_path / "base", kind, dtype=dtype, rank=rank)
    train(straight, range(2))
    straight.save(tmp_path / "saved")
    other = make_learner(tmp_path / "base", kind, dtype=dtype, rank=rank, seed=0)
    train(other, range(5, 6))
    call(other, [weighted_datum()])  # not applied: dropped by load
    other.load(tmp_path / "saved")
    assert (other.version, other.num_skipped) == (2, 0)
    for learner in (straight, other):
        train(learner, range(2, 4))
    for name, value in parameters(other).items():
        assert torch.equal(value, straight.optimizer.parameters[name]), name


def test_weights_alone_begin_a_new_optimizer_and_say_so_if_more_is_asked(tmp_path):
    learner = make_learner(tmp_path / "base")
    call(learner, [weighted_datum()])
    step(learner)
    learner.save(tmp_path / "saved", weights_only=True)
    assert not (tmp_path / "saved" / "training").exists()
    other = make_learner(tmp_path / "base")
    other.load(tmp_path / "saved", weights_only=True)
    for name, value in parameters(other).items():
        assert torch.equal(value, learner.optimizer.parameters[name]), name
    assert other.version == 0 and not {t.name: t.view() for t in other.optimizer.state_tensors()}
    with pytest.raises(CheckpointError, match="training"):
        other.load(tmp_path / "saved")


def test_a_checkpoint_of_another_shape_is_refused_and_changes_nothing(tmp_path):
    learner = make_learner(tmp_path / "base", rank=4)
    learner.save(tmp_path / "saved")
    other = make_learner(tmp_path / "base", rank=2)
    before = parameters(other)
    with pytest.raises(CheckpointError, match=r"rank 4,.*rank 2,"):
        other.load(tmp_path / "saved")
    assert all(torch.equal(p, before[n]) for n, p in parameters(other).items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_flags_choose_what_is_adapted_and_the_scale_is_32_by_rank(tmp_path, kind):
    both = make_learner(tmp_path, kind).decoder
    assert both.lora.scale == 32 / 4
    assert [s.name for s in both.lora.sites] == [s.name for s in lora_sites(both.config)]
    attention = make_learner(tmp_path, kind, train_mlp=False).decoder
    assert {s.group for s in attention.lora.sites} == {"attention"}
    mlp = make_learner(tmp_path, kind, train_attn=False).decoder
    assert {s.group for s in mlp.lora.sites} == {"mlp" if kind == "qwen3" else "experts"}
    nothing = ModelSpec(base_model="tiny", rank=4, train_mlp=False, train_attn=False)
    with pytest.raises(TinkerError, match="train_unembed"):
        adapter_config(nothing, both.config)


def test_a_request_that_cannot_be_computed_is_refused_and_changes_nothing(tmp_path):
    learner = make_learner(tmp_path)
    call(learner, [weighted_datum()])
    before = gradients(learner)
    with pytest.raises(TinkerError, match=r"\b1\b.*'weights'") as raised:
        call(learner, [weighted_datum(), make_datum()])
    assert raised.value.status == 422
    assert all(torch.equal(g, before[n]) for n, g in gradients(learner).items())
    assert step(learner)["skipped:sum"] == 0.0
