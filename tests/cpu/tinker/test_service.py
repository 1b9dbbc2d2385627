"""Order, repetition and answers of single requests, as bytes on the wire."""

import json
import time

import pytest
from unigrams import Unigrams
from wires import Wire

from lockstep.errors import RunError
from lockstep.tinker.service import TinkerService
from lockstep.tinker.wire import PROTOBUF, message
from lockstep.tinker_config import TinkerConfig


@pytest.fixture
def wire(served):
    return Wire(served)


# -- order ----------------------------------------------------------------------------------------


def test_early_requests_are_held(served, wire):
    model = wire.model()
    early = [
        wire.step(model, 4),
        wire.backward(model, 2, first=12),
        wire.backward(model, 3, first=13),
    ]
    assert all(status == 200 for status, _ in early)
    assert len(served.backend.executed) == 1
    assert wire.backward(model, 1, first=11)[0] == 200
    assert wire.retrieve(early[0][1]["request_id"])[0] == 200
    assert served.backend.executed[1:] == [
        *(("backward", first) for first in (11, 12, 13)),
        ("optim", 0.1),
    ]


def test_a_refused_request_uses_up_its_seq_id(served, wire):
    model = wire.model()
    held = wire.step(model, 3)[1]
    for _ in range(2):
        status, found = wire.backward(model, 1, loss="nonsense")
        assert status == 422 and "expected one of" in found["detail"]
    assert wire.backward(model, 2)[0] == 200
    assert wire.retrieve(held["request_id"])[0] == 200
    assert [kind for kind, _ in served.backend.executed] == ["create", "backward", "optim"]


def test_a_body_that_cannot_be_read_uses_up_its_seq_id(served, wire):
    model = wire.model()
    head = message("ForwardBackwardRequest")
    head.model_id, head.seq_id = model, 1
    status, raw, _ = wire.send("forward_backward", head.SerializeToString() + b"\xff\xff", PROTOBUF)
    assert status == 400 and b"no protobuf message" in raw
    assert wire.retrieve(wire.step(model, 2)[1]["request_id"])[0] == 200


def test_a_request_that_never_comes_is_given_up(serve):
    served = serve(missing_seconds=0.3)
    wire = Wire(served)
    model = wire.model()
    assert wire.retrieve(wire.step(model, 2)[1]["request_id"])[0] == 200
    status, found = wire.backward(model, 1)
    assert status == 422 and "did not arrive within 0.3 s" in found["detail"]
    assert wire.retrieve(wire.step(model, 3)[1]["request_id"])[0] == 200


def test_models_do_not_wait_for_each_other(served, wire):
    first, second = wire.model(0), wire.model(1)
    wire.step(first, 2)
    assert wire.retrieve(wire.step(second, 1)[1]["request_id"])[0] == 200


# -- repetition -----------------------------------------------------------------------------------


def test_the_same_request_is_executed_once(served, wire):
    model = wire.model()
    told = {json.dumps(wire.backward(model, 1)) for _ in range(3)}
    told |= {json.dumps(wire.backward(model, 1)) for _ in range(3)}
    assert len(told) == 1
    request_id = json.loads(told.pop())[1]["request_id"]
    found = [wire.retrieve(request_id) for _ in range(3)]
    assert found[0] == found[1] == found[2] and found[0][0] == 200
    assert wire.step(model, 2) == wire.step(model, 2)
    assert wire.post("create_model", **CREATE, session_id=wire.session) == wire.post(
        "create_model", **CREATE, session_id=wire.session
    )
    assert [kind for kind, _ in served.backend.executed].count("backward") == 1


CREATE = {"model_seq_id": 0, "base_model": "org/tiny", "lora_config": {"rank": 8, "seed": 1}}


def test_another_payload_under_a_used_seq_id_is_refused(wire):
    model = wire.model()
    assert wire.backward(model, 1)[0] == 200
    for status, found in [wire.backward(model, 1, first=9), wire.step(model, 1)]:
        assert status == 422 and "used before with another payload" in found["detail"]
    assert wire.step(model, 2)[0] == 200
    changed = {**CREATE, "lora_config": {"rank": 4}}
    assert wire.post("create_model", **changed, session_id=wire.session)[0] == 422


