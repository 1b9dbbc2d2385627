"""Replies constrained by a grammar: what is drawn, and that the trainer gives it the same bits."""

import asyncio
import json
import sys

import numpy as np
import pytest
import torch
from engine_models import request as make_request
from tiny_configs import tiny_config

from lockstep.agent.gateway.exchange import TurnRequest
from lockstep.agent.gateway.session import GatewaySession
from lockstep.agent.turns import Budget, TurnSampler
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.grammar import grammar_problem
from lockstep.errors import MissingExtraError
from lockstep.models.decoder import Decoder
from lockstep.objectives.config import GRPO, Reinforce
from lockstep.ops.context import PackedContext, Support
from lockstep.ops.invariant import InvariantOps
from lockstep.renderers.base import Constraint
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.training.config import TrainerConfig
from lockstep.training.rows import rows_for_training
from lockstep.training.trainer import Trainer
from lockstep.types import (
    Group,
    Message,
    Ragged,
    SamplingParams,
    Task,
    ToolSchema,
    Trajectory,
    listed_ids,
    pack_support,
    packed_tokens,
)

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TOOLS = tuple(ToolSchema(name=name, description="", parameters=SCHEMA) for name in ("look", "find"))
TOKENIZER = byte_tokenizer(merges=[("t", "r"), ("tr", "u"), ("2", "2")])
RENDERERS = {
    "chatml": ChatMLRenderer(TOKENIZER, ChatMLConfig(enable_thinking=False)),
    "harmony": HarmonyRenderer(TOKENIZER, HarmonyConfig(stop_at_end=True)),
}
USER = [Message(role="user", content="hi")]


def make_model(vocab_size, ops=None):
    model = Decoder(tiny_config("qwen3", vocab_size=vocab_size), ops=ops)
    model.init_weights(std=0.4, seed=0)
    return model


