"""A server that is killed, and the next one over its directory."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace

import pytest
from full_counts import PROOF
from unigrams import Served
from wires import Wire, soon

from lockstep.errors import StorageError
from lockstep.store.run import RunDirectory, load_run
from lockstep.tinker.record import ModelRecord
from lockstep.tinker.requests import ModelSpec, OptimStep

HERE = Path(__file__).parent


class Restarted:
    """Servers one after the other over one directory, each with an empty backend."""

    def __init__(self, directory, **config):
        self.directory, self.config = directory, config
        self.served = Served(directory, **config)

    def restart(self, wire):
        self.served.close()
        self.served = Served(self.directory, **self.config)
        wire.url = f"{self.served.url}/api/v1"


@pytest.fixture
def restarted(tmp_path, request):
    found = Restarted(tmp_path / "store", **getattr(request, "param", {}))
    yield found
    found.served.close()


def play(wire, between):
    """A program of two models; `between` comes after every request. Returns all results."""
    found = []

    def done(answer):
        assert answer[0] == 200, answer
        between()
        found.append(wire.retrieve(answer[1]["request_id"]))
        assert found[-1][0] == 200 and b"error" not in str(found[-1][1]).encode()[:10], found[-1]
        return found[-1][1]

    def strip(result):
        return json.loads(json.dumps(result).replace(wire.session, "S"))

    model = wire.model(0, seed=1)
    for at in range(3):
        done(wire.backward(model, 4 * at + 1, first=1))
        done(wire.backward(model, 4 * at + 2, first=2))
        done(wire.step(model, 4 * at + 3, 0.3))
        done(wire.post("save_weights", model_id=model, seq_id=4 * at + 4, path=f"{at}"))
    body = {"model_id": model, "seq_id": 13, "kind": "inflight", "sampling_session_seq_id": 0}
    sampler = done(wire.post("save_weights_for_sampler", **body))["sampling_session_id"]
    done(wire.sample(sampler, 0, 1, 2, params={"max_tokens": 8, "seed": 3}, num_samples=2))
    other = f"{wire.session}:train:1"
    load = {"model_seq_id": 1, "path": f"tinker://{model}/weights/1", "optimizer": True}
    done(wire.post("load_weights", session_id=wire.session, **load))
    done(wire.backward(other, 1))
    wire.send(f"training_runs/{model}/checkpoints/weights/1", method="DELETE")
    between()
    done(wire.step(other, 2, 0.3))
    done(wire.backward(other, 3))
    return [each if isinstance(each, bytes) else strip(each) for _, each in found]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("undisturbed") / "store") as served:
        return play(Wire(served), lambda: None)


@pytest.mark.parametrize("restarted", [{"state_seconds": 0}, {}], indirect=True)
def test_a_restart_after_every_request_changes_no_bit(restarted, undisturbed):
    wire = Wire(restarted.served)
    assert play(wire, lambda: restarted.restart(wire)) == undisturbed


@pytest.mark.parametrize(
    ("restarted", "repeated", "kept"),
    [({"state_seconds": 0}, [], ["2"]), ({"state_seconds": 60}, ["optim"], [])],
    indirect=["restarted"],
)
def test_a_saved_state_saves_repetition(restarted, repeated, kept):
    wire = Wire(restarted.served)
    model = wire.model()
    wire.retrieve(wire.step(model, 1)[1]["request_id"])
    states = restarted.directory / "states" / model
    assert soon(lambda: (states / "1").exists() == bool(kept))
    restarted.restart(wire)
    wire.retrieve(wire.step(model, 2)[1]["request_id"])
    done = [kind for kind, _ in restarted.served.backend.executed if kind != "save"]
    assert done == ["create", *repeated, "optim"]
    assert soon(lambda: [each.name for each in states.glob("*")] == kept)


def test_requests_that_waited_are_executed_by_the_next_server(restarted):
    wire = Wire(restarted.served)
    model, sampler = wire.model(), wire.sampler()
    restarted.served.backend.gate = asyncio.Event()
    restarted.served.backend.seconds = 60
    waiting = [wire.backward(model, 1), wire.step(model, 2), wire.step(model, 4)]
    waiting += [wire.sample(sampler, at) for at in range(3)]
    refused = wire.backward(model, 3, loss="nonsense")
    restarted.restart(wire)
    for status, found in waiting:
        assert status == 200 and wire.retrieve(found["request_id"])[0] == 200
    assert wire.backward(model, 3, loss="nonsense") == refused
    assert [kind for kind, _ in restarted.served.backend.executed if kind != "sample"] == [
        *("create", "backward", "optim", "optim")
    ]
    assert wire.sample(sampler, 1) == waiting[4]


def test_a_failed_request_is_not_repeated(restarted):
    wire = Wire(restarted.served)
    model = wire.model()
    failed = wire.post("save_weights", model_id=model, seq_id=1, path="one")[1]["request_id"]
    again = wire.post("save_weights", model_id=model, seq_id=2, path="one")[1]["request_id"]
    answers = [wire.retrieve(failed), wire.retrieve(again)]
    assert "overwrite=True" in answers[1][1]["error"]
    restarted.restart(wire)
    assert [wire.retrieve(failed), wire.retrieve(again)] == answers


def test_uploaded_losses_and_endings_survive(restarted):
    wire = Wire(restarted.served)
    model, gone = wire.model(0), wire.model(1)
    place = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    total = {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "logprobs"}]}
    output = {"op": "output", "name": "output", "target": "output"}
    output["args"] = [{"tuple": [{"ref": "s"}, {"dict": {}}]}]
    graph = {"format": 1, "nodes": [place, total, output]}
    inputs = [{"name": "logprobs", "rank": 1}]
    body = {"session_id": wire.session, "custom_loss_seq_id": 0, "name": "a", "inputs": inputs}
    loss = wire.post("create_custom_loss", **body, graph=graph)
    wire.retrieve(wire.post("unload_model", model_id=gone)[1]["request_id"])
    restarted.restart(wire)
    assert wire.post("create_custom_loss", **body, graph=graph) == loss
    assert wire.retrieve(loss[1]["request_id"])[1]["loss_id"]
    assert wire.step(gone, 1)[0] == 410 and wire.step(model, 1)[0] == 200
    wire.post(f"sessions/{wire.session}/finish", reason={"type": "success"})
    restarted.restart(wire)
    assert wire.post("session_heartbeat", session_id=wire.session)[0] == 410
    assert not restarted.served.backend.models


def test_what_a_killed_server_left_half_written_is_removed(restarted):
    wire = Wire(restarted.served)
    model = wire.model()
    saved = wire.post("save_weights", model_id=model, seq_id=1, path="one")[1]
    path = wire.retrieve(saved["request_id"])[1]["path"]
    place = restarted.served.service.store.place(path)
    for left in ("two", "two.partial", "three.partial"):
        (place.parent / left).mkdir()
        (place.parent / left / "logits.npy").write_bytes(b"half")
    (restarted.directory / "samplers" / "old").mkdir(parents=True)
    os.replace(place, f"{place}.replaced")  # killed between the two renames of an overwrite
    restarted.restart(wire)
    assert [each.name for each in place.parent.iterdir()] == ["one"]
    assert not list((restarted.directory / "samplers").iterdir())
    assert wire.post("weights_info", tinker_path=path)[0] == 200


def test_a_model_whose_state_is_lost_fails_with_a_sentence(restarted):
    wire = Wire(restarted.served)
    model = wire.model()
    saved = wire.post("save_weights", model_id=model, seq_id=1, path="one")[1]
    path = wire.retrieve(saved["request_id"])[1]["path"]
    load = {"model_seq_id": 1, "path": path, "optimizer": True, "session_id": wire.session}
    wire.retrieve(wire.post("load_weights", **load)[1]["request_id"])
    lost = f"{wire.session}:train:1"
    next((restarted.directory / "states" / lost).rglob("logits.npy")).write_bytes(b"torn")
    held = wire.step(lost, 5)[1]["request_id"]
    restarted.restart(wire)
    assert "its state could not be restored" in wire.retrieve(held)[1]["error"]
    assert wire.step(lost, 1)[0] == 410
    assert wire.retrieve(wire.step(model, 2)[1]["request_id"])[0] == 200


# -- kill -9 --------------------------------------------------------------------------------------


class Killed:
    """A server in a process of its own, on one port."""

    def __init__(self, directory, seconds, **config):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.directory, self._settings = directory, [port, seconds, json.dumps(config)]
        self.start()

    def start(self):
        words = [sys.executable, HERE / "unigrams.py", self.directory, *self._settings]
        self.process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE)
        assert self.process.stdout.readline()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


@pytest.mark.parametrize("state_seconds", [0, *((60,) if PROOF else ())])
def test_kill_9_at_random_moments_changes_no_bit(tmp_path, undisturbed, state_seconds):
    rng = random.Random(state_seconds)
    with Killed(tmp_path / "store", 0.02, state_seconds=state_seconds) as server:
        wire = Stubborn(server)
        over = threading.Event()

        def disturb():
            while not over.wait(rng.uniform(0.02, 0.4)):
                server.kill()
                server.start()

        thread = threading.Thread(target=disturb)
        thread.start()
        try:
            found = play(wire, lambda: time.sleep(0.05))
        finally:
            over.set()
            thread.join()
        assert found == undisturbed


class Stubborn(Wire):
    """Sends a request again while there is no server, as the client does."""

    def send(self, *args, **options):
        deadline = time.monotonic() + 20
        while True:
            try:
                return super().send(*args, **options)
            except (urllib.error.URLError, ConnectionError, HTTPException):
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_an_unmodified_client_goes_on_after_kill_9(tmp_path):
    pytest.importorskip("tinker._version")
    import tinker
    from tinker import types

    def run(url, disturb):
        service = tinker.ServiceClient(base_url=url, api_key="tml-none")
        train = service.create_lora_training_client("org/tiny", rank=8, seed=1).result()
        inputs = {"target_tokens": [2, 3, 4], "weights": [1.0] * 3}
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs
        )
        params = types.SamplingParams(max_tokens=8, seed=1)
        found = []
        for _ in range(3):
            pending = [train.forward_backward([datum], "cross_entropy") for _ in range(3)]
            step = train.optim_step(types.AdamParams(learning_rate=0.2))
            disturb()
            found += [each.result().metrics for each in pending] + [step.result().metrics]
            sampler = train.save_weights_and_get_sampling_client().result()
            drawn = sampler.sample(types.ModelInput.from_ints([1]), 2, params)
            found += [each.tokens for each in drawn.result().sequences]
        service.close("success").result()
        return found

    with Served(tmp_path / "undisturbed") as served:
        expected = run(served.url, lambda: None)
    with Killed(tmp_path / "store", 0.1) as server:
        moments = iter([0.05, 0.25])

        def disturb():
            if (moment := next(moments, None)) is not None:
                time.sleep(moment)
                server.kill()
                server.start()

        assert run(server.url, disturb) == expected


@pytest.mark.parametrize(
    "metadata",
    [[1], "text", 5, True, {"a": 1}, {"a": ["b"]}, {"a": {"b": "c"}}, {"a": "x" * 20_000}],
    ids=range(8),
)
def test_one_clients_notes_do_not_break_what_others_list(restarted, metadata):
    wire = Wire(restarted.served)
    asked = {"session_id": wire.session, "base_model": "org/tiny", "lora_config": {"rank": 8}}
    assert wire.post("create_session", user_metadata=metadata)[0] == 400
    status, said = wire.post("create_model", model_seq_id=0, user_metadata=metadata, **asked)
    assert status == 400 and said["detail"].startswith("user_metadata")
    for number, kept in enumerate((None, {}, {"a": "b", "c": None})):
        status, made = wire.post("create_model", model_seq_id=number, user_metadata=kept, **asked)
        assert status == 200 and wire.retrieve(made["request_id"])[0] == 200
    assert wire.post(
        "save_weights", model_id=made["model_id"], seq_id=1, path="p", user_metadata=metadata
    )[0] == 400  # fmt: skip

    restarted.restart(wire)
    status, found = wire.get("training_runs")
    kept = [each["user_metadata"] for each in found["training_runs"]]
    assert status == 200 and kept == [{"a": "b"}, None, None]
    assert wire.get(f"sessions/{wire.session}")[1]["user_metadata"] is None


def test_an_update_that_the_disk_does_not_take_is_written_with_the_next(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    log, full = directory.log, [True]

    def fails(row):
        if full:
            raise StorageError("the disk is full")
        log(row)

    directory.log = fails
    base = SimpleNamespace(facts={"family": "dense", "is_one_process": True})
    spec = ModelSpec(base_model="tiny", rank=8)
    record = ModelRecord("run", spec, root=tmp_path, bases={"tiny": base}, write=print)
    record._directory = directory
    request = OptimStep(learning_rate=0.1)
    with pytest.raises(StorageError):
        record.step(0, request, {"skipped:sum": 0.0})
    full.clear()
    record.step(1, request, {"skipped:sum": 1.0})
    rows = load_run(tmp_path / "run").metrics
    assert [(row["step"], row["train/skipped_updates"]) for row in rows] == [(0, 0), (1, 1)]