def test_a_repeated_save_for_sampling_may_count_on(wire):
    """The client draws another sampling_session_seq_id for each attempt."""
    model = wire.model()
    body = {"model_id": model, "seq_id": 1, "kind": "snapshot"}
    first = wire.post("save_weights_for_sampler", **body, sampling_session_seq_id=0)
    assert first == wire.post("save_weights_for_sampler", **body, sampling_session_seq_id=1)
    found = wire.retrieve(first[1]["request_id"])[1]
    assert found["sampling_session_id"].endswith(":sample:0")


def test_a_repeated_request_for_samples_has_the_same_sequences(wire):
    sampler = wire.sampler()
    assert wire.sampler() == sampler
    first = wire.sample(sampler, 225_265_691_000_000_000, num_samples=2)
    assert first[0] == 200 and len(first[1]["sample_sequence_ids"]) == 2
    assert wire.sample(sampler, 225_265_691_000_000_000, num_samples=2) == first
    assert wire.sample(sampler, 225_265_691_000_000_000, 5)[0] == 422
    body = {"session_id": wire.session, "sampling_session_seq_id": 0, "base_model": "org/other"}
    assert wire.post("create_sampling_session", **body)[0] == 404


# -- futures --------------------------------------------------------------------------------------


def test_a_result_that_takes_long_is_asked_for_again(serve):
    served = serve(hold_seconds=0.2)
    served.backend.seconds = 0.5
    wire = Wire(served)
    model = wire.model()
    request_id = wire.backward(model, 1)[1]["request_id"]
    status, found = wire.retrieve(request_id)
    assert status == 408 and found["type"] == "try_again" and found["queue_state"] == "active"
    while (found := wire.retrieve(request_id))[0] == 408:
        pass
    assert found[0] == 200


def test_an_unknown_future_raises_at_once(wire):
    status, found = wire.retrieve("nothing")
    assert status == 404 and "Send the request again" in found["detail"]


def test_a_large_result_is_announced_once(serve, monkeypatch):
    monkeypatch.setattr("lockstep.tinker.futures.MAX_INLINE_BYTES", 10)
    wire = Wire(serve())
    request_id = wire.backward(wire.model(), 1)[1]["request_id"]
    told = wire.retrieve(request_id, allow_metadata_only=True)[1]
    assert told["status"] == "complete_metadata"
    assert len(wire.retrieve(request_id)[1]) == told["response_payload_size"]


def test_results_are_deleted_some_time_after_they_were_fetched(serve):
    served = serve(result_seconds=0.01, state_seconds=0)
    wire = Wire(served)
    model = wire.model()
    kept, fetched = wire.backward(model, 1)[1], wire.step(model, 2)[1]
    assert wire.retrieve(fetched["request_id"])[0] == 200
    time.sleep(0.05)
    served.wait(served.service.expire())
    assert wire.retrieve(kept["request_id"])[0] == 200
    status, found = wire.retrieve(fetched["request_id"])
    assert status == 410 and "s later" in found["detail"]


def test_samples_are_cancelled(served, wire):
    import asyncio

    served.backend.gate = asyncio.Event()
    request_id = wire.sample(wire.sampler(), 0)[1]["request_id"]
    assert wire.post("cancel_future", request_id=request_id) == (200, {})
    assert wire.retrieve(request_id) == (
        200,
        {"error": "the client cancelled it.", "category": "user"},
    )
    assert wire.post("cancel_future", request_id="nothing") == (200, {})


def test_too_many_samples_are_answered_with_429(serve):
    import asyncio

    served = serve(max_pending_samples=2)
    served.backend.gate = asyncio.Event()
    wire = Wire(served)
    sampler = wire.sampler()
    found = [wire.sample(sampler, seq_id)[0] for seq_id in range(3)]
    assert found == [200, 200, 429]
    assert wire.sample(sampler, 0)[0] == 200


# -- models and sessions --------------------------------------------------------------------------


def test_a_model_is_unloaded_after_what_was_asked_before(served, wire):
    model = wire.model()
    step = wire.step(model, 1)[1]
    unload = wire.post("unload_model", model_id=model)[1]
    assert wire.retrieve(unload["request_id"]) == (200, {"model_id": model, "type": "unload_model"})
    assert wire.retrieve(step["request_id"])[0] == 200
    assert not served.backend.models
    status, found = wire.step(model, 2)
    assert status == 410 and "the client asked for it" in found["detail"]


