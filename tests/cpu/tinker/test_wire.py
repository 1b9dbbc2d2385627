"""The messages against the client's own, and every body that a client can get wrong."""

import json

import numpy as np
import pytest

from lockstep.agent.gateway.exchange import Refusal
from lockstep.agent.gateway.reading import Value
from lockstep.tinker.requests import (
    BaseModel,
    ForwardBackwardResult,
    SampledSequence,
    Sampling,
    SamplingResult,
    TinkerError,
    TopK,
)
from lockstep.tinker.wire import (
    MAX_VALUES,
    MESSAGES,
    forward_backward_of,
    message,
    model_spec_of,
    optim_step_of,
    parse_forward_backward,
    peek_forward_backward,
    sampling_of,
    unpack_zstd,
    write_forward_backward,
    write_sampling,
)
from lockstep.types import SamplingParams

BASE = BaseModel(name="org/tiny", architecture="tiny", vocab_size=100, max_tokens=32, stop_ids=(0,))


def test_every_field_is_the_clients():
    pb2 = pytest.importorskip("tinker.proto.tinker_public_pb2")

    def described(descriptor):
        return {
            field.name: (
                field.number,
                field.type,
                field.is_repeated,
                field.has_presence,
                field.message_type and field.message_type.full_name,
                field.enum_type and {v.name: v.number for v in field.enum_type.values},
                field.containing_oneof and field.containing_oneof.name,
            )
            for field in descriptor.fields
        } | {nested.name: described(nested) for nested in descriptor.nested_types}

    unread = {"SamplingParams", "StopStrings", "StopTokens"}  # sampling is asked for in JSON
    theirs = {name: described(d) for name, d in pb2.DESCRIPTOR.message_types_by_name.items()}
    ours = {name: described(each.DESCRIPTOR) for name, each in MESSAGES.items()}
    assert ours == {name: fields for name, fields in theirs.items() if name not in unread}


# -- forward_backward -----------------------------------------------------------------------------


def dense(tensor, values, dtype="<f4", shape=None):
    values = np.asarray(values, dtype)
    tensor.dense, tensor.dtype = values.tobytes(), {"<f4": 1, "<i8": 2}[dtype]
    tensor.shape.extend(values.shape if shape is None else shape)


def request(num=3, loss="importance_sampling", **changes):
    """A message that is right, apart from `changes` of the inputs."""
    found = message("ForwardBackwardRequest")
    found.model_id, found.seq_id, found.loss_fn = "S:train:0", 1, loss
    datum = found.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(1, num + 1, dtype="<i4").tobytes()
    given = {
        "target_tokens": (np.arange(2, num + 2), "<i8"),
        "logprobs": (np.full(num, -0.5), "<f4"),
        "advantages": (np.ones(num), "<f4"),
    } | changes
    for name, pair in given.items():
        if pair is not None:
            dense(datum.loss_fn_inputs[name], *pair)
    return found


def read(found, **options):
    parsed = parse_forward_backward(found.SerializeToString())
    return forward_backward_of(parsed, BASE, find_loss=lambda loss_id: None, **options)


def test_a_datum_is_read_as_it_was_sent():
    found = request()
    span = found.data[0].model_input_spans.add().prompt_tokens
    span.sequence_id, span.offset, span.length = "q1", 0, 1
    span = found.data[0].model_input_spans.add().sampled_tokens
    span.sequence_id, span.offset, span.length = "q1", 0, 2
    found.loss_fn_config["beta"] = 0.5
    found.loss_fn_config_v2["beta"].number = 0.25
    asked = read(found)
    assert asked.loss == "importance_sampling" and asked.config == {"beta": 0.25}
    datum = asked.data[0]
    assert datum.token_ids.tolist() == [1, 2, 3] and datum.token_ids.dtype == np.int32
    assert datum.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert datum.inputs["logprobs"].dtype == np.float32
    assert [(span.kind, span.length) for span in datum.input_spans] == [
        ("prompt", 1),
        ("sampled", 2),
    ]


