"""The real client over the real engine and trainer: their log-probs are equal bit for bit, and
every kind of log-prob that a client may ask for is of the same distribution."""

import asyncio

import numpy as np
import pytest

from lockstep.model_server import BackgroundServer

pytest.importorskip("tinker._version")
import tinker
import torch
from tinker import types

MODEL = "tiny-gpt-oss"
PROMPT = list(range(20, 32))


def ints(ids):
    return types.ModelInput.from_ints(list(ids))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with BackgroundServer(MODEL, "api=tinker", out=tmp_path_factory.mktemp("out")) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-none")
        yield service
        service.close("success").result(timeout=30)


@pytest.fixture(scope="module")
def trained(service):
    """A model after one update, so that its adapter is in every number, and its sampler."""
    train = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    step(train, [row(PROMPT)])
    return train, train.save_weights_and_get_sampling_client().result()


def row(ids):
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=ints(ids[:-1]), loss_fn_inputs=inputs)


def step(train, rows, loss="cross_entropy"):
    passed = train.forward_backward(rows, loss)
    train.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return passed.result()


def scored(train, ids):
    """Log-probs of all ids but the first by the trainer, whose state they leave."""
    found = train.forward([row(list(ids))], "cross_entropy").result()
    return np.array(found.loss_fn_outputs[0]["logprobs"].data, np.float32)


def bits(values):
    return np.asarray(values, np.float32).view(np.int32).tolist()


async def play(sampler, seed):
    """Two turns of three samples each: the ids and sampled log-probs of both."""
    params = types.SamplingParams(max_tokens=7, stop=[], seed=seed)
    found = []
    for first in (await sampler.sample(ints(PROMPT), 3, params)).sequences:
        context = [*PROMPT, *first.tokens, 40, 41]
        (second,) = (await sampler.sample(ints(context), 1, params)).sequences
        found.append((PROMPT, first))
        found.append((context, second))
    return found


def test_sampler_and_trainer_agree_in_every_bit_with_three_adapters_at_once(service):
    models = [
        service.create_lora_training_client(MODEL, rank=rank, seed=rank).result()
        for rank in (2, 4, 8)
    ]

    async def all_of(samplers):
        return await asyncio.gather(*(play(each, at) for at, each in enumerate(samplers)))

    for _ in range(2):  # before and after an update
        samplers = [each.save_weights_and_get_sampling_client().result() for each in models]
        for train, sampler, played in zip(
            models, samplers, asyncio.run(all_of(samplers)), strict=True
        ):
            for context, reply in played:
                ids = [*context, *reply.tokens]
                by_trainer = scored(train, ids)
                assert bits(reply.logprobs) == bits(by_trainer[len(context) - 1 :])
                by_sampler = sampler.compute_logprobs(ints(ids)).result()
                assert by_sampler[0] is None and bits(by_sampler[1:]) == bits(by_trainer)
            rows = [row([*context, *reply.tokens]) for context, reply in played]
            step(train, rows)


def test_rows_of_several_turns_are_drawn_and_their_kl_is_0(trained):
    train, sampler = trained
    played = asyncio.run(play(sampler, 5))
    data, gaps = [], []
    for (_, first), (context, second) in zip(played[::2], played[1::2], strict=True):
        ids, blank = [*context, *second.tokens], [0.0] * len(PROMPT)
        logprobs = [*blank, *first.logprobs, 0.0, 0.0, *second.logprobs][1:]
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": logprobs,
            "advantages": [float(one != 0) for one in logprobs],
        }
        data.append(types.Datum(model_input=ints(ids[:-1]), loss_fn_inputs=inputs))
    found = step(train, data, "importance_sampling")
    for each, output in zip(data, found.loss_fn_outputs, strict=True):
        given = np.array(each.loss_fn_inputs["logprobs"].data, np.float32)
        gaps.append((given - np.array(output["logprobs"].data, np.float32))[given != 0])
    assert not np.concatenate(gaps).any()
    assert found.metrics["provenance/drawn:sum"] == len(data)


