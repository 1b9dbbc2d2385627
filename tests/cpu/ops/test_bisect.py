"""Where two sides part, and what a model computes by itself: differences are put in, and found."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.errors import AlignmentError
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import hf_config
from lockstep.ops.audit import ops_outside
from lockstep.ops.base import Ops
from lockstep.ops.bisect import bisect
from lockstep.ops.context import PackedContext, PagedContext, Support
from lockstep.ops.invariant import InvariantOps
from lockstep.ops.recording import OpCall, around_every_op, at_token, digests, record
from lockstep.types import Ragged, Request, SamplingParams

KINDS = ("qwen3", "gpt_oss")
VOCAB = 97
PROMPT = 5
LENGTH = 12


def make_model(kind, *, dtype=torch.float32, cls=Decoder):
    model = cls(ModelConfig.from_hf(hf_config(kind, VOCAB, None)), ops=InvariantOps())
    model.init_weights(std=0.4, seed=0)
    return model.to(dtype)


def make_ids(length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def after_prompt(length=LENGTH):
    return np.arange(length) >= PROMPT


def packed_logprobs(model, ids, *, temperature=1.0):
    """[T] float32 by the trainer's way, NaN at 0."""
    row = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        hidden = model(row, torch.arange(len(row)), PackedContext.of([len(row)]))
        values, _ = model.ops.log_probs(hidden[:-1], model.head, row[1:], temperature=temperature)
    return np.concatenate([[np.nan], values.numpy()]).astype(np.float32)


# -- nothing parts --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_invariant_ops_the_sides_never_part(kind, dtype):
    model = make_model(kind, dtype=dtype)
    is_sampled = after_prompt(150)
    is_sampled[14:124] = is_sampled[-9:] = False  # what was observed between turns, and after them
    company = [make_ids(140, 1), make_ids(40, 2)]
    arguments = {"is_sampled": is_sampled, "company": company}
    assert bisect(model, make_ids(150), **arguments) is None
    assert bisect(model, make_ids(150), max_chunk_tokens=37, **arguments) is None


def test_temperature_support_and_page_size_are_those_of_the_call():
    model = make_model("qwen3")
    ids, is_sampled = make_ids(), after_prompt()
    support = Ragged.of([[int(i), 3, 90] if i % 2 else [] for i in ids])
    arguments = {"is_sampled": is_sampled, "temperature": 0.7, "page_size": 3}
    assert bisect(model, ids, support=support, **arguments) is None
    recorded = packed_logprobs(model, ids, temperature=0.7)
    assert bisect(model, ids, recorded=recorded, **arguments) is None
    parting = bisect(model, ids, recorded=recorded, support=support, **arguments)
    first = next(t for t in range(PROMPT, LENGTH) if ids[t] % 2)
    assert parting.token == first and parting.fed_token is None
    row = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        hidden = model(row, torch.arange(LENGTH), PackedContext.of([LENGTH]))[first - 1, None]
        target, kept = row[first, None], Support.of(support.take([first]))
        value, _ = model.ops.log_probs(hidden, model.head, target, temperature=0.7, support=kept)
    assert parting.sampler_logprob == float(value)


