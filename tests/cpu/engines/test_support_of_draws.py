"""The embedded engine hands back what top-k and top-p kept, to those who ask."""

import asyncio

import numpy as np
import pytest
import torch
from engine_models import VOCAB, ask, deltas_of, make_engine, make_model, prompt, request

from lockstep.engines.sampling import DrawRule, sample
from lockstep.ops.base import Ops
from lockstep.ops.context import PackedContext

ASKS = {"distribution": "sampled", "record_support": True}


def packed_logits(model, ids):
    """[T - 1, V]: what predicts each id but the first, by one forward over the whole row."""
    row = torch.from_numpy(np.asarray(ids, np.int64))
    with torch.no_grad():
        hidden = model(row, torch.arange(len(row)), PackedContext.of([len(row)]))
        return model.logits(hidden)[:-1]


def by_definition(logits, *, temperature, top_p, top_k):
    """The ids of one row that the filters keep, in float64, one by one."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True, stable=True).tolist()[: top_k or None]
    total, mass, kept = float(probs[order].sum()), 0.0, []
    for i in order:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += float(probs[i])
    return sorted(kept), mass


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.7, 0), (0.8, 6), (1.0, 1)])
def test_the_support_is_what_the_filters_keep_and_the_log_prob_is_over_it(kind, top_p, top_k):
    model, cut = make_model(kind), {"temperature": 0.8, "top_p": top_p, "top_k": top_k}
    asked = request("r", prompt(9), seed=3, max_tokens=40, **cut, **ASKS)
    (delta,) = ask(make_engine(model), asked)
    assert len(delta.support) == 40
    logits = packed_logits(model, [*asked.prompt_ids, *delta.token_ids])[8:]
    for at, token_id in enumerate(delta.token_ids.tolist()):
        wanted, mass = by_definition(logits[at], **cut)
        # Ids are in order; a filter decides at a sum that float32 rounds, but not on these rows.
        assert delta.support[at].tolist() == wanted and token_id in wanted
        logp = torch.log_softmax(logits[at].double() / 0.8, -1)[token_id] - np.log(mass)
        assert float(delta.logprobs[at]) == pytest.approx(float(logp), abs=2e-5)


def test_only_requests_that_ask_and_filter_have_one_in_any_company():
    engine = make_engine()
    cases = {
        "asks": {"top_k": 4, **ASKS},
        "does not ask": {"top_k": 4, "distribution": "sampled"},
        "does not filter": ASKS,
        "greedy": {"top_k": 4, "temperature": 0.0, **ASKS},
        "tempered": {},
        "asks for top-p": {"top_p": 0.6, **ASKS},
    }
    requests = [request(name, prompt(6), seed=1, **how) for name, how in cases.items()]
    together = dict(zip(cases, ask(engine, *requests), strict=True))
    told = [name for name, delta in together.items() if delta.support is not None]
    assert told == ["asks", "asks for top-p"]
    for name, how in cases.items():
        (alone,) = ask(make_engine(), request(name, prompt(6), seed=1, **how))
        assert alone.token_ids.tolist() == together[name].token_ids.tolist()
        if alone.support is not None:
            assert alone.support.values.tolist() == together[name].support.values.tolist()


def test_asking_changes_no_bit_of_the_reply():
    replies = [
        ask(make_engine(), request("r", prompt(6), seed=1, **(ASKS | how)))[0]
        for how in ({"top_k": 4}, {"top_k": 4, "record_support": False})
    ]
    assert replies[0].token_ids.tolist() == replies[1].token_ids.tolist()
    assert replies[0].logprobs.tobytes() == replies[1].logprobs.tobytes()


def test_preempted_requests_and_those_that_change_rows_keep_their_support():
    model = make_model()
    requests = [
        request(f"r{i}", prompt(5 + i, i), seed=i, max_tokens=20 + 5 * i, top_k=3 + i, **ASKS)
        for i in range(8)
    ]
    ample = ask(make_engine(model), *requests)
    engine = make_engine(model, kv_cache_tokens=16 * 12)
    scarce = ask(engine, *requests)
    assert engine.stats["preemptions"] > 0
    for a, b in zip(ample, scarce, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.support.offsets.tolist() == b.support.offsets.tolist()
        assert a.support.values.tolist() == b.support.values.tolist()


def test_streams_and_weight_updates_cut_the_support_with_the_tokens():
    whole = ask(make_engine(), request("r", prompt(6), seed=2, top_k=4, **ASKS))[0]
    engine = make_engine()

    async def run():
        out = []
        async for delta in engine.generate(
            request("s", prompt(6), seed=2, top_k=4, stream=True, **ASKS)
        ):
            out.append(delta)
            if len(out) == 3:
                await engine.load_weights(None, version=1)  # of equal weights
        return out

    deltas = asyncio.run(run())
    assert "weight_update" in [d.finish_reason for d in deltas]
    assert all(len(d.support) == len(d.token_ids) for d in deltas)
    streamed = [ids.tolist() for d in deltas for ids in d.support]
    assert streamed == [ids.tolist() for ids in whole.support]


def test_a_repeated_id_is_answered_with_the_same_support():
    engine = make_engine()
    asked = request("r", prompt(6), seed=2, top_k=4, **ASKS)

    async def run():
        return [(await deltas_of(engine, asked))[-1] for _ in range(2)]

    first, second = asyncio.run(run())
    assert first.support is second.support


def test_a_token_for_which_nothing_was_cut_has_an_empty_entry():
    (delta,) = ask(make_engine(), request("r", prompt(6), top_k=VOCAB, **ASKS))
    assert not delta.support.values.size and len(delta.support) == len(delta.token_ids)


def test_a_sampler_that_is_not_asked_hands_back_nothing():
    logits, filters = torch.randn(3, 10), {"top_p": torch.ones(3), "top_k": torch.full((3,), 4)}
    for distribution in ("model", "tempered", "sampled"):
        rule = DrawRule(0.7, True, distribution)
        assert sample(logits, torch.rand(3), rule, Ops(), **filters)[2] is None
    rule = DrawRule(0.7, True, "sampled", records_support=True)
    ids, _, kept = sample(logits, torch.rand(3), rule, Ops(), **filters)
    assert kept.sum(1).tolist() == [4, 4, 4]
    assert kept.gather(1, ids[:, None]).all()
