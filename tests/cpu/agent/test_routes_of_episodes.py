"""Episodes whose routes are recorded: the training row has those of the position it stands at."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from playing import one_episode, steps_of
from tiny_configs import tiny_config

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import training_sampling
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.engines.registry import check_capabilities
from lockstep.errors import CapabilityError
from lockstep.models.decoder import Decoder
from lockstep.models.moe import Routing
from lockstep.ops.context import PackedContext
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import UNKNOWN_EXPERT, Message

PLAIN = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
RENDERER = HarmonyRenderer(byte_tokenizer(), PLAIN)
ANSWER = RENDERER.render_reply(Message(role="assistant", content="done"))
CONFIG = AgentConfig(max_turns=4, max_turn_tokens=14, continue_cut_turns=True)


class Asks(Environment):
    """Goes on for ever."""

    async def reset(self):
        return [Message(role="user", content="go")]

    async def step(self, message):
        return Observation(messages=[Message(role="user", content="and?")])

    async def score(self):
        return Score(reward=1.0)


def play(engine, *, between=None, **changes):
    sampling = training_sampling(CONFIG, engine.capabilities, record_routes=True)

    async def main():
        recorded = replace(sampling, **changes)
        playing = asyncio.ensure_future(
            one_episode(engine, RENDERER, Asks(), config=CONFIG, sampling=recorded, max_tokens=400)
        )
        if between is not None:
            await between()
        return await playing

    return asyncio.run(main())


def make_engine():
    model = Decoder(tiny_config("gpt_oss", vocab_size=RENDERER.tokenizer.vocab_size, num_experts=8))
    model.init_weights(std=0.3, seed=0)
    return model, EmbeddedEngine(model, EmbeddedConfig(page_size=16, kv_cache_tokens=1024))


def test_a_row_has_what_a_fresh_forward_chooses_at_every_position_of_all_turns():
    model, engine = make_engine()
    trajectory = play(engine)
    assert trajectory.num_turns == 4 and trajectory.status == "truncated", trajectory.error
    (leaf,) = trajectory.rewards
    row, routing = trajectory.row(leaf), Routing()
    ids = torch.from_numpy(row.token_ids).long()
    with torch.no_grad():
        model(ids, torch.arange(len(ids)), PackedContext.of([len(ids)]), routing)
    column = row.columns["routed_experts"]
    assert np.array_equal(column[:-1], routing.stacked().numpy()[:-1])
    assert (column[-1] == UNKNOWN_EXPERT).all()


def fake_routes(token_id, position):
    first = (5 * token_id + position) % 31
    return [[first, 31 + first], [first + 100, first]]


def test_a_turn_over_a_weight_update_has_the_routes_of_each_part():
    engine = FakeEngine(lambda request: ANSWER, routes=fake_routes, tokens_per_step=1)

    async def between():
        await steps_of(engine)
        await engine.load_weights(None, version=1)

    trajectory = play(engine, between=between, max_tokens=14)
    reasons = [s.finish_reason for s in trajectory.segments if s.is_sampled]
    assert reasons.count("weight_update") == 1, trajectory.error
    (leaf,) = trajectory.rewards
    row = trajectory.row(leaf)
    wanted = [fake_routes(int(i), at) for at, i in enumerate(row.token_ids)]
    assert row.columns["routed_experts"][:-1].tolist() == wanted[:-1]


class Forgets(FakeEngine):
    async def generate(self, request):
        async for delta in super().generate(request):
            yield replace(delta, routed_experts=None)


class SkipsThePrompt(FakeEngine):
    """Hands out what it sampled alone, as if a cached prompt had no routes."""

    async def generate(self, request):
        async for delta in super().generate(request):
            routes = delta.routed_experts[len(request.prompt_ids) - request.routes_from :]
            yield replace(delta, routed_experts=routes)


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (Forgets, f"expected the experts of its {len(ANSWER)} tokens, and found none"),
        (SkipsThePrompt, "Did the engine leave out prompt ids from its prefix cache"),
    ],
)
def test_an_engine_that_leaves_routes_out_fails_the_episode(engine, text):
    trajectory = play(engine(lambda request: ANSWER, routes=fake_routes))
    assert trajectory.status == "failed" and text in trajectory.error


def test_an_engine_without_routes_is_refused_before_the_run():
    engine = FakeEngine(lambda request: ANSWER, vocab_size=10)
    context = SimpleNamespace(vocab_size=10, max_tokens=10)
    check_capabilities(engine, context)
    with pytest.raises(CapabilityError, match="fake"):
        check_capabilities(engine, context, needs=["replay"])