async def sampled_logprobs(model, request):
    engine = EmbeddedEngine(model, EmbeddedConfig(kv_cache_tokens=1024))
    deltas = [delta async for delta in engine.generate(request)]
    return (
        np.concatenate([getattr(d, name) for d in deltas]) for name in ("token_ids", "logprobs")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_recorded_is_what_both_sides_give(kind):
    model = make_model(kind)
    prompt = make_ids(PROMPT)
    sampling = SamplingParams(max_tokens=9, temperature=0.8, distribution="tempered")
    request = Request(id="a", prompt_ids=prompt, sampling=sampling)
    ids, logprobs = asyncio.run(sampled_logprobs(model, request))
    row = np.concatenate([prompt, ids])
    recorded = np.concatenate([np.full(PROMPT, np.nan, np.float32), logprobs])
    arguments = {"is_sampled": ~np.isnan(recorded), "recorded": recorded, "temperature": 0.8}
    assert bisect(model, row, **arguments) is None
    with torch.no_grad():
        model.layers[1].attention.o_proj.weight += 0.01
    parting = bisect(model, row, **arguments)
    assert parting.token == PROMPT
    assert parting.trainer_logprob == parting.sampler_logprob != parting.recorded_logprob
    assert parting.fed_token is None and parting.ops == ()
    assert parting.recorded_side == "neither"


# -- a difference that was put in -----------------------------------------------------------------


def differing(op, weight, change, *, is_met):
    """`around` that changes what `op` gives to the last token after a product with `weight`, in
    calls whose rows are as `is_met` says."""
    last = None

    def around(name, function, *args, **kwargs):
        nonlocal last
        if name == "linear":
            last = args[1]
        out = function(*args, **kwargs)
        if name != op or last is not weight or not is_met(len(args[0])):
            return out
        value = (out[0] if isinstance(out, tuple) else out).clone()
        value[-1] = change(value[-1])
        return (value, *out[1:]) if isinstance(out, tuple) else value

    return around


def next_float(x):
    return torch.nextafter(x, torch.full_like(x, 1e30))


PLACES = {
    "qkv_proj": lambda block: block.attention.qkv_proj.weight,
    "o_proj": lambda block: block.attention.o_proj.weight,
    "gate_up_proj": lambda block: block.mlp.gate_up_proj.weight,
    "down_proj": lambda block: block.mlp.down_proj.weight,
    "router": lambda block: block.mlp.router.weight,
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("kind", "op", "after", "nth"),
    [
        ("qwen3", "linear", "qkv_proj", 0),
        ("qwen3", "rope", "qkv_proj", 0),
        ("qwen3", "attention", "qkv_proj", 0),
        ("qwen3", "linear", "o_proj", 1),
        ("qwen3", "rms_norm", "o_proj", 2),
        ("qwen3", "swiglu", "gate_up_proj", 0),
        ("qwen3", "linear", "down_proj", 3),
        ("gpt_oss", "attention", "qkv_proj", 0),
        ("gpt_oss", "rms_norm", "o_proj", 1),
        ("gpt_oss", "linear", "router", 2),
        ("gpt_oss", "route", "router", 0),
        ("gpt_oss", "combine", "router", 0),
    ],
)
def test_the_op_and_the_layer_that_differ_in_decode_are_named(kind, op, after, nth, layer):
    model = make_model(kind)
    weight = PLACES[after](model.layers[layer])
    around = differing(op, weight, next_float, is_met=lambda rows: rows == 1)
    with around_every_op(model, around):
        parting = bisect(model, make_ids(), is_sampled=after_prompt())
    assert parting is not None
    assert parting.fed_token == PROMPT  # the first that is fed in a step of its own
    assert parting.ops[0].call == OpCall(op, layer, nth)
    assert parting.ops[0].trainer < parting.ops[0].sampler


def test_what_is_computed_per_expert_is_named_by_the_op_that_gathers_it():
    model = make_model("gpt_oss")
    router = model.layers[1].mlp.router.weight
    around = differing("expert_linear", router, lambda x: x + 1, is_met=lambda rows: rows <= 4)
    with around_every_op(model, around):  # four experts, one token
        parting = bisect(model, make_ids(), is_sampled=after_prompt())
    assert parting.ops[0].call == OpCall("combine", 1, 0)


def test_long_prompts_are_prefilled_in_chunks():
    model, fed = make_model("qwen3"), []

    def around(op, function, *args, **kwargs):
        if op == "attention" and kwargs["layer"] == 0:
            context = kwargs["context"]
            fed.append(
                "row" if isinstance(context, PackedContext) else context.blocks[-1].positions.shape
            )
        return function(*args, **kwargs)

    is_sampled = np.arange(LENGTH) >= 9
    with around_every_op(model, around):
        arguments = {"is_sampled": is_sampled, "max_chunk_tokens": 4}
        assert bisect(model, make_ids(), company=[make_ids(6, 1)], **arguments) is None
    assert fed == ["row", (1, 4), (1, 2), (1, 4), (1, 4), (2, 1), (2, 1), (2, 1)]


@pytest.mark.parametrize("where", ["prompt", "observed"])
def test_a_difference_in_what_was_prefilled_is_found_where_it_arose(where):
    model, ids, is_sampled = make_model("qwen3"), make_ids(), after_prompt()
    is_sampled[7:10] = False
    stop = PROMPT if where == "prompt" else 10
    first = stop - (PROMPT if where == "prompt" else 4)  # the last sampled id of a turn is fed here

    def around(op, function, *args, **kwargs):
        out = function(*args, **kwargs)
        if op == "attention" and kwargs["layer"] == 1 and len(out) == stop - first:
            out = out.clone()
            out[1] += 1
        return out

    with around_every_op(model, around):
        parting = bisect(model, ids, is_sampled=is_sampled)
    assert parting.fed_token == first + 1
    assert parting.ops[0].call == OpCall("attention", 1, 0)
    # In the last layer: later tokens do not see it, and no log-prob was asked for there.
    assert parting.token is None and parting.trainer_logprob is None
    assert parting.describe().startswith(
        "Every log-prob is equal, but some intermediate numbers differ"
    )


def test_the_head_is_the_last_op_of_a_token():
    model = make_model("qwen3")
    around = differing("log_softmax", model.head, lambda x: x - 1, is_met=lambda rows: True)
    with around_every_op(model, around):
        parting = bisect(model, make_ids(), is_sampled=after_prompt())
    assert (parting.token, parting.fed_token) == (PROMPT, PROMPT - 1)
    (difference,) = parting.ops
    assert difference.call == OpCall("log_probs", None, 0)
    assert difference.trainer == parting.trainer_logprob
    assert difference.sampler == parting.sampler_logprob


def test_company_is_run_on_both_sides_and_may_be_what_parts_them():
    model, ids, company = make_model("qwen3"), make_ids(), [make_ids(8, 1), make_ids(6, 2)]
    norm = model.layers[0].post_attention_norm

    def around(op, function, *args, **kwargs):
        out = function(*args, **kwargs)
        in_step = len(args[0]) == 3  # two of company, and this row's
        return out + 0.5 if op == "rms_norm" and args[1] is norm and in_step else out

    with around_every_op(model, around):
        assert bisect(model, ids, is_sampled=after_prompt()) is None
        parting = bisect(model, ids, is_sampled=after_prompt(), company=company)
    assert parting.fed_token == PROMPT
    assert parting.ops[0].call == OpCall("rms_norm", 0, 2)


def test_differences_are_listed_from_where_they_arise_to_the_log_prob():
    model = make_model("qwen3")
    weight = model.layers[1].mlp.gate_up_proj.weight
    around = differing("swiglu", weight, lambda x: x * 1.01, is_met=lambda rows: rows == 1)
    with around_every_op(model, around):
        parting = bisect(model, make_ids(), is_sampled=after_prompt())
    assert [str(d.call) for d in parting.ops] == [
        "layer 1, swiglu[0]",
        "layer 1, linear[3]",
        "outside of the layers, rms_norm[0]",
        "outside of the layers, log_probs[0]",
    ]
    assert parting.ops[0].num_compared == 128
    assert parting.token == PROMPT + 1 and parting.fed_token == PROMPT
    last = parting.ops[-1]
    assert (last.trainer, last.sampler) == (parting.trainer_logprob, parting.sampler_logprob)
    assert last.max_abs_diff == abs(parting.trainer_logprob - parting.sampler_logprob) > 0


def test_where_stock_ops_part_the_numbers_are_those_of_the_packed_forward():
    model, ids = make_model("gpt_oss"), make_ids(60)
    model.ops = Ops()
    parting = bisect(model, ids, is_sampled=after_prompt(60))
    if parting is None:
        pytest.skip("stock ops gave equal bits here")
    row = torch.from_numpy(ids[:-1].astype(np.int64))
    with torch.no_grad():
        full = record(
            model,
            row,
            torch.arange(59),
            PackedContext.of([59]),
            keep=lambda outputs: outputs[0].flatten(1),
        )
    of_token = {
        call: kept[parting.fed_token] for call, kept in zip(full.calls, full.kept, strict=True)
    }
    for difference in parting.ops:
        if difference.call in of_token:
            assert difference.trainer in of_token[difference.call].tolist()
    assert parting.ops[0].call in of_token
    assert parting.trainer_logprob == float(packed_logprobs(model, ids)[parting.token])


# -- whose log-prob was recorded ------------------------------------------------------------------


def test_the_record_is_told_apart_from_each_side_where_they_part():
    model, ids, is_sampled = make_model("qwen3"), make_ids(), after_prompt()
    weight = model.layers[0].mlp.down_proj.weight
    around = differing("linear", weight, lambda x: x * 1.01, is_met=lambda rows: rows == 1)
    with around_every_op(model, around):
        found = bisect(model, ids, is_sampled=is_sampled)
        texts = {}
        for side, value in (
            ("trainer", found.trainer_logprob),
            ("sampler", found.sampler_logprob),
            ("neither", -1.5),
            ("unknown", np.nan),
        ):
            recorded = packed_logprobs(model, ids)
            recorded[found.token] = value
            parting = bisect(model, ids, is_sampled=is_sampled, recorded=recorded)
            assert parting.recorded_side == side
            known = None if side == "unknown" else value
            assert parting == replace(found, recorded_logprob=known)
            texts[side] = parting.describe()
    both = (
        f"Token {PROMPT + 1} is the first whose log-probs differ: "
        f"{found.trainer_logprob:.9g} by the trainer's packed forward, {found.sampler_logprob:.9g} "
        "by the sampler's steps, and "
    )
    assert texts["trainer"].startswith(both + "the trainer's was recorded.")
    assert texts["sampler"].startswith(both + "the sampler's was recorded.")
    assert texts["neither"].startswith(both + "-1.5 was recorded.")
    assert texts["unknown"].startswith(both + "none was recorded.")
    for text in texts.values():
        assert (
            f" The sides diverge at token {PROMPT} in layer 0, linear[3]: 64 of 64 numbers" in text
        )
        assert text.endswith(".") and "\n" not in text


def test_what_this_model_does_not_give_is_said_to_come_from_elsewhere():
    model, ids = make_model("qwen3"), make_ids()
    recorded = packed_logprobs(model, ids)
    recorded[8:] -= 0.25
    parting = bisect(model, ids, is_sampled=after_prompt(), recorded=recorded)
    assert (parting.token, parting.fed_token, parting.ops) == (8, None, ())
    assert parting.trainer_logprob == parting.sampler_logprob == float(recorded[8]) + 0.25
    assert f"and {recorded[8]:.9g} was recorded. Both sides agree" in parting.describe()


def test_a_result_that_changes_from_run_to_run_is_called_that():
    model, count = make_model("qwen3"), 0

    def around(op, function, *args, **kwargs):
        nonlocal count
        out = function(*args, **kwargs)
        if op == "attention" and len(out) == 1 and kwargs["layer"] == 0:
            count += 1
            return out + 1 if count == 1 else out
        return out

    with around_every_op(model, around):
        parting = bisect(model, make_ids(), is_sampled=after_prompt())
    assert parting.fed_token == PROMPT and parting.ops == ()
    assert "changes from run to run" in parting.describe()


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_sampled": np.ones(3, bool)}, "12 token_ids, and 3 entries of is_sampled"),
        ({"recorded": np.zeros(11, np.float32)}, "12 token_ids, and 11 entries of recorded"),
        ({"support": Ragged.empty(2)}, "12 token_ids, and 2 entries of support"),
        ({"is_sampled": np.zeros(LENGTH, bool)}, "no token is marked as sampled"),
        ({"is_sampled": np.ones(LENGTH, bool)}, "token 0 is marked as sampled"),
    ],
)
def test_columns_that_are_not_parallel_are_refused(change, message):
    arguments = {"is_sampled": after_prompt()} | change
    with pytest.raises(AlignmentError, match=message):
        bisect(make_model("qwen3"), make_ids(), **arguments)


