"""Datums of the real client against what the server drew, in one process and over kill -9."""

import dataclasses
import logging
import time

import numpy as np
import pytest
from test_recovery import Killed
from unigrams import Served
from wires import Wire

pytest.importorskip("tinker._version")
import tinker
from tinker import types

PROMPT = [3, 1, 4, 1]
FIRST = len(PROMPT) - 1
HAS_SPANS = hasattr(types.Datum, "with_provenance")
has_spans = pytest.mark.parametrize("has_spans", [True, False] if HAS_SPANS else [False])


class Program:
    """A client with a model and two turns that its sampler drew: a dialogue."""

    def __init__(self, url):
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-none")
        self.train = self.service.create_lora_training_client("org/tiny", rank=8, seed=1).result()
        self.sampler = self.train.save_weights_and_get_sampling_client().result()
        self.first = self.draw(PROMPT, seed=1)
        self.second = self.draw([*PROMPT, *self.first.tokens, 9, 9], seed=2)

    def draw(self, prompt, seed):
        params = types.SamplingParams(max_tokens=8, stop=[], seed=seed)
        prompt = types.ModelInput.from_ints(prompt)
        return self.sampler.sample(prompt, 1, params).result().sequences[0]

    def pass_(self, *data, loss="importance_sampling", forward=False):
        call = self.train.forward if forward else self.train.forward_backward
        return call(list(data), loss).result()

    def close(self):
        self.service.close("success").result(timeout=30)


def dialogue(program, *, has_spans, **changes):
    """The datum as tinker-cookbook makes it. changes: name -> function of its array, in place."""
    first, second = program.first, program.second
    ids = [*PROMPT, *first.tokens, 9, 9, *second.tokens]
    blank = [0.0] * len(PROMPT)
    columns = {
        "target_tokens": np.array(ids),
        "logprobs": np.array([*blank, *first.logprobs, 0, 0, *second.logprobs], np.float32),
        "advantages": np.array([*blank, *[0.5] * 8, 0, 0, *[0.5] * 8], np.float32),
    }
    columns = {name: values[1:] for name, values in columns.items()}
    inputs = np.array(ids[:-1])
    for name, change in changes.items():
        change(inputs if name == "model_input" else columns[name])
    tensors = {name: types.TensorData.from_numpy(values) for name, values in columns.items()}
    tokens = types.ModelInput.from_ints(inputs.tolist())
    datum = types.Datum(model_input=tokens, loss_fn_inputs=tensors)
    return with_spans(datum, first, second) if has_spans else datum


def with_spans(datum, first, second):
    from tinker.types import PromptProvenanceSpan, SampledProvenanceSpan

    spans = [
        PromptProvenanceSpan(sequence_id=first.sequence_id, length=len(PROMPT)),
        SampledProvenanceSpan(sequence_id=first.sequence_id, length=8),
        PromptProvenanceSpan(sequence_id=second.sequence_id, offset=len(PROMPT) + 8, length=2),
        SampledProvenanceSpan(sequence_id=second.sequence_id, length=8),
    ]
    start = dataclasses.replace(spans[0], offset=1, length=len(PROMPT) - 1)
    end = dataclasses.replace(spans[-1], length=7)
    return datum.with_provenance(model_input=[*spans[:-1], end], loss_fn_inputs=[start, *spans[1:]])


@pytest.fixture
def program_of(serve):
    programs = []

    def make(**config):
        programs.append(Program(serve(**config).url))
        return programs[-1]

    yield make
    for program in programs:
        program.close()


def put(value, place):
    def change(array):
        array[place] = value

    return change


def other_id(array):
    array[FIRST + 2] = (array[FIRST + 2] + 1) % 50


def shift(array):
    array[FIRST:-1] = array[FIRST + 1 :].copy()


DEFECTS = {
    "another id": ({"target_tokens": other_id}, f"target {FIRST + 2}", "reencoded"),
    "shifted": ({"logprobs": shift}, f"target {FIRST}", "shifted"),
    "fillers": ({"logprobs": put(0.0, slice(FIRST, FIRST + 8))}, f"target {FIRST}", "fillers"),
    "an observation": ({"advantages": put(0.5, FIRST + 9)}, f"target {FIRST + 9}", "observation"),
    "not shifted": ({"model_input": shift}, "", "boundary|rerendered"),
}


@has_spans
def test_rows_as_they_were_drawn_are_trained(program_of, has_spans):
    program = program_of()
    found = program.pass_(*[dialogue(program, has_spans=has_spans)] * 2)
    assert found.metrics["provenance/drawn:sum"] == 2
    masked = {"advantages": put(0.0, slice(FIRST, FIRST + 8)), "logprobs": put(0.0, FIRST + 1)}
    found = program.pass_(dialogue(program, has_spans=has_spans, **masked))
    assert found.metrics["provenance/drawn:sum"] == 1, "a turn without advantage may be anything"


@pytest.mark.skipif(not HAS_SPANS, reason="spans came with 0.31")
def test_a_reply_of_one_token_has_an_empty_span_among_the_inputs(program_of):
    program = program_of()
    params = types.SamplingParams(max_tokens=1, seed=1)
    reply = program.sampler.sample(types.ModelInput.from_ints([5]), 1, params).result().sequences[0]
    inputs = {"target_tokens": reply.tokens, "logprobs": reply.logprobs, "advantages": [1.0]}
    datum = types.Datum(model_input=types.ModelInput.from_ints([5]), loss_fn_inputs=inputs)
    prompt = types.PromptProvenanceSpan(sequence_id=reply.sequence_id, length=1)
    none = types.SampledProvenanceSpan(sequence_id=reply.sequence_id, length=0)
    datum = datum.with_provenance(
        model_input=[prompt, none],
        loss_fn_inputs=[
            dataclasses.replace(prompt, offset=1, length=0),
            dataclasses.replace(none, length=1),
        ],
    )
    assert program.pass_(datum).metrics["provenance/drawn:sum"] == 1


