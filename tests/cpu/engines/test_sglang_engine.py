"""engine=sglang against a server that samples and has SGLang's own names. No real one runs here."""

import asyncio

import numpy as np
import pytest
from check_engine import check_engine
from engine_models import deltas_of, make_engine, make_model, prompt, reply_of, request
from engine_wire import until
from fake_servers import context
from fake_sglang import FakeSGLang
from safetensors.torch import save_file

from lockstep.engines.config import SGLangConfig
from lockstep.engines.registry import make_engine as make_any
from lockstep.errors import (
    CapabilityError,
    ConfigError,
    EngineError,
    LeaseError,
    ServerUnreachableError,
)
from lockstep.models.hf_io import hf_tensors

DETERMINISTIC = "enable_deterministic_inference"


def engine_of(server, model=None, *, run="run", **settings):
    config = SGLangConfig(urls=(server.url,), start_seconds=5, request_seconds=20, **settings)
    return make_any(config, context(model or server.model, run=run))


@pytest.fixture
def weights(tmp_path):
    def save(kind="qwen3", seed=1):
        model = make_model(kind, seed=seed)
        tensors = {name: t.detach().contiguous() for name, t in hf_tensors(model).items()}
        save_file(tensors, tmp_path / "model.safetensors")
        return str(tmp_path), model

    return save


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_sglang_keeps_every_promise_that_it_claims(kind, weights):
    flags = (DETERMINISTIC, "enable_memory_saver", "enable_return_routed_experts")
    with FakeSGLang(make_model(kind), flags=flags) as server:
        engine = engine_of(server)
        checked = check_engine(
            engine, prompt_ids=[1, 2, 3, 4, 5], weights=weights(kind)[0], page_size=16
        )
        report = asyncio.run(checked)
    skipped = {"support", "stop strings"} | ({"routed experts"} if kind == "qwen3" else set())
    assert set(report.skipped) == skipped
    assert {"weights", "sleep and wake", "abort", "seeds", "score"} <= set(report.passed)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stream_is_read_in_both_of_its_forms(incremental):
    flags = (DETERMINISTIC, *(("incremental_streaming_output",) if incremental else ()))
    with FakeSGLang(flags=flags) as server:
        engine = engine_of(server)
        whole, _ = asyncio.run(reply_of(engine, request("a", prompt(9), seed=5)))
        streamed = asyncio.run(deltas_of(engine, request("b", prompt(9), seed=5, stream=True)))
    assert [int(i) for d in streamed for i in d.token_ids] == whole.tolist()
    assert [len(d.token_ids) for d in streamed] == [1] * 12


def test_a_reply_over_an_update_is_two_segments_each_of_its_own_weights(weights):
    directory, new = weights()
    with FakeSGLang(flags=(DETERMINISTIC,)) as server:
        engine = engine_of(server)
        asked = request("a", prompt(9), max_tokens=120, temperature=0.8)

        async def run():
            task = asyncio.ensure_future(deltas_of(engine, asked))
            sampled = server.engine.stats["sampled_tokens"]
            await until(lambda: server.engine.stats["sampled_tokens"] > sampled + 10)
            await engine.load_weights(directory, version=1)
            return await task

        first, second = asyncio.run(run())
        assert (first.policy_version, second.policy_version) == (0, 1)
        assert len(first.token_ids) + len(second.token_ids) == 120
        path = np.concatenate([asked.prompt_ids, first.token_ids, second.token_ids])
        turn = 9 + len(first.token_ids)
        how = {"distribution": "tempered", "temperature": 0.8}
        old = asyncio.run(make_engine(server.model).score(path, **how)).logprobs
        by_new = asyncio.run(make_engine(new).score(path, **how)).logprobs
    assert np.abs(old[9:turn] - first.logprobs).max() < 1e-4
    assert np.abs(by_new[turn:] - second.logprobs).max() < 1e-4
    assert server.asked["/flush_cache"] == 1 and server.asked["/continue_generation"] == 1


def test_an_end_of_the_servers_own_is_gone_on_with(weights):
    eos_ids = tuple(range(0, 97, 5))
    with FakeSGLang(flags=(DETERMINISTIC,), eos_ids=eos_ids) as server:
        engine = engine_of(server)
        asked = request("a", prompt(9), max_tokens=60, stop_ids=(200,), seed=3)
        ids, _ = asyncio.run(reply_of(engine, asked))
        free = FakeSGLang(server.model, flags=(DETERMINISTIC,))
        with free:
            wanted, _ = asyncio.run(reply_of(engine_of(free), asked))
    assert set(ids.tolist()) & set(eos_ids)
    assert ids.tolist() == wanted.tolist()  # draws go by place: cut or not, they are the same