class TwoWays(Decoder):
    def forward(self, ids_T, positions_T, context):
        hidden = super().forward(ids_T, positions_T, context)
        if isinstance(context, PagedContext):
            hidden = self.ops.rms_norm(hidden, self.final_norm, 1e-6)
        return hidden


def test_a_model_that_calls_other_ops_on_one_side_is_refused():
    message = "is outside of the layers, log_probs.0. in the packed forward, and .* rms_norm.1."
    with pytest.raises(AlignmentError, match=message):
        bisect(make_model("qwen3", cls=TwoWays), make_ids(), is_sampled=after_prompt())


# -- recording ------------------------------------------------------------------------------------


def test_digests_are_equal_where_all_numbers_of_a_token_are():
    x = torch.randn(50, 3, 7, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[4, 2, 6] = next_float(y[4, 2, 6])
    y[9, 0, :2] = y[9, 0, :2].flip(0)
    assert (digests((x,)) != digests((y,))).nonzero().flatten().tolist() == [4, 9]
    assert (digests((x, x)) != digests((x, y))).nonzero().flatten().tolist() == [4, 9]
    zero = torch.zeros(2, 3)
    assert torch.equal(digests((zero,)), digests((-zero,)))
    nan = torch.full((2, 3), float("nan"))
    assert torch.equal(digests((nan,)), digests((-nan,)))
    assert torch.equal(at_token((x, x), token=3), torch.cat([x[3], x[3]]).flatten().double())


def test_digests_of_a_long_row_are_those_of_its_parts(monkeypatch):
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    whole = digests((x,))
    monkeypatch.setattr("lockstep.ops.recording.DIGEST_NUMBERS", 56)
    assert torch.equal(digests((x,)), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_names_every_call_with_its_layer_and_leaves_nothing_behind(kind):
    model = make_model(kind)
    before = model.ops
    ids = torch.arange(6)
    with torch.no_grad():
        run = record(model, ids, ids, PackedContext.of([6]), keep=lambda outputs: outputs[0])
        assert torch.equal(run.hidden, model(ids, ids, PackedContext.of([6])))
    assert model.ops is before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.layers)
    assert torch.equal(run.kept[-1], run.hidden)
    per_layer = {
        "qwen3": "rms_norm linear rms_norm rope attention linear rms_norm linear swiglu linear",
        "gpt_oss": "rms_norm linear rope attention linear rms_norm linear route combine",
    }[kind].split()
    assert [call.op for call in run.calls] == [*per_layer, *per_layer, "rms_norm"]
    layers = [0] * len(per_layer) + [1] * len(per_layer) + [None]
    assert [call.layer for call in run.calls] == layers


def test_rows_that_are_not_in_the_order_of_the_tokens_are_left_out(monkeypatch):
    """With one expert per token there are as many pairs as tokens, sorted by expert."""
    monkeypatch.setattr("lockstep.models.experts.ALL_EXPERTS_MULTIPLIES", 0)
    config = ModelConfig.from_hf(hf_config("gpt_oss", VOCAB, None))
    model = Decoder(replace(config, num_active_experts=1))
    ids = torch.arange(6)
    with torch.no_grad():
        run = record(model, ids, ids, PackedContext.of([6]), keep=digests)
    assert {"expert_linear", "swiglu"}.isdisjoint(call.op for call in run.calls)
    assert OpCall("combine", 1, 0) in run.calls


def test_experts_that_run_in_chunks_of_tokens_are_one_call(monkeypatch):
    model = make_model("gpt_oss")
    ids = torch.arange(7)
    runs = []
    for least_chunk in (7, 3):
        monkeypatch.setattr("lockstep.models.experts.ALL_EXPERTS_MULTIPLIES", 0)
        monkeypatch.setattr("lockstep.models.experts.ROWS_PER_EXPERT", {"cpu": 1})
        monkeypatch.setattr("lockstep.models.experts.LEAST_CHUNK", least_chunk)
        with torch.no_grad():
            runs.append(record(model, ids, ids, PackedContext.of([7]), keep=lambda outs: outs[0]))
    whole, chunked = runs
    assert whole.calls == chunked.calls
    for a, b in zip(whole.kept, chunked.kept, strict=True):
        torch.testing.assert_close(a, b)


# -- ops outside of the API -----------------------------------------------------------------------


def outside(model, length=5):
    ids = torch.arange(length)
    return ops_outside(model, ids, ids, PackedContext.of([length]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "invariant"])
def test_the_decoder_computes_nothing_by_itself(monkeypatch, kind, dtype, name):
    model = make_model(kind, dtype=dtype)
    model.ops = Ops() if name == "plain" else InvariantOps()
    assert outside(model) == []
    monkeypatch.setattr("lockstep.models.experts.ALL_EXPERTS_MULTIPLIES", 0)  # tokens are sorted
    assert outside(model) == []


class Then(torch.nn.Module):
    """`compute` on what `inner` gives."""

    def __init__(self, inner, compute):
        super().__init__()
        self.inner, self.compute = inner, compute

    def forward(self, x, *rest):
        return self.compute(self.inner(x, *rest))


SQUARE = torch.eye(64)


@pytest.mark.parametrize(
    ("compute", "op"),
    [
        (torch.nn.functional.gelu, "gelu"),
        (torch.nn.functional.silu, "silu"),
        (torch.sigmoid, "sigmoid"),
        (torch.tanh, "tanh"),
        (torch.exp, "exp"),
        (torch.rsqrt, "rsqrt"),
        (lambda x: x @ SQUARE, "mm"),
        (lambda x: torch.nn.functional.linear(x, SQUARE, SQUARE[0]), "addmm"),
        (lambda x: torch.bmm(x[None], SQUARE[None])[0], "bmm"),
        (lambda x: x.softmax(-1), "_softmax"),
        (lambda x: x - x.mean(-1, keepdim=True), "mean"),
        (lambda x: x / x.norm(dim=-1, keepdim=True), "linalg_vector_norm"),
        (lambda x: torch.nn.functional.layer_norm(x, (64,)), "native_layer_norm"),
        (lambda x: x * x.sum(), "sum"),
        (lambda x: x.cumsum(-1), "cumsum"),
        (lambda x: torch.zeros_like(x).index_add_(0, torch.arange(len(x)), x), "index_add_"),
        (lambda x: torch.add(x, x, alpha=0.5), "add"),
        (lambda x: torch.addcmul(x, x, x), "addcmul"),
        (lambda x: x + torch.rand(1), "rand"),
        (lambda x: Ops().linear(x, SQUARE), "mm"),  # the backend itself, and not by the API
    ],
)
def test_an_op_outside_of_the_api_is_named_with_its_module(compute, op):
    model = make_model("qwen3")
    model.layers[1].mlp = Then(model.layers[1].mlp, compute)
    assert f"aten.{op} in Decoder.layers.1.mlp" in outside(model)


def test_moving_numbers_and_single_roundings_are_a_models_own_affair():
    model = make_model("qwen3")

    def compute(x):
        x = (x * 2.0 - 1).clamp(-4, 4).relu().div(3).neg()
        order = x[:, 0].argsort()
        x = torch.stack([x[order], torch.where(x > 0, x, 0)])[0].roll(1, -1).to(torch.float64)
        return x.flip(0).to(torch.float32).contiguous().add_(torch.arange(5).cumsum(0)[:, None])

    model.layers[0].mlp = Then(model.layers[0].mlp, compute)
    assert outside(model) == []