def test_log_probs_of_prompts_are_of_one_distribution(trained):
    _, sampler = trained
    num = len(PROMPT)
    targets = torch.tensor([[each, -1] for each in PROMPT[1:]])
    found = sampler.sample(
        ints(PROMPT),
        1,
        types.SamplingParams(max_tokens=1, seed=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=types.TensorData.from_torch(targets),
        prompt_alt_tokens_k=2,
    ).result()
    plain = found.prompt_logprobs
    assert plain[0] is None and found.topk_prompt_logprobs[0] is None
    wanted = found.target_prompt_logprobs.tolist()
    assert bits([each[0] for each in wanted]) == bits(plain[1:])
    assert {each[1] for each in wanted} == {0.0}, "nothing was asked for"
    drawn, their = (
        found.prompt_alt_tokens.tokens.tolist(),
        found.prompt_alt_tokens.logprobs.tolist(),
    )
    again = sampler.sample(
        ints(PROMPT),
        1,
        types.SamplingParams(max_tokens=1),
        target_prompt_logprobs=types.TensorData.from_torch(torch.tensor(drawn)),
    ).result()
    assert bits(again.target_prompt_logprobs.tolist()) == bits(their)
    for at in range(1, num):
        best = found.topk_prompt_logprobs[at]
        assert len(best) == 3 and best[0][1] >= best[1][1] >= best[2][1]
        assert best[0][1] >= plain[at]
        assert all(logprob == plain[at] for id_, logprob in best if id_ == PROMPT[at])


def test_the_end_of_a_prompt_alone_can_be_scored(trained):
    _, sampler = trained
    whole, end = (
        sampler.sample(
            ints(PROMPT),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=1,
            **options,
        ).result()
        for options in ({}, {"prompt_logprobs_last_n": 4})
    )
    assert end.prompt_logprobs[:-4] == [None] * (len(PROMPT) - 4)
    assert bits(end.prompt_logprobs[-4:]) == bits(whole.prompt_logprobs[-4:])
    assert end.topk_prompt_logprobs[:-4] == [None] * (len(PROMPT) - 4)
    assert end.topk_prompt_logprobs[-4:] == whole.topk_prompt_logprobs[-4:]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_sampled_log_probs_are_those_of_the_scaled_distribution(trained, temperature):
    """Differences of log-probs at one place are those at temperature 1, divided by it."""
    _, sampler = trained

    def best(temperature):
        params = types.SamplingParams(max_tokens=1, temperature=temperature, seed=3, stop=[])
        reply = (
            sampler.sample(ints(PROMPT), 1, params, topk_sample_logprobs=8).result().sequences[0]
        )
        found = dict(reply.topk_logprobs[0])
        if reply.tokens[0] in found:
            assert found[reply.tokens[0]] == reply.logprobs[0]
        return found

    plain, scaled = best(1.0), best(temperature)
    assert plain.keys() == scaled.keys()
    base = next(iter(plain))
    for id_, logprob in plain.items():
        wanted = (logprob - plain[base]) / temperature
        assert scaled[id_] - scaled[base] == pytest.approx(wanted, abs=1e-5)


def test_stops_are_kept_in_the_reply(trained):
    _, sampler = trained
    free = types.SamplingParams(max_tokens=12, seed=2, stop=[])
    (whole,) = sampler.sample(ints(PROMPT), 1, free).result().sequences
    assert (len(whole.tokens), whole.stop_reason) == (12, "length")
    params = types.SamplingParams(max_tokens=12, seed=2, stop=[whole.tokens[4]])
    (cut,) = sampler.sample(ints(PROMPT), 1, params).result().sequences
    end = whole.tokens.index(whole.tokens[4]) + 1
    assert (cut.tokens, cut.stop_reason) == (whole.tokens[:end], "stop")
    assert bits(cut.logprobs) == bits(whole.logprobs[:end])


def test_samples_differ_and_a_seed_repeats_them(trained):
    _, sampler = trained
    params = types.SamplingParams(max_tokens=12, seed=9, stop=[])
    first, second = (sampler.sample(ints(PROMPT), 4, params).result().sequences for _ in "ab")
    assert [each.tokens for each in first] == [each.tokens for each in second]
    assert len({tuple(each.tokens) for each in first}) == 4
    assert len({each.sequence_id for each in [*first, *second]}) == 8


def test_a_sampler_in_flight_has_the_latest_weights_and_the_age_of_its_tokens_is_told(service):
    train = service.create_lora_training_client(MODEL, rank=4, seed=7).result()
    flying = train.save_weights_and_get_sampling_client(kind="inflight").result()
    params = types.SamplingParams(max_tokens=6, stop=[], seed=1)

    def drawn_row():
        (reply,) = flying.sample(ints(PROMPT), 1, params).result().sequences
        ids, blank = [*PROMPT, *reply.tokens], [0.0] * (len(PROMPT) - 1)
        inputs = {
            "target_tokens": ids[1:],
            "logprobs": [*blank, *reply.logprobs],
            "advantages": [*blank, *[1.0] * len(reply.tokens)],
        }
        return types.Datum(model_input=ints(ids[:-1]), loss_fn_inputs=inputs)

    old = drawn_row()
    step(train, [old], "importance_sampling")
    train.save_weights_and_get_sampling_client(kind="inflight").result()
    found = step(train, [old, drawn_row()], "importance_sampling")
    assert found.metrics["provenance/updates_since_drawn:max"] == 1
    assert found.metrics["provenance/updates_since_drawn_least:min"] == 0
