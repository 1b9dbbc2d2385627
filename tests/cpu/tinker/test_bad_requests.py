"""Bad input of every kind: the real client raises at once, with a sentence that says what to do,
and its next requests are executed. What the client cannot send comes as bytes."""

import select
import socket
import time

import numpy as np
import pytest
from unigrams import VOCAB
from wires import Wire

from lockstep.tinker.wire import PROTOBUF, message

pytest.importorskip("tinker._version")
import tinker
from tinker import types

SECONDS = 60
"""Far above what a refusal takes, and far below the 300 s for which a client repeats a request."""


def ints(*ids):
    return types.ModelInput.from_ints(list(ids))


def datum(tokens=(1, 2, 3), **inputs):
    given = {"target_tokens": [2, 3, 4], "weights": [1.0] * 3} | inputs
    tokens = tokens if isinstance(tokens, types.ModelInput) else ints(*tokens)
    return types.Datum(
        model_input=tokens,
        loss_fn_inputs={name: value for name, value in given.items() if value is not None},
    )


def policy(**inputs):
    given = {"weights": None, "logprobs": [-1.0] * 3, "advantages": [1.0] * 3} | inputs
    return datum(**given)


IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=3)])
NAN = float("nan")


def train(each, loss="cross_entropy", **config):
    return lambda at: at.train.forward_backward([each], loss, config or None).result()


def sample(prompt, **params):
    params = types.SamplingParams(**{"max_tokens": 2} | params)
    return lambda at: at.sampler.sample(prompt, 1, params).result()


def make(base="org/tiny", **options):
    return lambda at: at.service.create_lora_training_client(base, **options).result()


# Kind of bad input -> what the client does, and a part of the sentence.
CASES = {
    "targets too few": (train(datum(target_tokens=[2, 3])), "2 entries and the model_input 3"),
    "weights too few": (train(datum(weights=[1.0])), "1 entries and the model_input 3"),
    "log-probs too many": (
        train(policy(logprobs=[-1.0] * 4), "ppo"),
        "4 entries and the model_input 3",
    ),
    "no targets": (train(datum(target_tokens=None)), "has no 'target_tokens'"),
    "no tokens": (train(datum(())), "is empty; expected at least one token"),
    "no datums": (
        lambda at: at.train.forward_backward([], "cross_entropy").result(),
        "at least one datum|[Ee]mpty|No data",
    ),
    "NaN in weights": (train(datum(weights=[1.0, NAN, 1.0])), r"\[1\] is nan; expected finite"),
    "NaN in log-probs": (train(policy(logprobs=[NAN] * 3), "ppo"), r"\[0\] is nan"),
    "infinite advantage": (
        train(policy(advantages=[0.0, 0.0, float("inf")]), "cispo"),
        r"\[2\] is inf",
    ),
    "NaN in a setting": (train(datum(), beta=NAN), "'beta' is nan; expected a finite number"),
    "NaN as learning rate": (
        lambda at: at.train.optim_step(types.AdamParams(learning_rate=NAN)).result(),
        "learning_rate must be a finite number, found null: NaN or infinity at the client",
    ),
    "an infinite learning rate": (
        lambda at: at.train.optim_step(types.AdamParams(learning_rate=float("inf"))).result(),
        "learning_rate must be .* found null: NaN or infinity",
    ),
    "NaN as decay of a moment": (
        lambda at: at.train.optim_step(types.AdamParams(learning_rate=1e-4, beta2=NAN)).result(),
        "beta2 must be .* found null: NaN or infinity",
    ),
    "input beyond the vocabulary": (train(datum((1, 2, VOCAB))), "Was another tokenizer used"),
    "target beyond the vocabulary": (
        train(datum(target_tokens=[2, 3, VOCAB])),
        "Was another tokenizer used",
    ),
    "negative target": (train(datum(target_tokens=[2, 3, -1])), "is -1; the ids of org/tiny"),
    "prompt beyond the vocabulary": (sample(ints(1, VOCAB)), "Was another tokenizer used"),
    "stop beyond the vocabulary": (sample(ints(1), stop=[VOCAB]), "Was another tokenizer used"),
    "row beyond the context": (
        train(datum([1] * 65, target_tokens=[1] * 65, weights=[1.0] * 65)),
        "has 65 tokens; org/tiny is served with at most 64",
    ),
    "prompt beyond the context": (sample(ints(*[1] * 64)), "the prompt has 64 tokens.*Send less"),
    "reply beyond the context": (sample(ints(1), max_tokens=64), "at most 64 tokens together"),
    "empty prompt": (sample(ints()), "there is nothing to continue"),
    "negative temperature": (sample(ints(1), temperature=-1.0), "temperature must be"),
    "no samples": (
        lambda at: at.sampler.sample(ints(1), 0, types.SamplingParams(max_tokens=1)).result(),
        "num_samples must be",
    ),
    "unknown loss": (train(datum(), "grpo"), "expected one of cross_entropy"),
    "stable_reinforce": (train(datum(), "stable_reinforce"), "Use loss_fn='importance_sampling'"),
    "unknown model": (make("org/other"), "'org/other' is not served here; expected 'org/tiny'"),
    "unknown sampled model": (
        lambda at: at.service.create_sampling_client(base_model="org/other"),
        "expected 'org/tiny'",
    ),
    "rank that is too large": (make(rank=128), "expected at most 64"),
    "a name that leaves the store": (
        lambda at: at.train.save_state("../../evil").result(),
        "without a slash",
    ),
    "a sampler's name that leaves the store": (
        lambda at: at.train.save_weights_for_sampler("..").result(),
        "not beginning with a dot",
    ),
    "a path that leaves the store": (
        lambda at: at.service.create_training_client_from_state("tinker://../../etc/passwd"),
        "is no path of a checkpoint|must contain|[Ii]nvalid",
    ),
    "a sampler's path that leaves the store": (
        lambda at: at.service.create_sampling_client(model_path="tinker://a/../../etc"),
        "is no path of a checkpoint|must contain|[Ii]nvalid",
    ),
    "a checkpoint that is not there": (
        lambda at: at.service.create_training_client_from_state("tinker://a/weights/b").result(),
        "was never saved on this server",
    ),
    "image in a row": (train(datum(IMAGE)), "is an image; the models served here read text alone"),
    "image in a prompt": (sample(IMAGE), "is an image; the models served here read text alone"),
    "a body that is too large": (
        train(datum([1] * 200_000, target_tokens=[1] * 200_000, weights=[1.0] * 200_000)),
        "max_body_bytes=1000000.*Send fewer or shorter datums",
    ),
}


