"""Programs of the real client against the server."""

import pickle
import time

import numpy as np
import pytest
from test_recovery import Killed
from unigrams import VOCAB, log_softmax
from wires import soon

pytest.importorskip("tinker._version")
import tinker
import torch
from tinker import types
from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

from lockstep.tinker.server import ROUTES


def ints(*ids):
    return types.ModelInput.from_ints(list(ids))


def datum(num=3, *, first=1, **inputs):
    """`first` shows in the backend's log."""
    given = {"target_tokens": list(range(2, num + 2)), "weights": [1.0] * num} | inputs
    return types.Datum(model_input=ints(first, *range(2, num + 1)), loss_fn_inputs=given)


@pytest.fixture
def train(served, client_of):
    return client_of(served).create_lora_training_client("org/tiny", rank=8, seed=3).result()


# -- training -------------------------------------------------------------------------------------


def test_a_program_trains_saves_samples_and_resumes(served, client_of):
    service = client_of(served)
    train = service.create_lora_training_client("org/tiny", rank=8, seed=3).result()
    assert train.get_info().model_data.tokenizer_id == "org/tiny"
    first = train.forward_backward([datum(), datum(5)], "cross_entropy")
    step = train.optim_step(types.AdamParams(learning_rate=0.1))
    found = first.result()
    assert [each["logprobs"].shape for each in found.loss_fn_outputs] == [[3], [5]]
    total = sum(float(each["logprobs"].to_numpy().sum()) for each in found.loss_fn_outputs)
    assert found.metrics["loss:sum"] == pytest.approx(-total)
    assert step.result().metrics["grad_norm:mean"] > 0
    path = train.save_state("first").result().path
    assert path == f"tinker://{train.model_id}/weights/first"
    after = train.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    train.optim_step(types.AdamParams(learning_rate=0.1)).result()

    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.model_id != train.model_id and resumed.get_info().lora_rank == 8
    again = resumed.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    assert again == after


def test_chunks_that_come_as_2_3_1_are_executed_in_order(serve, client_of, monkeypatch):
    monkeypatch.setitem(ROUTES["served"], "POST client/config", SMALL)
    served = serve()
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()
    data = [datum(first=first) for first in (11, 12, 13, 14)]
    both = train.forward_backward(data, "cross_entropy")
    step = train.optim_step(types.AdamParams(learning_rate=0.5))
    assert len(both.result().loss_fn_outputs) == 4 and step.result().metrics
    done = [each for each in served.backend.executed if each[0] != "create"]
    assert done == [*(("backward", first) for first in (11, 12, 13, 14)), ("optim", 0.5)]


SMALL = {"fwdbwd_max_chunk_len": 1, "proto_compress_fwdbwd": True}
"""One datum in each request, packed by zstd."""


def test_a_refused_request_raises_at_once_and_the_next_one_goes_through(train):
    started = time.monotonic()
    for loss, text in [
        ("nonsense", "expected one of"),
        ("stable_reinforce", "importance_sampling"),
    ]:
        with pytest.raises(tinker.UnprocessableEntityError, match=text):
            train.forward_backward([datum()], loss).result()
    wrong = [
        datum(target_tokens=[1, 2]),
        datum(target_tokens=[1, 2, VOCAB]),
        datum(weights=[1.0, float("nan"), 1.0]),
        types.Datum(model_input=ints(), loss_fn_inputs={"target_tokens": []}),
        types.Datum(
            model_input=types.ModelInput(
                chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=3)]
            ),
            loss_fn_inputs={"target_tokens": [1, 2, 3]},
        ),
    ]
    for each in wrong:
        with pytest.raises(tinker.UnprocessableEntityError, match=r"data\[0\]"):
            train.forward_backward([each], "cross_entropy").result()
    assert train.forward_backward([datum()], "cross_entropy").result().metrics
    assert time.monotonic() - started < 10


def test_a_failed_request_raises_with_its_category_and_the_next_one_goes_through(train):
    for beta, category, text in [(13, "user", "unlucky"), (14, "server", "ZeroDivisionError")]:
        with pytest.raises(tinker.RequestFailedError, match=text) as caught:
            train.forward_backward([datum()], "ppo", {"beta": float(beta)}).result()
        assert caught.value.category.value == category
    assert train.forward_backward([datum()], "cross_entropy").result().metrics
    assert train.optim_step(types.AdamParams()).result()