def test_ids_of_calls_are_no_beginnings_of_one_another():
    with FakeSGLang() as server:
        engine = engine_of(server)

        async def run():
            await asyncio.gather(
                *(reply_of(engine, request(f"a{n}", prompt(9), max_tokens=2)) for n in range(12))
            )

        asyncio.run(run())
    rids = [b["rid"] for path, b in server.bodies if path == "/generate" and "rid" in b]
    assert len(rids) == 12
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)


@pytest.mark.parametrize("distribution", ["model", "tempered", "sampled"])
def test_whose_log_probs_a_server_records_is_found_by_two_temperatures(distribution):
    with FakeSGLang(distribution=distribution) as server:
        engine = engine_of(server)
        found = engine.capabilities
        assert found.distributions == (distribution,)
        assert not found.has_seeds and not found.has_sleep
        hot = request("a", prompt(9), temperature=0.7)
        if distribution == "model":
            with pytest.raises(CapabilityError, match="log-probs of model"):
                asyncio.run(reply_of(engine, hot))
            return
        ids, logprobs = asyncio.run(reply_of(engine, hot))
        path = np.concatenate([prompt(9), ids])
        scored = make_engine(server.model).score(path, distribution="tempered", temperature=0.7)
        assert np.abs(asyncio.run(scored).logprobs[9:] - logprobs).max() < 1e-4


def test_a_server_that_does_not_honour_top_k_is_refused():
    with FakeSGLang(honours_top_k=False) as server, pytest.raises(CapabilityError, match="top_k=1"):
        engine_of(server)


def test_a_server_that_is_not_up_is_told_with_how_long_was_waited_and_how_it_starts():
    with FakeSGLang() as server:
        url = server.url
    config = SGLangConfig(urls=(url,), start_seconds=0.3)
    with pytest.raises(ServerUnreachableError, match=r"start_seconds=0.3.*sglang.launch_server"):
        make_any(config, context())


def test_a_server_that_has_died_fails_the_request_and_says_so():
    with FakeSGLang() as server:
        engine = engine_of(server)
    with pytest.raises(EngineError, match="not reachable"):
        asyncio.run(reply_of(engine, request("a", prompt(9))))


def test_an_adapter_goes_by_its_name_and_the_one_before_is_unloaded(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with FakeSGLang(flags=("enable_lora",)) as server:
        engine = engine_of(server)
        assert engine.capabilities.weight_sources == ("directory", "adapter")

        async def run():
            for version in (1, 2):
                await engine.load_weights(str(tmp_path), version=version)
                await reply_of(engine, request(f"a{version}", prompt(9)))

        asyncio.run(run())
        (name,) = server.adapters
    assert name.startswith("policy~") and server.bodies[-1][1]["lora_path"] == name


def test_a_load_that_the_server_refuses_says_why(tmp_path):
    with FakeSGLang() as server:
        engine = engine_of(server)
        with pytest.raises(EngineError, match="Failed to update"):
            asyncio.run(engine.load_weights(str(tmp_path / "nothing"), version=1))
        with pytest.raises(EngineError, match="load them again"):
            asyncio.run(reply_of(engine, request("a", prompt(9))))


def test_a_server_works_for_one_run(weights):
    directory, _ = weights()
    with FakeSGLang() as server:
        first, second = engine_of(server, run="a"), engine_of(server, run="b")
        late = engine_of(server, run="c", take_over=True)

        async def run():
            await first.load_weights(directory, version=1)
            await deltas_of(first, request("a", prompt(9)))
            with pytest.raises(LeaseError, match="'a'"):
                await second.load_weights(directory, version=1)
            await late.load_weights(directory, version=5)
            with pytest.raises(LeaseError, match="'c'"):
                await deltas_of(first, request("b", prompt(9)))
            with pytest.raises(LeaseError):
                await first.check_lease()
            await late.check_lease()
            await late.close()
            await second.load_weights(directory, version=1)

        asyncio.run(run())


def test_what_a_run_needs_and_a_server_lacks_is_refused(tmp_path):
    with FakeSGLang() as server:
        with pytest.raises(CapabilityError, match="--enable-deterministic-inference"):
            engine_of(server, deterministic=True)
        (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
        with pytest.raises(CapabilityError, match="'gpt_oss'"):
            make_any(SGLangConfig(urls=(server.url,)), context(directory=tmp_path))
    with pytest.raises(ConfigError, match="engine=sglang"):
        SGLangConfig()