def draw(renderer, constraint, *, num=4, vocab_size=400, ops=None, **sampling):
    """(model, deltas, prompt) of replies that the constraint holds for."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    model = make_model(vocab_size, ops)
    config = EmbeddedConfig(page_size=16, kv_cache_tokens=8192, max_num_sequences=16)
    engine = EmbeddedEngine(
        model, config, token_bytes=TOKENIZER.all_token_bytes(), control_ids=TOKENIZER.control_ids
    )
    prompt = np.array(renderer.render(USER), np.int32)
    asked = {"max_tokens": 200, "distribution": "sampled", "record_support": True}
    asked |= {"stop_ids": renderer.stop_ids, "grammar": renderer.grammar(constraint)}

    async def one(seed):
        request = make_request(f"r{seed}", prompt, seed=seed, **(asked | sampling))
        return [delta async for delta in engine.generate(request)][-1]

    async def run():
        return await asyncio.gather(*(one(seed) for seed in range(num)))

    return model, asyncio.run(run()), prompt


@pytest.mark.parametrize("kind", RENDERERS)
def test_a_reply_is_json_of_the_schema_and_a_forced_call_has_the_tools_arguments(kind):
    renderer = RENDERERS[kind]
    for delta in draw(renderer, Constraint(schema=SCHEMA))[1]:
        found = json.loads(renderer.parse(delta.token_ids).content)
        assert found.keys() == {"ok", "n"} and found["n"] in (1, 22, 333)
        assert delta.finish_reason == "stop"
    for delta in draw(renderer, Constraint(tools=TOOLS))[1]:
        message = renderer.parse(delta.token_ids)
        (call,) = message.tool_calls
        assert call.name in ("look", "find") and json.loads(call.arguments)["n"] in (1, 22, 333)
        assert not message.content and not message.parse_error


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"'llguidance'.*\[grammar\]"):
        grammar_problem("start: /a/")


def test_a_tools_schema_may_refer_to_its_own_definitions():
    parameters = {
        "type": "object",
        "properties": {"town": {"$ref": "#/$defs/Town"}},
        "required": ["town"],
        "additionalProperties": False,
        "$defs": {"Town": {"enum": ["Oslo", "Bonn"]}},
    }
    tool = ToolSchema(name="look", description="", parameters=parameters)
    for renderer in RENDERERS.values():
        for delta in draw(renderer, Constraint(tools=(tool,)))[1]:
            (call,) = renderer.parse(delta.token_ids).tool_calls
            assert json.loads(call.arguments)["town"] in ("Oslo", "Bonn")


def test_thinking_stays_free_and_no_text_spells_a_control_token():
    for renderer in (ChatMLRenderer(TOKENIZER), HarmonyRenderer(TOKENIZER)):
        schema = {"type": "string", "maxLength": 5}
        for delta in draw(renderer, Constraint(schema=schema), num=8, max_tokens=60)[1]:
            message = renderer.parse(delta.token_ids)
            if delta.finish_reason == "stop":
                assert len(json.loads(message.content)) <= 5
            else:
                assert len(delta.token_ids) == 60


def test_a_greedy_reply_and_filters_are_constrained_as_well():
    renderer = RENDERERS["chatml"]
    for how in ({"temperature": 0.0, "record_support": False}, {"top_k": 2}, {"top_p": 0.5}):
        for delta in draw(renderer, Constraint(schema=SCHEMA), **how)[1]:
            assert json.loads(renderer.parse(delta.token_ids).content).keys() == {"ok", "n"}


def test_the_trainers_log_probs_over_the_support_are_the_samplers_bit_for_bit():
    renderer = RENDERERS["chatml"]
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 2}
    model, deltas, prompt = draw(
        renderer,
        Constraint(schema=schema),
        num=6,
        ops=InvariantOps(),
        temperature=0.8,
        vocab_size=3000,
    )
    assert any(len(delta.token_ids) > 20 for delta in deltas)
    for delta in deltas:
        ids = torch.from_numpy(np.concatenate([prompt, delta.token_ids]).astype(np.int64))
        hidden = model(ids, torch.arange(len(ids)), PackedContext.of([len(ids)]))
        hidden = hidden[len(prompt) - 1 : -1]
        found = model.ops.log_probs(
            hidden,
            model.head,
            ids[len(prompt) :],
            temperature=0.8,
            support=Support.of(delta.support),
        )[0]
        assert torch.equal(found.detach(), torch.from_numpy(delta.logprobs.copy()))


def test_a_large_support_is_packed_and_masks_and_checks_as_the_list_does():
    rng, vocab_size = np.random.default_rng(0), 40_001
    kept = rng.random((3, vocab_size)) < np.array([[0.9], [0.001], [0.5]])
    packed = Ragged.of_rows([pack_support(row) for row in kept])
    assert packed_tokens(packed).tolist() == [True, False, True]
    assert packed.sizes.tolist() == [1252, kept[1].sum(), 1252]
    assert listed_ids(packed).tolist() == np.flatnonzero(kept[1]).tolist()
    support = Support.of(packed)
    assert np.array_equal(support.mask(slice(None), vocab_size).numpy(), kept)
    columns = slice(17, 30_000)
    assert np.array_equal(support.mask(slice(1, 3), vocab_size, columns).numpy(), kept[1:, columns])
    taken = support.take(torch.tensor([2, 0])).mask(slice(None), vocab_size)
    assert np.array_equal(taken.numpy(), kept[[2, 0]])


async def test_a_training_step_of_constrained_and_free_episodes_is_exact(tmp_path):
    """Sampler and trainer agree on every token, of both kinds of rows in one batch."""
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    renderer = RENDERERS["chatml"]
    trainer = Trainer(make_model(400, InvariantOps()), TrainerConfig(lr=1e-2), like=tmp_path)
    engine = EmbeddedEngine(
        trainer.model,
        EmbeddedConfig(page_size=16, kv_cache_tokens=8192),
        token_bytes=TOKENIZER.all_token_bytes(),
        control_ids=TOKENIZER.control_ids,
    )

    async def episode(at):
        sampler = TurnSampler(
            engine,
            renderer,
            Trajectory(id=f"s{at}"),
            sampling=SamplingParams(max_tokens=60, stop_ids=renderer.stop_ids),
            budget=Budget(max_tokens=400, max_turns=4, max_turn_tokens=60),
        )
        session = GatewaySession(sampler, seed=at)
        constraint = Constraint(schema=SCHEMA) if at % 2 else None
        await session.reply(TurnRequest(messages=tuple(USER), constraint=constraint))
        await session.set_reward(float(at < 2), parts={})
        await session.finish()
        return session.trajectory

    trajectories = [await episode(at) for at in range(4)]
    rows = rows_for_training([Group(task=Task(id="t"), trajectories=trajectories)], GRPO())
    assert len(rows) == 4 and all("support" in row.ragged for row in rows)
    metrics = trainer.update(rows, Reinforce())
    assert metrics["mismatch/unequal_tokens"] == metrics["mismatch/k3"] == 0
    assert metrics["train/grad_norm"] > 0


def test_the_gradient_is_that_of_the_constrained_log_prob():
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 16, generator=rng, requires_grad=True)
    weight = torch.randn(3000, 16, generator=rng, requires_grad=True)
    kept = torch.rand(5, 3000, generator=rng) < 0.6
    ids = kept.int().argmax(1)
    support = Support.of(Ragged.of_rows([pack_support(row) for row in kept.numpy()]))
    assert support.is_packed.all()
    found = InvariantOps().log_probs(hidden, weight, ids, temperature=0.7, support=support)[0]
    wanted = torch.log_softmax(
        (hidden.double() @ weight.double().T / 0.7).masked_fill(~kept, -torch.inf), -1
    ).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (hidden, weight)),
        torch.autograd.grad(wanted.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)  # float32 sums of 1,800 terms
