"""engine=openai against servers that sample: what is used, what is found out, what is refused."""

import asyncio

import numpy as np
import pytest
from engine_models import make_engine, prompt, reply_of, request
from fake_servers import FakeOpenAI, context

from lockstep.config import resolve
from lockstep.engines.config import OpenAIConfig
from lockstep.engines.registry import check_capabilities
from lockstep.engines.registry import make_engine as make_any
from lockstep.errors import CapabilityError, ConfigError, EngineError, ServerUnreachableError
from lockstep.testing.check_engine import check_engine


def engine_of(server, model=None, **settings):
    config = OpenAIConfig(urls=(server.url,), start_seconds=5, request_seconds=20, **settings)
    return make_any(config, context(model or server.model))


def test_a_server_that_returns_ids_keeps_every_promise_that_it_claims():
    with FakeOpenAI() as server:
        engine = engine_of(server)
        report = asyncio.run(check_engine(engine, prompt_ids=[1, 2, 3, 4, 5]))
    assert set(report.skipped) == {
        "support", "routed experts", "stop strings", "prefix cache", "weights", "sleep and wake",
        "seeds", "score",
    }  # fmt: skip
    assert "abort" in report.passed


@pytest.mark.parametrize("distribution", ["model", "tempered", "sampled"])
def test_whose_log_probs_a_server_records_is_found_by_two_temperatures(distribution):
    with FakeOpenAI(distribution=distribution) as server:
        engine = engine_of(server)
        assert engine.capabilities.distributions == (distribution,)
        hot = request("a", prompt(9), temperature=0.7)
        if distribution == "model":
            with pytest.raises(CapabilityError, match=r"records log-probs of model"):
                asyncio.run(reply_of(engine, hot))
            return
        ids, logprobs = asyncio.run(reply_of(engine, hot))
        path = np.concatenate([prompt(9), ids])
        scored = make_engine(server.model).score(path, distribution="tempered", temperature=0.7)
        assert np.abs(asyncio.run(scored).logprobs[9:] - logprobs).max() < 1e-4


def test_a_server_that_returns_text_is_refused_and_never_encoded_again():
    with FakeOpenAI(returns="text") as server, pytest.raises(
        CapabilityError, match=r"returns text and no token ids.*vllm serve"
    ):  # fmt: skip
        engine_of(server)


def test_a_server_without_log_probs_is_refused():
    def silent(choice):
        return choice | {"logprobs": None}

    with FakeOpenAI(changed=silent) as server, pytest.raises(CapabilityError, match="no log-probs"):
        engine_of(server)


def test_a_server_that_leaves_the_stop_id_out_is_refused():
    with FakeOpenAI(keeps_stop=False) as server:
        engine = engine_of(server)
        asked = request("a", prompt(9), max_tokens=60, stop_ids=tuple(range(0, 97, 3)))
        with pytest.raises(EngineError, match="the stop id is left out"):
            asyncio.run(reply_of(engine, asked))


def test_what_a_server_does_not_honour_is_not_claimed():
    with FakeOpenAI(honours=("stop_with_ignore_eos",)) as server:
        engine = engine_of(server)
        found = engine.capabilities
        assert not found.has_seeds and not found.has_score and not found.has_sleep
        with pytest.raises(CapabilityError, match="did not honour top_k=1"):
            asyncio.run(reply_of(engine, request("a", prompt(9), top_k=3)))
        asyncio.run(reply_of(engine, request("b", prompt(9))))


def test_a_model_is_chosen_by_name_where_there_are_several():
    with FakeOpenAI(models=("a", "b")) as server:
        with pytest.raises(CapabilityError, match=r"several models: a, b.*engine.served_model"):
            engine_of(server)
        with pytest.raises(CapabilityError, match="no model 'c'"):
            engine_of(server, served_model="c")
        asyncio.run(reply_of(engine_of(server, served_model="b"), request("a", prompt(9))))
        assert server.bodies[-1][1]["model"] == "b"


def test_a_training_run_is_refused_and_an_evaluation_is_not():
    with FakeOpenAI() as server:
        engine = engine_of(server)
    check_capabilities(engine, vocab_size=97, max_tokens=200)
    with pytest.raises(CapabilityError, match="takes no new weights"):
        check_capabilities(engine, vocab_size=97, max_tokens=200, is_trained=True)
    with pytest.raises(CapabilityError, match="max_tokens=300"):
        check_capabilities(engine, vocab_size=97, max_tokens=300)


def test_a_server_that_is_not_up_is_told_with_how_long_was_waited_and_how_it_starts():
    with FakeOpenAI() as server:
        url = server.url
    config = OpenAIConfig(urls=(url,), start_seconds=0.3)
    with pytest.raises(ServerUnreachableError, match=r"start_seconds=0.3.*vllm serve MODEL"):
        make_any(config, context())


def test_a_server_that_dies_within_a_reply_fails_the_request_and_says_so():
    with FakeOpenAI() as server:
        engine = engine_of(server)

    with pytest.raises(EngineError, match="not reachable"):
        asyncio.run(reply_of(engine, request("a", prompt(9))))


def test_settings_are_checked():
    from lockstep.recipes import find_recipe

    with pytest.raises(ConfigError, match="engine=openai needs a server"):
        resolve(find_recipe("quickstart"), ["engine=openai"])
