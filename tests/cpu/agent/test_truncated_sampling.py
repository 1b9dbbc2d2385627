"""With top-p or top-k the loop asks for what was kept, and says what it means where it is not."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from playing import one_episode, steps_of

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import sampling_of, training_sampling, truncation_notice
from lockstep.engines.base import Capabilities
from lockstep.engines.registry import check_capabilities
from lockstep.errors import CapabilityError
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message

RENDERER = HarmonyRenderer(byte_tokenizer(), HarmonyConfig())
ANSWER = RENDERER.render_reply(Message(role="assistant", content="done"))


def capabilities(**claims):
    defaults = {"name": "one", "vocab_size": 10, "max_tokens": 10}
    return Capabilities(**(defaults | {"distributions": ("tempered", "sampled")} | claims))


@pytest.mark.parametrize("filters", [{"top_k": 8}, {"top_p": 0.9}])
@pytest.mark.parametrize("record_support", [True, False])
@pytest.mark.parametrize("has_support", [True, False])
def test_truncated_tokens_are_recorded_over_what_was_kept(filters, record_support, has_support):
    config = AgentConfig(record_support=record_support, **filters)
    sampling = training_sampling(config, capabilities(has_support=has_support))
    assert sampling.distribution == "sampled"
    assert sampling.record_support == (record_support and has_support)
    assert not sampling_of(config).record_support, "evaluation trains nothing and asks for nothing"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0, "top_k": 8}])
def test_without_a_filter_nothing_is_asked_and_nothing_said(settings):
    config = AgentConfig(**settings)
    assert training_sampling(config, capabilities(has_support=True)) == sampling_of(config)
    assert truncation_notice(config, has_support=False) == ""


@pytest.mark.parametrize(
    ("record_support", "has_support", "text"),
    [
        (True, True, "the trainer renormalises over the tokens that they kept"),
        (True, False, "the engine does not record the ids they kept, so the gradient is biased"),
        (False, True, "record_support=false drops the ids they kept, so the gradient is biased"),
    ],
)
def test_the_notice_says_what_the_filters_mean(record_support, has_support, text):
    config = AgentConfig(top_p=0.9, top_k=8, record_support=record_support)
    found = truncation_notice(config, has_support=has_support)
    assert found.startswith("top_p=0.9, top_k=8: ") and text in found
    assert ("mismatch/support_bias" in found) == (not (record_support and has_support))


def test_an_engine_that_cannot_record_what_was_drawn_from_is_refused_before_the_run():
    engine = FakeEngine(lambda request: ANSWER)
    engine.capabilities = capabilities(distributions=("tempered",))
    context = SimpleNamespace(vocab_size=10, max_tokens=10)
    check_capabilities(engine, context)
    with pytest.raises(CapabilityError, match=r"one records log-probs of tempered; .*\(sampled\)"):
        check_capabilities(engine, context, needs=["truncation"])


# -- episodes -------------------------------------------------------------------------------------


class OneTurn(Environment):
    async def reset(self):
        return [Message(role="user", content="go")]

    async def step(self, message):
        return Observation(done=True)

    async def score(self):
        return Score(reward=1.0)


def kept_of(token_id, position):
    return [position, token_id, token_id + 1]


def play(engine, config, sampling):
    return asyncio.run(
        one_episode(engine, RENDERER, OneTurn(), config=config, sampling=sampling, max_tokens=1000)
    )


@pytest.mark.parametrize("tokens_per_step", [0, 3])
def test_the_support_reaches_the_training_row_token_by_token(tokens_per_step):
    engine = FakeEngine(lambda request: ANSWER, support=kept_of, tokens_per_step=tokens_per_step)
    config = AgentConfig(top_k=3)
    trajectory = play(engine, config, training_sampling(config, engine.capabilities))
    assert trajectory.status == "finished", trajectory.error
    (leaf,) = trajectory.rewards
    row = trajectory.row(leaf)
    for at, ids in enumerate(row.ragged["support"]):
        wanted = kept_of(int(row.token_ids[at]), at) if row.loss_mask[at] else []
        assert ids.tolist() == wanted


async def test_a_reply_over_a_weight_update_has_the_support_of_each_part():
    engine = FakeEngine(lambda request: ANSWER, support=kept_of, tokens_per_step=1)
    sampling = training_sampling(AgentConfig(top_k=3), engine.capabilities)
    playing = asyncio.ensure_future(
        one_episode(engine, RENDERER, OneTurn(), sampling=sampling, max_tokens=1000)
    )
    await steps_of(engine)
    await engine.load_weights(None, version=1)
    trajectory = await playing
    sampled = [s for s in trajectory.segments if s.is_sampled]
    assert [s.finish_reason for s in sampled] == ["weight_update", "stop"], trajectory.error
    assert [len(s.support) for s in sampled] == [len(s) for s in sampled]


class Forgets(FakeEngine):
    """Claims a support, and drops it from what it hands back."""

    async def generate(self, request):
        async for delta in super().generate(request):
            yield replace(delta, support=None)


def test_an_engine_that_forgets_the_support_fails_the_episode():
    engine = Forgets(lambda request: ANSWER, support=kept_of)
    config = AgentConfig(top_k=3)
    trajectory = play(engine, config, training_sampling(config, engine.capabilities))
    assert trajectory.status == "failed"
    assert f"expected the support of its {len(ANSWER)} tokens, and found none" in trajectory.error


def test_a_support_without_the_sampled_id_fails_the_episode():
    engine = FakeEngine(lambda request: ANSWER, support=lambda token_id, at: [token_id + 1])
    config = AgentConfig(top_k=3)
    trajectory = play(engine, config, training_sampling(config, engine.capabilities))
    assert trajectory.status == "failed"
    assert f"token 0 (id {int(np.asarray(ANSWER)[0])}) is not among the 1 ids" in trajectory.error