def test_a_checkpoint_is_loaded_into_a_model_that_was_just_made(wire):
    first = wire.model(0, seed=5)
    saved = wire.post("save_weights", model_id=first, seq_id=1, path="one")[1]
    path = wire.retrieve(saved["request_id"])[1]["path"]
    second = wire.model(1, seed=6)
    body = {"model_id": second, "seq_id": 1, "path": path, "optimizer": False}
    assert wire.retrieve(wire.post("load_weights", **body)[1]["request_id"])[0] == 200
    found = [wire.retrieve(wire.backward(model, 2)[1]["request_id"]) for model in (first, second)]
    assert found[0] == found[1]
    other = wire.model(2, rank=4)
    status, found = wire.post("load_weights", **{**body, "model_id": other})
    assert status == 422 and "adapter of rank 8" in found["detail"]


def test_a_session_that_is_over_is_told_so(wire):
    model = wire.model()
    path = f"sessions/{wire.session}/finish"
    assert wire.post(path, reason={"type": "success"}) == (200, {})
    assert wire.post(path, reason={"type": "errored"})[0] == 200
    assert wire.post("sessions/nothing/finish", reason={"type": "success"})[0] == 200
    assert wire.post("session_heartbeat", session_id=wire.session)[0] == 410
    assert wire.post("session_heartbeat", session_id="nothing")[0] == 404
    status, found = wire.step(model, 1)
    assert status == 410 and "its client finished (success)" in found["detail"]


def test_requests_that_cannot_be_executed_any_more_fail(wire):
    model = wire.model()
    held = wire.step(model, 5)[1]
    wire.post(f"sessions/{wire.session}/finish", reason={"type": "interrupted"})
    status, found = wire.retrieve(held["request_id"])
    assert status == 200 and "was unloaded" in found["error"]


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("optim_step", b"{", 400, "not JSON"),
        ("optim_step", b"[]", 400, "must be a JSON object"),
        ("optim_step", b'{"model_id": 5}', 400, "model_id must be text"),
        ("optim_step", b'{"model_id": "m"}', 404, "model 'm' is not known"),
        ("create_model", b'{"session_id": "s", "lora_config": {"rank": "a"}}', 400, "rank"),
        ("get_info", b"{}", 400, "model_id must be text"),
        ("retrieve_future", b"{}", 400, "request_id must be text"),
        ("asample", b'{"sampling_session_id": "x"}', 404, "'x' is not known"),
        ("weights_info", b'{"tinker_path": "/etc/passwd"}', 422, "is no path"),
        ("weights_info", b'{"tinker_path": "tinker://../../weights/x"}', 422, "is no path"),
        ("copy_weights", b"{}", 404, "hosted service alone"),
        ("nonsense", b"{}", 404, "served under /api/v1"),
    ],
)
def test_malformed_requests_are_refused_with_a_sentence(wire, path, body, status, text):
    found = wire.send(path, body)
    assert found[0] == status and text in json.loads(found[1])["detail"]
    assert wire.get("healthz") == (200, {"status": "ok"})


def test_bodies_of_other_kinds_are_refused(wire):
    assert wire.send("optim_step", b"{}", "text/plain")[0] == 415
    assert wire.send("forward_backward", b"{}")[0] == 415
    packed = wire.send("forward_backward", b"garbage", PROTOBUF, **{"Content-Encoding": "zstd"})
    assert packed[0] == 400 and b"cannot be read as zstd" in packed[1]
    assert wire.send("forward_backward", b"", PROTOBUF, **{"Content-Encoding": "lzma"})[0] == 415
    assert wire.get("training_runs?limit=x&offset=-1")[0] == 200
    assert wire.get("training_runs?limit=0")[0] == 400


def test_the_key_is_needed_everywhere(serve):
    served = serve(key="tml-secret")
    wire = Wire(served, "tml-secret")
    for key in ("", "tml-other", "tml-secre\xe9"):
        wire.key = key
        assert wire.get("healthz")[0] == 401
        assert wire.post("asample")[0] == 401
        assert wire.send("training_runs/a/checkpoints/weights/b", method="DELETE")[0] == 401


def test_a_browser_on_this_machine_is_kept_out(wire):
    assert wire.send("healthz", Origin="http://evil.example")[0] == 403


# -- the directory --------------------------------------------------------------------------------


def test_a_directory_has_one_server(served, tmp_path):
    with pytest.raises(RunError, match="journal"):
        TinkerService(Unigrams(), served.service.store.directory, TinkerConfig())