def test_a_sparse_matrix_is_made_dense():
    found = request(loss="cross_entropy", logprobs=None, advantages=None, target_tokens=None)
    sparse(found.data[0].loss_fn_inputs["target_tokens"], [7, 8], [0, 1, 1, 2], [0, 3], [3, 4])
    assert read(found).data[0].inputs["target_tokens"].tolist() == [
        [7, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 8],
    ]


def sparse(tensor, values, crow, col, shape):
    tensor.dtype = 2
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.array(values, "<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(col, "<i8").tobytes()


@pytest.mark.parametrize(
    ("values", "crow", "col", "shape", "text"),
    [
        ([7], [0, 1, 1, 1], [4], [3, 4], "inconsistent"),
        ([7], [0, 1, 1, 1], [-1], [3, 4], "inconsistent"),
        ([7, 8], [0, 2, 1, 2], [0, 1], [3, 4], "inconsistent"),
        ([7], [0, 1, 1], [0], [3, 4], "inconsistent"),
        ([7, 8], [0, 2, 2, 2], [1, 1], [3, 4], "lists a place twice"),
        ([7], [0, 1, 1, 1], [0], [3], "expected [N, K]"),
        ([], [0], [], [3, 2**62], f"over {MAX_VALUES} values"),
    ],
)
def test_a_sparse_matrix_that_is_none_is_refused(values, crow, col, shape, text):
    found = request(loss="cross_entropy", logprobs=None, advantages=None, target_tokens=None)
    sparse(found.data[0].loss_fn_inputs["target_tokens"], values, crow, col, shape)
    with pytest.raises(TinkerError) as caught:
        read(found)
    assert text in str(caught.value) and caught.value.status in (413, 422)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target_tokens": None}, "no 'target_tokens'"),
        ({"target_tokens": ([2, 3], "<i8")}, "has 2 entries and the model_input 3 tokens"),
        ({"target_tokens": ([2, 3, 100], "<i8")}, "[2] is 100; the ids of org/tiny are 0 to 99"),
        ({"target_tokens": ([2, -100, 3], "<i8")}, "[1] is -100"),
        ({"target_tokens": ([2.0, 3.0, 4.0], "<f4")}, "is float32; expected int64"),
        ({"advantages": ([1, 1, 1], "<i8")}, "is int64; expected float32"),
        ({"advantages": ([1.0, np.nan, 1.0], "<f4")}, "[1] is nan; expected finite"),
        ({"logprobs": ([-np.inf, 0, 0], "<f4")}, "[0] is -inf"),
        ({"logprobs": (np.zeros((3, 2)), "<f4")}, "has the shape [3, 2] and target_tokens [3]"),
        ({"weights": (np.zeros((3, 1, 1)), "<f4")}, "expected [N] or [N, K]"),
        ({"advantages": ([1, 1, 1], "<f4", [2, 2])}, "do not fill the shape [2, 2]"),
        ({"advantages": ([1, 1, 1], "<f4", [-3, -1])}, "do not fill the shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name_and_place(changes, text):
    with pytest.raises(TinkerError) as caught:
        read(request(**changes))
    assert "data[0].loss_fn_inputs" in str(caught.value) and text in str(caught.value)
    assert caught.value.status == 422


def changed(change):
    found = request()
    change(found, found.data[0])
    return found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f, d: f.data.pop(), "data is empty"),
        (lambda f, d: d.ClearField("model_input"), "data[0].model_input is empty"),
        (
            lambda f, d: d.model_input.add().image.MergeFromString(b""),
            "data[0].model_input[1] is an image",
        ),
        (lambda f, d: d.model_input.add(), "empty or of an unknown type"),
        (lambda f, d: setattr(d.model_input[0].encoded_text, "tokens", b"abc"), "no int32s"),
        (
            lambda f, d: setattr(d.model_input[0].encoded_text, "tokens", b"\xff" * 12),
            "data[0].model_input[0] is -1",
        ),
        (
            lambda f, d: setattr(d.model_input[0].encoded_text, "tokens", bytes(4 * 33)),
            "has 33 tokens; org/tiny is served with at most 32",
        ),
        (lambda f, d: setattr(f, "loss_fn", "stable_reinforce"), "loss_fn=importance_sampling"),
        (lambda f, d: setattr(f, "loss_fn", "grpo"), "expected one of cross_entropy"),
        (lambda f, d: setattr(f, "loss_fn", "custom"), "create_custom_loss"),
        (lambda f, d: f.loss_fn_config.update(beta=float("nan")), "'beta' is nan"),
        (lambda f, d: f.loss_fn_config_v2["beta"].SetInParent(), "neither a number nor a text"),
        (lambda f, d: setattr(d.loss_fn_inputs["weights"], "dtype", 9), "has the dtype 9"),
        (lambda f, d: setattr(d.loss_fn_inputs["weights"], "dtype", 1), "has no values"),
        (lambda f, d: setattr(d.loss_fn_inputs["logprobs"], "dense", b"abc"), "no float32s"),
        (lambda f, d: d.model_input_spans.add(), "neither of a prompt nor of sampled"),
        (
            lambda f, d: setattr(d.model_input_spans.add().sampled_tokens, "length", 3),
            "sequence_id=''",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(change, text):
    with pytest.raises(TinkerError) as caught:
        read(changed(change))
    assert text in str(caught.value) and caught.value.status == 422


def test_spans_cover_all_tokens():
    found = request()
    span = found.data[0].model_input_spans.add().sampled_tokens
    span.sequence_id, span.length = "q1", 2
    with pytest.raises(TinkerError, match=r"\b2\b.*\b3\b"):
        read(found)


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(TinkerError, match="ForwardBackwardRequest"):
        parse_forward_backward(b"\xff\xff\xff")
    with pytest.raises(TinkerError, match="seq_id=0"):
        parse_forward_backward(b"")


def test_the_beginning_of_a_message_tells_its_model_and_seq_id():
    found = request()
    found.seq_id = 70_000
    assert peek_forward_backward(found.SerializeToString()[:40]) == ("S:train:0", 70_000)
    assert peek_forward_backward(b"\xff\xff") is None and peek_forward_backward(b"") is None


def test_a_body_is_unpacked_up_to_a_limit():
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(bytes(10_000_000))
    assert unpack_zstd(packed, 20_000_000) == bytes(10_000_000)
    assert unpack_zstd(packed, 1000) == bytes(1000)
    with pytest.raises(ValueError):
        unpack_zstd(b"garbage", 1000)


# -- JSON -----------------------------------------------------------------------------------------


def sample_body(**changes):
    params = {"max_tokens": 2, "temperature": 1.0, "top_k": -1, "top_p": 1} | changes.pop(
        "params", {}
    )
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    return Value(
        {"sampling_session_id": "x", "seq_id": 0, "num_samples": 2, "prompt": prompt}
        | {"sampling_params": params, "type": "sample"}
        | changes
    )


def test_a_request_for_samples_is_read_as_it_was_sent():
    asked = sampling_of(sample_body(params={"stop": ["a", "b"], "seed": 5}), BASE)
    assert asked.prompt_ids.tolist() == [1, 2, 3] and asked.num_samples == 2 and asked.seed == 5
    params = asked.params
    assert params.stop_strings == ("a", "b") and params.stop_ids == BASE.stop_ids
    assert params.top_k == 0

    def params_of(**params):
        return sampling_of(sample_body(params=params), BASE).params

    assert params_of(stop=[]).stop_ids == ()
    assert params_of(stop=[7]).stop_ids == (7,)
    assert params_of(stop="a").stop_strings == ("a",)
    assert params_of(temperature=0).temperature == 0


def targets(**changes):
    return {"data": [4, 5], "dtype": "int64", "shape": [2, 1]} | changes


def test_targets_are_read_dense_and_sparse():
    asked = sampling_of(sample_body(target_prompt_logprobs=targets(data=[4, -1])), BASE)
    assert asked.target_ids is not None and asked.target_ids.tolist() == [[4], [-1]]
    sparse_ones = targets(
        data=[5], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[1], shape=[2, 2]
    )
    asked = sampling_of(sample_body(target_prompt_logprobs=sparse_ones), BASE)
    assert asked.target_ids is not None and asked.target_ids.tolist() == [[-1, -1], [-1, 5]]
    assert asked.has_sparse_targets


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": {"chunks": []}}, "nothing to continue"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt.chunks[0] is an image"),
        ({"prompt": {"chunks": [{"tokens": [1, 100]}]}}, "prompt[1] is 100"),
        ({"prompt": {"chunks": [{"tokens": [1, 2**70]}]}}, "a list of whole numbers"),
        ({"prompt": {"chunks": [{"tokens": ["a"]}]}}, "prompt.chunks[0].tokens must be a list"),
        ({"prompt": {"chunks": [{"tokens": [1] * 32}]}}, "the prompt has 32 tokens"),
        ({"params": {"max_tokens": 30}}, "sampling_params.max_tokens is 30"),
        ({"params": {"max_tokens": 0}}, "max_tokens must be a whole number"),
        ({"params": {"temperature": -1}}, "temperature must be a finite number"),
        ({"params": {"temperature": 1e-9}}, "0 or at least 1e-05"),
        ({"params": {"temperature": float("nan")}}, "must be a finite number"),
        ({"params": {"stop": [1, "a"]}}, "stop[0] must be text"),
        ({"params": {"stop": [100]}}, "stop[0] is 100"),
        ({"params": {"min_p": 0.1}}, "sampling_params.min_p is not known"),
        ({"num_samples": 10**9}, "num_samples must be a whole number in 1..4096"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"record_stability_info": True}, "stable_reinforce"),
        ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs=true"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "in 1..2"),
        ({"topk_prompt_logprobs": 101}, "in 0..100"),
        ({"target_prompt_logprobs": targets(shape=[1, 2])}, "expected [2, K]"),
        ({"target_prompt_logprobs": targets(data=[-1, -1])}, "names no id"),
        ({"target_prompt_logprobs": targets(data=[4, -2])}, "[1, 0] is -2"),
        ({"target_prompt_logprobs": targets(dtype="float32")}, "dtype must be int64"),
        ({"target_prompt_logprobs": targets(shape=[2, 2])}, "do not fill the shape"),
    ],
)
def test_samples_that_cannot_be_drawn_are_refused(changes, text):
    with pytest.raises((TinkerError, Refusal)) as caught:
        sampling_of(sample_body(**changes), BASE)
    assert text in str(caught.value)
    assert caught.value.status in (400, 422)