def test_a_custom_loss_runs_in_the_client(train):
    def loss(data, logprobs):
        return sum((each**2).sum() for each in logprobs), {"seen": 1.0}

    found = train.forward_backward_custom([datum(), datum(4)], loss)
    step = train.optim_step(types.AdamParams(learning_rate=0.1))
    assert found.result().metrics["seen"] == 1.0
    assert step.result().metrics["grad_norm:mean"] > 0


def test_a_custom_loss_runs_in_the_server(served, client_of):
    service = client_of(served)
    train = service.create_lora_training_client("org/tiny", rank=8).result()

    def loss(logprobs, advantages):
        value = -(logprobs * advantages).sum()
        return value, {"custom/a:sum": value.detach()}

    handle = service.create_custom_loss(loss, {"logprobs": 1, "advantages": 1})
    handle = handle.result() if hasattr(handle, "result") else handle
    one = datum()
    del one.loss_fn_inputs["weights"]
    one.loss_fn_inputs["advantages"] = types.TensorData(data=[1.0] * 3, dtype="float32", shape=[3])
    assert train.forward_backward_custom([one], handle).result().metrics["custom:sum"] > 1


def test_a_custom_loss_with_an_operation_that_is_not_allowed_raises(served, client_of):
    service = client_of(served)

    def loss(logprobs, advantages):
        return torch.poisson(logprobs * advantages).sum(), {}

    with pytest.raises(tinker.UnprocessableEntityError, match="is not among"):
        handle = service.create_custom_loss(loss, {"logprobs": 1, "advantages": 1})
        handle.result()


def test_a_custom_loss_of_several_chunks_keeps_the_order(serve, client_of, monkeypatch):
    """Its 2n requests come before the update that was asked for meanwhile."""
    monkeypatch.setitem(ROUTES["served"], "POST client/config", SMALL)
    served = serve()
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()

    def loss(data, logprobs):
        return sum((each**2).sum() for each in logprobs), {}

    data = [datum(first=first) for first in (11, 12, 13)]
    passed = train.forward_backward_custom(data, loss)
    step = train.optim_step(types.AdamParams(learning_rate=0.5))
    assert "loss:sum" in passed.result().metrics and step.result().metrics
    done = [each for each in served.backend.executed if each[0] != "create"]
    both = [(kind, first) for kind in ("forward", "backward") for first in (11, 12, 13)]
    assert done == [*both, ("optim", 0.5)]


def test_matrices_and_spans_arrive(served, train):
    targets = torch.zeros(6, 40, dtype=torch.int64)
    targets[:, 0] = 5
    weights = torch.zeros(6, 40)
    weights[:, 0] = 1.0
    wide = types.Datum(
        model_input=ints(*[1] * 6), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    found = train.forward_backward([wide], "cross_entropy").result()
    assert found.loss_fn_outputs[0]["logprobs"].shape == [6, 40]
    spans = [
        PromptProvenanceSpan(sequence_id="q1", length=2),
        SampledProvenanceSpan(sequence_id="q1", length=2),
    ]
    one = datum(4).with_provenance(model_input=spans, loss_fn_inputs=spans)
    assert train.forward_backward([one], "cross_entropy").result()


def test_unknown_and_unservable_models_raise_at_once(served, client_of):
    service = client_of(served)
    with pytest.raises(tinker.NotFoundError, match="org/tiny"):
        service.create_lora_training_client("org/other", rank=8).result()
    with pytest.raises(tinker.RequestFailedError, match="64"):
        service.create_lora_training_client("org/tiny", rank=128).result()
    with pytest.raises(tinker.NotFoundError, match="never saved"):
        service.create_training_client_from_state("tinker://a/weights/b").result()
    with pytest.raises(tinker.UnprocessableEntityError, match="tinker://MODEL"):
        service.create_training_client_from_state("tinker://a/../b/c").result()
    long = service.create_lora_training_client("org/tiny:peft:262144", rank=8).result()
    assert long.get_info().model_data.model_name == "org/tiny"


# -- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_is_overwritten_only_on_request(train):
    train.save_state("one").result()
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):
        train.save_state("one").result()
    train.save_state("one", overwrite=True).result()
    for name in ("../evil", "a/b", ".hidden", "x" * 200, "x.partial"):
        with pytest.raises(tinker.UnprocessableEntityError, match="cannot name a checkpoint"):
            train.save_state(name).result()