class Program:
    def __init__(self, url):
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-none")
        self.train = self.service.create_lora_training_client("org/tiny", rank=8).result()
        self.sampler = self.train.save_weights_and_get_sampling_client().result()

    def works(self):
        assert self.train.forward_backward([datum()], "cross_entropy").result().metrics
        assert self.train.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics
        assert self.sampler.sample(ints(1), 1, types.SamplingParams(max_tokens=2)).result()
        return True


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """One client for all cases: each one must leave it usable."""
    from unigrams import Served

    with Served(tmp_path_factory.mktemp("bad") / "store", max_body_bytes=1_000_000) as served:
        program = Program(served.url)
        program.store = served.service.store.directory
        yield program
        program.service.close("success").result(timeout=30)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_raises_at_once_and_the_next_requests_are_executed(program, case):
    do, text = CASES[case]
    before, began = {*program.store.parent.rglob("*evil*")}, time.monotonic()
    with pytest.raises((tinker.TinkerError, ValueError), match=f"(?s){text}"):
        found = do(program)
        if hasattr(found, "result"):
            found.result()
    assert program.works() and time.monotonic() - began < SECONDS
    assert {*program.store.parent.rglob("*evil*")} == before


@pytest.mark.parametrize("given", ["", "none", "tml-wrong"])
def test_a_key_that_is_wrong_or_missing_raises_at_once(serve, given, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    served, began = serve(key="tml-right"), time.monotonic()
    with pytest.raises((tinker.TinkerError, ValueError), match=r"(?i)key"):
        client = tinker.ServiceClient(base_url=served.url, api_key=given or None)
        client.create_lora_training_client("org/tiny", rank=8).result()
    assert time.monotonic() - began < SECONDS


# -- what the client cannot send ------------------------------------------------------------------


def head_of(model, seq_id=1):
    found = message("ForwardBackwardRequest")
    found.model_id, found.seq_id = model, seq_id
    return found.SerializeToString()


def goes_on(wire, model, seq_id=2):
    return wire.retrieve(wire.step(model, seq_id)[1]["request_id"])[0] == 200


def ask_raw(served, *parts):
    """Sends bytes until there is an answer. Returns it, and the number of bytes."""
    host, port = served.url.removeprefix("http://").split(":")
    sent, answer = 0, b""
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        for part in parts:
            left = memoryview(part)
            while left and not answer:
                readable, writable, _ = select.select([connection], [connection], [], SECONDS)
                if readable:
                    answer = connection.recv(65536)
                elif writable:
                    count = connection.send(left)
                    left, sent = left[count:], sent + count
        return answer or connection.recv(65536), sent


def start_of(**headers):
    first = "POST /api/v1/forward_backward HTTP/1.1", "Host: 127.0.0.1"
    lines = [*first, f"Content-Type: {PROTOBUF}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
def test_a_body_of_2_gb_is_refused_by_its_length(serve, encoding):
    import zstandard

    served = serve(max_body_bytes=100_000)
    wire = Wire(served)
    model = wire.model()
    body = head_of(model) + bytes(10_000)
    if encoding == "zstd":
        body = zstandard.ZstdCompressor().compress(body)
    start = start_of(Content_Length=2**31, Content_Encoding=encoding)
    answer, sent = ask_raw(served, start, body)
    assert b" 413 " in answer.split(b"\r\n")[0] and sent < 100_000
    assert goes_on(wire, model)


def test_a_body_of_2_gb_that_never_comes_is_refused(serve):
    served = serve(max_body_bytes=100_000)
    answer, _ = ask_raw(served, start_of(Content_Length=2**31))
    assert b" 413 " in answer.split(b"\r\n")[0]


def test_a_body_of_unknown_length_is_read_up_to_the_limit(serve):
    served = serve(max_body_bytes=100_000)
    wire = Wire(served)
    model = wire.model()
    head = head_of(model)
    chunks = [b"%x\r\n%s\r\n" % (len(each), each) for each in (head, *[bytes(50_000)] * 20_000)]
    answer, sent = ask_raw(served, start_of(Transfer_Encoding="chunked"), *chunks)
    assert b" 413 " in answer.split(b"\r\n")[0] and sent < 20_000_000
    assert goes_on(wire, model)


def test_a_body_that_unpacks_to_gigabytes_is_not_unpacked(serve):
    import zstandard

    served = serve(max_body_bytes=1_000_000)
    wire = Wire(served)
    model = wire.model()
    pack = zstandard.ZstdCompressor().compressobj()
    packed = pack.compress(head_of(model))
    packed += b"".join(pack.compress(bytes(2**24)) for _ in range(64)) + pack.flush()
    assert len(packed) < 1_000_000
    headers = {"Content-Encoding": "zstd"}
    status, text, _ = wire.send("forward_backward", packed, PROTOBUF, **headers)
    assert status == 413 and b"packed or unpacked" in text
    assert goes_on(wire, model)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"\xff\xff", 400, "no protobuf message"),
        (b"", 400, "expected a model's id"),
        (np.random.default_rng(0).bytes(5000), 400, "protobuf"),
    ],
)
def test_bytes_that_are_no_message_are_refused(served, body, status, text):
    wire = Wire(served)
    model = wire.model()
    for each in (body, head_of(model) + b"\xff\xff\xff"):
        found = wire.send("forward_backward", each, PROTOBUF)
        assert found[0] == status and (each is not body or text.encode() in found[1])
    assert goes_on(wire, model)


@pytest.mark.parametrize(
    "path",
    [
        "training_runs/x/checkpoints/weights/..%2f..%2f..%2fetc",
        "training_runs/..%2f..%2fetc/checkpoints/weights/passwd",
        "training_runs/x/checkpoints/..%2f..%2f/passwd",
    ],
)
def test_a_path_that_leaves_the_store_deletes_nothing(served, path):
    wire, directory = Wire(served), served.service.store.directory
    outside = directory.parent / "etc"
    outside.mkdir()
    status, text, _ = wire.send(path, method="DELETE")
    assert status in (404, 422) and b"detail" in text and outside.exists()