def test_adamw_is_read_and_another_optimizer_refused():
    params = {"learning_rate": 1e-3, "beta1": 0.8, "grad_clip_norm": 0.0}
    step = optim_step_of(Value({"model_id": "m", "seq_id": 1, "adam_params": params}))
    assert (step.learning_rate, step.beta1, step.beta2, step.eps) == (1e-3, 0.8, 0.95, 1e-12)
    for wrong, text in [
        ({"adam_params": {**params, "learning_rate": float("inf")}}, "learning_rate must be"),
        ({"adam_params": {**params, "beta1": 1.0}}, "beta1 must be"),
        ({"adam_params": {**params, "eps": -1e-9}}, "eps must be"),
        ({"adam_params": {}}, "learning_rate must be"),
        ({"adam_params": {**params, "momentum": 0.9}}, "adam_params.momentum is not known"),
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, "AdamW alone"),
        ({}, "adam_params must be"),
    ]:
        with pytest.raises((TinkerError, Refusal)) as caught:
            optim_step_of(Value(wrong))
        assert text in str(caught.value)


def test_a_model_is_read_and_another_optimizer_refused():
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "org/tiny"}
    lora = {"rank": 8, "seed": 3, "train_mlp": False}
    spec = model_spec_of(Value({**body, "lora_config": lora}))
    assert (spec.rank, spec.seed, spec.train_mlp, spec.train_attn) == (8, 3, False, True)
    for wrong, text in [
        ({"lora_config": lora, "optimizer_config": {"type": "dimuon"}}, "AdamW alone"),
        ({}, "lora_config.rank must be"),
        ({"lora_config": {"rank": -1}}, "lora_config.rank must be"),
        ({"lora_config": {"rank": 8, "alpha": 16}}, "lora_config.alpha is not known"),
    ]:
        with pytest.raises((TinkerError, Refusal)) as caught:
            model_spec_of(Value({**body, **wrong}))
        assert text in str(caught.value)


