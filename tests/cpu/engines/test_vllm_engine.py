"""vLLM over HTTP, against the recorded answers of a real server (tests/vllm/test_recorded.py)."""

import asyncio
import json
from pathlib import Path

import pytest
from engine_contexts import context_of
from vllm_scenario import play, replayed

from lockstep.engines.config import VllmConfig
from lockstep.engines.http import HttpClient
from lockstep.engines.vllm.wire import VllmWire
from lockstep.errors import CapabilityError, EngineError
from lockstep.models.locate import locate_model

RECORD = json.loads((Path(__file__).parent / "recorded" / "vllm.json").read_text())
CONTEXT = context_of(locate_model("tiny-qwen3"))


def changed(path, change):
    """The record with the answer of `path` changed."""
    exchanges = []
    for entry in RECORD["exchanges"]:
        if entry["ask"][1].startswith(path):
            entry = {**entry, "answer": change(entry["answer"])}
        exchanges.append(entry)
    return exchanges


def facts_of(exchanges):
    async def run():
        try:
            async with replayed(exchanges) as url:
                client = HttpClient(url, name="vllm")
                return await asyncio.to_thread(VllmWire, VllmConfig(), CONTEXT, client)
        except AssertionError:  # the rest of the record was not asked for
            return None

    return asyncio.run(run())


def test_a_run_against_the_record_is_what_it_was_against_the_server():
    async def run():
        async with replayed(RECORD["exchanges"]) as url:
            return await play(url, CONTEXT, Path("/new"))

    assert json.loads(json.dumps(asyncio.run(run()))) == RECORD["found"]


def test_a_server_that_went_on_with_other_weights_is_an_error():
    def relabel(text):
        return text.replace("lockstep/recorded/1/3", "default")

    async def run():
        async with replayed(changed("/inference", relabel)) as url:
            await play(url, CONTEXT, Path("/new"))

    with pytest.raises((EngineError, AssertionError), match="started again"):
        asyncio.run(run())


def test_logprobs_of_other_ids_are_an_error():
    def shift(text):
        return text.replace(
            '"logprobs":{"content":[{"token_id":', '"logprobs":{"content":[{"token_id":1'
        )

    async def run():
        async with replayed(changed("/inference", shift)) as url:
            await play(url, CONTEXT, Path("/new"))

    with pytest.raises((EngineError, AssertionError), match="log-probs"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("old", "new", "text"), [('"processed_logprobs"', '"raw_logits"', "log-probs")]
)
def test_a_server_that_is_started_wrongly_is_refused(old, new, text):
    with pytest.raises(CapabilityError, match=text):
        facts_of(changed("/server_info", lambda answer: answer.replace(old, new)))


def test_a_server_of_another_model_is_refused_with_what_differs():
    other = lambda answer: answer.replace('"vocab_size":550', '"vocab_size":560')  # noqa: E731
    with pytest.raises(CapabilityError, match=r"vocab_size 560.*550"):
        facts_of(changed("/collective_rpc", other))


def test_a_model_that_only_a_restart_updates_is_refused_where_the_server_is_not_ours():
    def cannot(answer):
        return answer.replace('"why_not_in_place":""', '"why_not_in_place":"quantised"')

    with pytest.raises(CapabilityError, match="cannot take new weights: quantised"):
        facts_of(changed("/collective_rpc", cannot))


@pytest.mark.parametrize(
    ("path", "text"),
    [("/server_info", "VLLM_SERVER_DEV_MODE=1"), ("/inference", "--enable-scale-out")],
)
def test_a_server_without_a_route_is_told_how_to_have_it(path, text):
    exchanges = [
        {**entry, "status": 404, "answer": "{}"} if entry["ask"][1].startswith(path) else entry
        for entry in RECORD["exchanges"]
    ]
    with pytest.raises(CapabilityError, match=text):
        facts_of(exchanges)