@has_spans
@pytest.mark.parametrize("case", DEFECTS)
def test_rows_that_were_changed_raise_at_once_and_the_next_ones_are_trained(
    program_of, case, has_spans
):
    changes, place, cause = DEFECTS[case]
    if case in ("an observation", "not shifted") and not has_spans:
        cause = "no sequence is known that drew it"
    program, began = program_of(), time.monotonic()
    with pytest.raises(tinker.UnprocessableEntityError, match=f"(?s){place}.*({cause})") as caught:
        program.pass_(dialogue(program, has_spans=has_spans, **changes))
    assert "Nothing was trained" in str(caught.value) and time.monotonic() - began < 10
    metrics = program.pass_(dialogue(program, has_spans=has_spans)).metrics
    assert metrics["provenance/drawn:sum"] == 1


@has_spans
def test_a_setting_trains_changed_rows_with_a_warning_or_without_a_look(
    program_of, has_spans, caplog
):
    with caplog.at_level(logging.WARNING):
        program = program_of(provenance="warn")
        changed = dialogue(program, has_spans=has_spans, logprobs=shift)
        assert program.pass_(changed).metrics["provenance/differs:sum"] == 1
        assert "(shifted)" in caplog.text
        caplog.clear()
        program = program_of(provenance="off")
        changed = dialogue(program, has_spans=has_spans, logprobs=shift)
        assert "provenance/differs:sum" not in program.pass_(changed).metrics
        assert "shifted" not in caplog.text


def elsewhere(program, seed=0):
    """A row that another sampler drew."""
    rng = np.random.default_rng(seed)
    tensors = {
        "target_tokens": rng.integers(0, 50, 6),
        "logprobs": rng.uniform(-5, -1, 6).astype(np.float32),
        "advantages": np.ones(6, np.float32),
    }
    tensors = {name: types.TensorData.from_numpy(values) for name, values in tensors.items()}
    return types.Datum(model_input=types.ModelInput.from_ints([1] * 6), loss_fn_inputs=tensors)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_rows_from_elsewhere_need_a_setting_under_a_policy_loss(program_of, loss):
    program = program_of()
    with pytest.raises(tinker.UnprocessableEntityError, match=r"tinker\.provenance=refuse_changed"):
        program.pass_(elsewhere(program), loss=loss)
    assert program.pass_(elsewhere(program), loss=loss, forward=True).metrics
    program = program_of(provenance="refuse_changed")
    assert program.pass_(elsewhere(program), loss=loss).metrics["provenance/foreign:sum"] == 1
    with pytest.raises(tinker.UnprocessableEntityError, match=r"\(shifted\)"):
        program.pass_(dialogue(program, has_spans=False, logprobs=shift), loss=loss)


def test_supervised_rows_are_trained_wherever_they_are_from(program_of):
    program = program_of()
    inputs = {"target_tokens": [2, 3, 4], "weights": [1.0] * 3}
    row = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    assert program.pass_(row, loss="cross_entropy").metrics["provenance/unknown:sum"] == 1
    # The best of several replies, and only its beginning.
    best = {"target_tokens": program.first.tokens[:4], "weights": [1.0] * 4}
    tokens = types.ModelInput.from_ints([PROMPT[-1], *program.first.tokens[:3]])
    assert program.pass_(
        types.Datum(model_input=tokens, loss_fn_inputs=best), loss="cross_entropy"
    ).metrics


def test_what_was_drawn_is_known_after_kill_9(tmp_path):
    with Killed(tmp_path / "store", 0.0) as server:
        program = Program(server.url)
        good = [dialogue(program, has_spans=each) for each in {HAS_SPANS, False}]
        bad = [dialogue(program, has_spans=each, logprobs=shift) for each in {HAS_SPANS, False}]
        told = []
        for restart in (False, True):
            if restart:
                server.kill()
                server.start()
            for each in bad:
                with pytest.raises(tinker.UnprocessableEntityError) as caught:
                    program.pass_(each)
                told.append(str(caught.value))
            assert program.pass_(*good).metrics["provenance/drawn:sum"] == len(good)
        assert told[: len(bad)] == told[len(bad) :]
        program.close()


def test_a_row_that_was_let_in_is_executed_again_whatever_the_setting_is_then(tmp_path):
    norms = []
    for is_restarted in (False, True):
        place = tmp_path / str(is_restarted)
        with Served(place, provenance="warn") as served:
            program = Program(served.url)
            program.pass_(dialogue(program, has_spans=False, logprobs=shift))
            wire = Wire(served)
            if not is_restarted:
                norms.append(wire.retrieve(wire.step(program.train.model_id, 3)[1]["request_id"]))
                program.close()
        if is_restarted:
            with Served(place, provenance="refuse") as served:
                wire = Wire(served)
                norms.append(wire.retrieve(wire.step(program.train.model_id, 3)[1]["request_id"]))
    assert norms[0] == norms[1] and norms[0][1]["metrics"]["grad_norm:mean"] > 0