# -- answers --------------------------------------------------------------------------------------


def test_the_client_reads_the_outputs_that_were_written():
    conv = pytest.importorskip("tinker.proto.response_conv")
    flat = np.array([-1.0, -2.0], np.float32)
    wide = np.arange(6, dtype=np.float32).reshape(3, 2)
    result = ForwardBackwardResult(logprobs=(flat, flat, wide), metrics={"loss:sum": 2.5})
    found = conv.deserialize_forward_backward_output(write_forward_backward(result))
    assert found.metrics == {"loss:sum": 2.5} and found.loss_fn_output_type == "ArrayRecord"
    assert [each["logprobs"].tolist() for each in found.loss_fn_outputs] == [
        [-1.0, -2.0],
        [-1.0, -2.0],
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]],
    ]


def test_the_client_reads_the_samples_that_were_written():
    conv = pytest.importorskip("tinker.proto.response_conv")
    topk = TopK(ids=np.array([[1, 2]], np.int32), logprobs=np.array([[-1, -2]], np.float32))
    sequence = SampledSequence(
        token_ids=np.array([5], np.int32),
        logprobs=np.array([-0.25], np.float32),
        versions=np.array([0], np.int32),
        stop_reason="length",
        topk=topk,
    )
    targets_of = np.array([[4, -1], [-1, 5]])
    asked = Sampling(
        prompt_ids=np.array([1, 2, 3], np.int32),
        num_samples=1,
        params=SamplingParams(max_tokens=1),
        target_ids=targets_of,
        has_sparse_targets=True,
    )
    result = SamplingResult(
        sequences=(sequence,),
        prompt_logprobs=np.array([np.nan, -1, -2], np.float32),
        target_logprobs=np.where(targets_of < 0, np.nan, -3.0).astype(np.float32),
        alternatives=TopK(ids=np.array([[7], [8]]), logprobs=np.array([[-1], [-2]], np.float32)),
        num_cached_tokens=2,
    )
    found = conv.deserialize_sample_response(write_sampling(result, asked))
    assert found.sequences[0].stop_reason == "length" and found.sequences[0].tokens == [5]
    assert found.prompt_logprobs == [None, -1.0, -2.0] and found.prompt_cache_hit_tokens == 2
    assert found.prompt_alt_tokens.tokens.tolist() == [[7], [8]]
    assert found.target_prompt_logprobs.sparse_col_indices == [0, 1]
    assert found.target_prompt_logprobs.sparse_crow_indices == [0, 1, 2]
    assert json.dumps(found.target_prompt_logprobs.tolist()) == "[[-3.0, 0.0], [0.0, -3.0]]"