def test_checkpoints_are_listed_expire_and_are_deleted(served, train):
    saved = train.save_state("one", ttl_seconds=3600).result().path
    sampler = train.save_weights_for_sampler("two").result().path
    rest = tinker.RestClient(base_url=served.url, api_key="tml-none")
    listed = rest.list_checkpoints(train.model_id).result().checkpoints
    assert {(each.checkpoint_id, each.checkpoint_type) for each in listed} == {
        ("weights/one", "training"),
        ("sampler_weights/two", "sampler"),
    }
    assert all(each.size_bytes > 0 for each in listed)
    assert rest.get_weights_info_by_tinker_path(saved).result().lora_rank == 8
    run = rest.get_training_run(train.model_id).result()
    assert run.last_checkpoint.tinker_path == saved
    assert run.last_sampler_checkpoint.tinker_path == sampler
    assert [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    assert len(rest.list_user_checkpoints().result().checkpoints) == 2
    rest.set_checkpoint_ttl_from_tinker_path(saved, 1).result()
    time.sleep(1.1)
    assert len(rest.list_checkpoints(train.model_id).result().checkpoints) == 1
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    assert not rest.list_checkpoints(train.model_id).result().checkpoints
    assert not list((served.service.store.directory / "checkpoints").rglob("two"))
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(sampler).result()
    with pytest.raises(tinker.NotFoundError, match="publishing"):
        rest.publish_checkpoint_from_tinker_path(saved).result()
    sessions = rest.list_sessions().result().sessions
    assert train.model_id in rest.get_session(sessions[0]).result().training_run_ids


def test_a_sampler_checkpoint_has_no_optimizer_to_load(served, client_of, train):
    path = train.save_weights_for_sampler("one").result().path
    service = client_of(served)
    with pytest.raises(tinker.UnprocessableEntityError, match="has no optimizer state"):
        service.create_training_client_from_state_with_optimizer(path).result()
    assert service.create_training_client_from_state(path).result().model_id


# -- sampling -------------------------------------------------------------------------------------

PARAMS = types.SamplingParams(max_tokens=8)


def test_samples_are_those_of_the_saved_weights(served, train):
    sampler = train.save_weights_and_get_sampling_client().result()
    assert sampler.get_base_model() == "org/tiny"
    logprobs = log_softmax(served.backend.models[train.model_id].logits)
    found = sampler.sample(ints(1, 2, 3), 32, PARAMS).result()
    assert len({each.sequence_id for each in found.sequences}) == 32
    for each in found.sequences:
        assert each.logprobs == logprobs[each.tokens].tolist()
        assert (each.stop_reason == "stop") == (each.tokens[-1] == 0)
    # Each has its own draws. By chance, two of eight tokens are equal once in 300,000 times.
    whole = [tuple(each.tokens) for each in found.sequences if len(each.tokens) == 8]
    assert len(whole) == len(set(whole)) > 1
    scored = sampler.compute_logprobs(ints(4, 5, 6)).result()
    assert scored == [None, *logprobs[[5, 6]].tolist()]


def test_temperature_seed_and_stops_reach_the_sampler(served, train):
    sampler = train.save_weights_and_get_sampling_client().result()
    seeded = types.SamplingParams(max_tokens=40, seed=5, temperature=0.5, stop=[])
    first, second = (sampler.sample(ints(1), 2, seeded).result().sequences for _ in range(2))
    assert [each.tokens for each in first] == [each.tokens for each in second]
    assert {each.stop_reason for each in first} == {"length"}
    logits = served.backend.models[train.model_id].logits
    assert first[0].logprobs == log_softmax(logits / np.float32(0.5))[first[0].tokens].tolist()
    unseeded = types.SamplingParams(max_tokens=20, stop=[])
    free = [sampler.sample(ints(1), 1, unseeded).result() for _ in "ab"]
    assert free[0].sequences[0].tokens != free[1].sequences[0].tokens


def test_every_kind_of_prompt_logprobs_comes_back(train):
    sampler = train.save_weights_and_get_sampling_client().result()
    targets = torch.full((3, 20), -1, dtype=torch.int64)
    targets[2, 0] = 7
    found = sampler.sample(
        ints(1, 2, 3, 4),
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(targets, pad_value=-1),
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=2,
    ).result()
    assert found.prompt_logprobs[:2] == [None, None] and found.prompt_logprobs[2] < 0
    assert found.target_prompt_logprobs.sparse_col_indices == [0]
    assert found.prompt_alt_tokens.tokens.shape == [3, 2]
    assert len(found.topk_prompt_logprobs) == 4 and found.sequences[0].topk_logprobs


def test_samples_that_cannot_be_drawn_raise_at_once(train):
    sampler = train.save_weights_and_get_sampling_client().result()
    for prompt, params, text in [
        (ints(), PARAMS, "nothing to continue"),
        (ints(VOCAB), PARAMS, r"org/tiny.*\b0\b.*49"),
        (ints(*[1] * 64), PARAMS, "64"),
        (ints(1), types.SamplingParams(max_tokens=64), "64"),
    ]:
        with pytest.raises(tinker.APIStatusError, match=text):
            sampler.sample(prompt, 1, params).result()
    assert sampler.sample(ints(1), 1, PARAMS).result()


def test_named_and_base_samplers(served, client_of, train):
    service = client_of(served)
    path = train.save_weights_for_sampler("one").result().path
    named = service.create_sampling_client(model_path=path).result()
    assert named.get_base_model() == "org/tiny"
    base = service.create_sampling_client(base_model="org/tiny").result()
    assert base.compute_logprobs(ints(1, 2)).result()[1] == pytest.approx(-np.log(VOCAB))
    before = named.compute_logprobs(ints(1, 2)).result()
    rest = tinker.RestClient(base_url=served.url, api_key="tml-none")
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert named.compute_logprobs(ints(1, 2)).result() == before
    with pytest.raises(tinker.NotFoundError, match="not here"):
        service.create_sampling_client(model_path=path).result()


def test_an_inflight_save_replaces_the_weights_of_earlier_ones(train):
    first = train.save_weights_and_get_sampling_client(kind="inflight")
    frozen = train.save_weights_and_get_sampling_client()
    first = first.result() if hasattr(first, "result") else first
    frozen = frozen.result() if hasattr(frozen, "result") else frozen
    before = first.compute_logprobs(ints(1, 2)).result()
    assert frozen.compute_logprobs(ints(1, 2)).result() == before
    train.forward_backward([datum()], "cross_entropy").result()
    train.optim_step(types.AdamParams(learning_rate=1.0)).result()
    assert first.compute_logprobs(ints(1, 2)).result() == before
    second = train.save_weights_and_get_sampling_client(kind="inflight").result()
    after = second.compute_logprobs(ints(1, 2)).result()
    assert after != before and first.compute_logprobs(ints(1, 2)).result() == after
    assert frozen.compute_logprobs(ints(1, 2)).result() == before


def test_an_unpickled_sampling_client_samples(train):
    sampler = train.save_weights_and_get_sampling_client().result()
    copy = pickle.loads(pickle.dumps(sampler))
    found = [each.sample(ints(1), 1, PARAMS).result() for each in (sampler, copy)]
    assert found[0].sequences[0].sequence_id != found[1].sequences[0].sequence_id


def test_too_many_samples_wait_and_are_drawn_later(serve, client_of):
    served = serve(max_pending_samples=4)
    served.backend.seconds = 0.05
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()
    sampler = train.save_weights_and_get_sampling_client().result()
    futures = [sampler.sample(ints(1), 1, PARAMS) for _ in range(12)]
    assert all(future.result().sequences for future in futures)


def test_a_few_samplers_are_in_memory_and_the_others_come_back(serve, client_of):
    served = serve(max_open_samplers=2)
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()
    samplers = [train.save_weights_and_get_sampling_client().result() for _ in range(4)]
    first = [each.compute_logprobs(ints(1, 2)).result() for each in samplers]
    assert len(served.backend.samplers) == 2
    assert [each.compute_logprobs(ints(1, 2)).result() for each in samplers] == first


# -- the server -----------------------------------------------------------------------------------


def test_a_wrong_key_raises_at_once(serve):
    served = serve(key="tml-right")
    started = time.monotonic()
    with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
        wrong = tinker.ServiceClient(base_url=served.url, api_key="tml-wrong")
        wrong.create_lora_training_client("org/tiny", rank=8).result()
    right = tinker.ServiceClient(base_url=served.url, api_key="tml-right")
    assert right.get_server_capabilities().supported_models[0].max_context_length == 64
    right.close("success").result()
    assert time.monotonic() - started < 10


def test_a_body_that_is_too_large_raises_and_the_next_one_goes_through(serve, client_of):
    served = serve(max_body_bytes=20_000)
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()
    with pytest.raises(tinker.APIStatusError, match="max_body_bytes=20000"):
        train.forward_backward([datum(60)] * 40, "cross_entropy").result()
    assert train.forward_backward([datum()], "cross_entropy").result().metrics


def test_a_finished_session_frees_its_models_and_keeps_its_checkpoints(served, client_of):
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-none")
    train = service.create_lora_training_client("org/tiny", rank=8).result()
    path = train.save_state("one").result().path
    sampler = train.save_weights_and_get_sampling_client().result()
    assert sampler.sample(ints(1), 1, PARAMS).result() and len(served.backend.samplers) == 1
    service.close("success").result()
    left = served.service.store.directory / "samplers"
    assert soon(lambda: not served.backend.models and not served.backend.samplers)
    assert soon(lambda: not list(left.glob("*")))
    assert client_of(served).create_training_client_from_state_with_optimizer(path).result()


def test_a_client_that_vanished_is_noticed(serve, monkeypatch):
    monkeypatch.setattr("lockstep.tinker.service.SWEEP_SECONDS", 0.05)
    served = serve(silent_seconds=0.5)
    service = tinker.ServiceClient(base_url=served.url, api_key="tml-none")
    train = service.create_lora_training_client("org/tiny", rank=8).result()
    assert served.backend.models
    assert soon(lambda: not served.backend.models)
    with pytest.raises(tinker.APIStatusError, match="heard"):
        train.optim_step(types.AdamParams()).result()
    service.close("success").result()


# -- futures --------------------------------------------------------------------------------------


def test_slow_results_are_asked_for_again(serve, client_of):
    served = serve(hold_seconds=0.05)
    train = client_of(served).create_lora_training_client("org/tiny", rank=8).result()
    sampler = train.save_weights_and_get_sampling_client().result()
    served.backend.seconds = 0.3
    passed = train.forward_backward([datum()], "cross_entropy")
    sampled = sampler.sample(ints(1), 1, PARAMS)
    assert passed.result().metrics and sampled.result().sequences


def test_large_results_are_announced_before_they_are_sent(serve, client_of, monkeypatch):
    monkeypatch.setattr("lockstep.tinker.futures.MAX_INLINE_BYTES", 10)
    train = client_of(serve()).create_lora_training_client("org/tiny", rank=8).result()
    assert train.forward_backward([datum()], "cross_entropy").result().metrics
    sampler = train.save_weights_and_get_sampling_client().result()
    assert sampler.sample(ints(1), 1, PARAMS).result().sequences


def test_a_request_that_the_server_lost_raises(tmp_path):
    """A server over another directory knows neither the request nor its session."""
    with Killed(tmp_path / "one", 30.0) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-none")
        train = service.create_lora_training_client("org/tiny", rank=8).result()
        lost = train.forward_backward([datum()], "cross_entropy")
        time.sleep(0.3)
        server.kill()
        server.directory = tmp_path / "two"
        server.start()
        with pytest.raises(ValueError, match="is not known to this server"):
            lost.result()
        with pytest.raises(tinker.NotFoundError, match="create_lora"):
            train.optim_step(types.AdamParams()).result()
        service.close("success").result(timeout=30)