def test_what_is_not_there_is_read_as_nothing():
    """The client knows an empty entry by its id 0 and log-prob -99999.0, and fills a dense tensor
    of targets with 0.0."""
    conv = pytest.importorskip("tinker.proto.response_conv")
    nan = np.nan
    topk = TopK(
        ids=np.array([[0, 0], [4, 7], [6, 9]], np.int32),
        logprobs=np.array([[nan, nan], [-0.5, -1], [-0.5, nan]], np.float32),
    )
    targets = np.array([[4, -1], [-1, 5]])
    prompt_ids = np.array([1, 2, 3], np.int32)
    params = SamplingParams(max_tokens=1)
    asked = Sampling(prompt_ids=prompt_ids, num_samples=1, params=params, target_ids=targets)
    result = SamplingResult(
        sequences=(),
        prompt_logprobs=np.array([nan, nan, -2], np.float32),
        topk_prompt=topk,
        target_logprobs=np.where(targets < 0, nan, -3.0).astype(np.float32),
    )
    found = conv.deserialize_sample_response(write_sampling(result, asked))
    assert found.prompt_logprobs == [None, None, -2.0]
    assert found.topk_prompt_logprobs == [None, [(4, -0.5), (7, -1.0)], [(6, -0.5)]]
    assert found.target_prompt_logprobs.tolist() == [[-3.0, 0.0], [0.0, -3.0]]
