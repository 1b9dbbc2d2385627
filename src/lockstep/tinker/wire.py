"""Reads the bodies of Tinker's API, protobuf and JSON, as values of `requests.py`; writes answers.

A test compares the messages of wire.txtpb with the client's own, field by field. A TinkerError
names the expected and the found value, the datum and the field, and the next step.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.agent.gateway.reading import Value
from lockstep.errors import MissingExtraError
from lockstep.tinker.graph import GraphLoss
from lockstep.tinker.losses import LOSSES
from lockstep.tinker.requests import (
    BaseModel,
    Datum,
    ForwardBackward,
    ForwardBackwardResult,
    ModelSpec,
    OptimStep,
    Sampling,
    SamplingResult,
    Span,
    TinkerError,
    TopK,
    invalid,
)
from lockstep.types import SamplingParams

try:
    import zstandard
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
    from google.protobuf.message import DecodeError, Message
except ImportError as error:  # pragma: no cover
    package = (error.name or "protobuf").partition(".")[0]
    raise MissingExtraError.of(package, extra="tinker", needed_for="Tinker's API") from None

Array = npt.NDArray[Any]

PROTOBUF = "application/x-protobuf"

MAX_VALUES = 2**26
"""Values of all tensors of one request, with sparse ones made dense: 256 MiB of float32."""
MAX_SAMPLES = 4096
"""Replies that one request may ask for."""
MAX_TOP_K = 1024
"""Ids with log-probs that a request may ask for at one place."""
MAX_SEQ_ID = 2**31 - 1
MAX_METADATA_CHARS = 16_384
MAX_HEAD_BYTES = 256
"""Beginning of a message with its first two fields, the model and the seq_id."""
MAX_SAMPLE_SEQ_ID = 2**63 - 1
"""An unpickled sampling client counts from its random number times 10^9."""
NO_LOGPROB = -99999.0
"""Log-prob, with the id 0, of an entry of a top-k list that is not there."""

UNPUBLISHED = "stable_reinforce"
FLOAT_INPUTS = ("weights", "logprobs", "advantages", "clip_low_threshold", "clip_high_threshold")
"""Inputs of losses that are float32, one per target."""

# -- the messages ---------------------------------------------------------------------------------


def _read_messages() -> dict[str, type[Message]]:
    text = Path(__file__).with_suffix(".txtpb").read_text("utf-8")
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()  # its own: a client in this process has its own, too
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix(f"{file.package}."): each for name, each in found.items()}


MESSAGES = _read_messages()


def message(name: str) -> Any:
    """A new message. Its fields are known at run time alone."""
    return MESSAGES[name]()


# -- reading: bodies ------------------------------------------------------------------------------


def unpack_zstd(raw: bytes, limit: int) -> bytes:
    """Undoes `Content-Encoding: zstd`, up to `limit` bytes. Raises ValueError."""
    try:
        return zstandard.ZstdDecompressor().stream_reader(raw).read(limit)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def parse_forward_backward(raw: bytes) -> Any:
    """Parses the message. Raises TinkerError (400)."""
    found = message("ForwardBackwardRequest")
    try:
        found.ParseFromString(raw)
    except DecodeError:
        raise TinkerError(
            f"the body ({len(raw)} bytes) is no protobuf message ForwardBackwardRequest. "
            "Is the client older than 0.30, or was the body cut?"
        ) from None
    if not found.model_id or found.seq_id < 1:
        raise TinkerError(
            f"model_id={found.model_id[:80]!r} seq_id={found.seq_id}: expected a model's id and a "
            "number from 1."
        )
    return found


def peek_forward_backward(head: bytes) -> tuple[str, int] | None:
    """The model and seq_id at the beginning of a message, if both are there. A client goes on with
    the next seq_id after a refusal, so a refusal should use the right number up."""
    found = message("ForwardBackwardRequest")
    for size in range(min(len(head), MAX_HEAD_BYTES) + 1):
        with contextlib.suppress(DecodeError):  # cut within a field
            found.ParseFromString(head[:size])
            if found.model_id and found.seq_id:
                return found.model_id, found.seq_id
    return None


def forward_backward_of(
    found: Any,
    base: BaseModel,
    *,
    find_loss: Callable[[str], GraphLoss | None],
    substitute: str = "",
) -> ForwardBackward:
    """Reads a parsed message for a model over `base`. find_loss: an uploaded loss by its id.
    substitute: the loss in place of stable_reinforce; empty refuses it.

    Raises TinkerError (422).
    """
    name = substitute if found.loss_fn == UNPUBLISHED and substitute else found.loss_fn
    check_loss(name)
    config: dict[str, float | str] = dict(found.loss_fn_config)
    for key, value in found.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise invalid(f"loss_fn_config {key!r} has neither a number nor a text.")
        config[key] = getattr(value, kind)
    for key, number in config.items():
        if isinstance(number, float) and not np.isfinite(number):
            raise invalid(f"loss_fn_config {key!r} is {number}; expected a finite number.")
    if name != found.loss_fn and config:
        raise invalid(
            f"{name} is computed in place of {UNPUBLISHED}, and has no setting "
            f"{', '.join(config)}. Leave loss_fn_config out."
        )
    custom = None
    if name == "custom":
        custom = find_loss(str(config.get("loss_id", "")))
        if custom is None:
            raise invalid(
                f"loss_id={config.get('loss_id')!r} names no loss that was uploaded here. "
                "Make it with service_client.create_custom_loss."
            )
    if not found.data:
        raise invalid("data is empty: forward_backward needs at least one datum.")
    _check_size(tensor.shape for each in found.data for tensor in each.loss_fn_inputs.values())
    read = partial(_datum, base=base, is_custom=custom is not None)
    data = tuple(read(each, f"data[{at}]") for at, each in enumerate(found.data))
    return ForwardBackward(
        data=data, loss=name, config=config, is_forward_only=found.forward_only, custom=custom
    )


def check_loss(name: str) -> None:
    """Raises TinkerError (422) for a loss that is not served."""
    if name == UNPUBLISHED:
        raise invalid(
            "loss_fn='stable_reinforce' is not published, so it cannot be served exactly. "
            "Use loss_fn='importance_sampling' (in tinker-cookbook: loss_fn=importance_sampling), "
            "or start the server with tinker.stable_reinforce=importance_sampling."
        )
    known = (*LOSSES, "custom")
    if name not in known:
        raise invalid(f"loss_fn={name[:80]!r} is not known; expected one of {', '.join(known)}.")


# -- reading: data --------------------------------------------------------------------------------


def _check_size(shapes: Iterable[Sequence[int]]) -> None:
    """Raises TinkerError (413) if tensors of these shapes have too many values."""
    if sum(math.prod(max(0, size) for size in shape) for shape in shapes) > MAX_VALUES:
        raise TinkerError(
            f"the tensors of this request have over {MAX_VALUES} values (sparse ones counted "
            "dense). Send fewer datums at a time, or fewer columns.",
            status=413,
        )


def _datum(found: Any, where: str, base: BaseModel, *, is_custom: bool) -> Datum:
    token_ids = _tokens_of(found.model_input, where)
    num = len(token_ids)
    if not num:
        raise invalid(f"{where}.model_input is empty; expected at least one token.")
    if num > base.max_tokens:
        raise invalid(
            f"{where}.model_input has {num} tokens; {base.name} is served with at most "
            f"{base.max_tokens}. Cut the datum."
        )
    _check_ids(token_ids, f"{where}.model_input", base)
    inputs = {
        name: _tensor_of(tensor, f"{where}.loss_fn_inputs[{name!r}]")
        for name, tensor in found.loss_fn_inputs.items()
    }
    if "target_tokens" not in inputs:
        raise invalid(f"{where}.loss_fn_inputs has no 'target_tokens': the ids to be predicted.")
    for name in sorted(inputs, key=lambda name: (name != "target_tokens", name)):
        _check_input(name, inputs, num, f"{where}.loss_fn_inputs[{name!r}]", is_custom)
    _check_ids(inputs["target_tokens"], f"{where}.loss_fn_inputs['target_tokens']", base)
    return Datum(
        token_ids=token_ids,
        inputs=inputs,
        input_spans=_spans(found.model_input_spans, num, f"{where}.model_input_spans"),
        loss_spans=_spans(found.loss_fn_input_spans, num, f"{where}.loss_fn_input_spans"),
    )


def _check_input(
    name: str, inputs: Mapping[str, Array], num: int, where: str, is_custom: bool
) -> None:
    """num: tokens of the model's input. A custom loss may have inputs of other shapes than the
    targets."""
    values, targets = inputs[name], inputs["target_tokens"]
    is_target = name == "target_tokens"
    expected = "i" if is_target else "f" if name in FLOAT_INPUTS else values.dtype.kind
    if values.dtype.kind != expected:
        kind = "int64" if is_target else "float32"
        raise invalid(f"{where} is {values.dtype}; expected {kind}.")
    is_empty = is_target and not values.size
    if values.ndim > 2 or is_empty or (values.ndim == 0 and not is_custom):
        raise invalid(f"{where} has the shape {list(values.shape)}; expected [N] or [N, K].")
    if values.ndim and len(values) != num and (is_target or not is_custom):
        raise invalid(
            f"{where} has {len(values)} entries and the model_input {num} tokens; expected one "
            "entry for each token: position i predicts target_tokens[i]."
        )
    if (not is_custom or name in ("weights", "logprobs")) and values.shape != targets.shape:
        raise invalid(
            f"{where} has the shape {list(values.shape)} and target_tokens {list(targets.shape)}; "
            "expected the same."
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        place = np.argwhere(~np.isfinite(values))[0].tolist()
        raise invalid(f"{where}{place} is {values[tuple(place)]}; expected finite numbers.")


def _tokens_of(chunks: Iterable[Any], where: str) -> npt.NDArray[np.int32]:
    parts: list[npt.NDArray[np.int32]] = []
    for at, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise _no_text(f"{where}.model_input[{at}]", kind)
        raw = chunk.encoded_text.tokens
        if len(raw) % 4:
            raise invalid(f"{where}.model_input[{at}].tokens: {len(raw)} bytes are no int32s.")
        parts.append(np.frombuffer(raw, "<i4"))
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)


def _no_text(where: str, kind: str | None) -> TinkerError:
    what = {"image": "an image", "image_asset_pointer": "an image", "dmel": "audio"}
    return invalid(
        f"{where} is {what.get(kind or '', 'empty or of an unknown type')}; the models served here "
        "read text alone. Send chunks of the type encoded_text."
    )


def _check_ids(ids: Array, where: str, base: BaseModel) -> None:
    wrong = (ids < 0) | (ids >= base.vocab_size)
    if wrong.any():
        place = np.argwhere(wrong)[0].tolist()
        raise invalid(
            f"{where}{place} is {ids[tuple(place)]}; the ids of {base.name} are 0 to "
            f"{base.vocab_size - 1}. Was another tokenizer used?"
        )


_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4"), 4: np.dtype("<u2")}


def _tensor_of(tensor: Any, where: str) -> Array:
    """Reads a tensor: floats become float32, whole numbers int64; sparse ones become dense."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise invalid(f"{where} has the dtype {tensor.dtype}; expected float32 or int64.")
    shape, encoding = list(tensor.shape), tensor.WhichOneof("encoding")
    if encoding is None:
        raise invalid(f"{where} has no values: neither dense nor sparse_csr.")
    raw = tensor.dense if encoding == "dense" else tensor.sparse_csr.values
    if len(raw) % dtype.itemsize:
        raise invalid(f"{where}: {len(raw)} bytes are no {dtype.name}s.")
    values = np.frombuffer(raw, dtype)
    if tensor.dtype == 4:  # bfloat16 is the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    if encoding == "dense":
        return _dense(values, shape, where)
    csr = tensor.sparse_csr
    if len(csr.crow_indices) % 8 or len(csr.col_indices) % 8:
        raise invalid(f"{where}: the indices of a sparse tensor must be int64.")
    crow, col = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    return _from_csr((crow, col, values), shape, where, pad=0)


def _dense(values: Array, shape: list[int], where: str) -> Any:
    shape = shape or [len(values)]
    if any(size < 0 for size in shape) or math.prod(shape) != len(values):
        raise invalid(f"{where} has {len(values)} values, which do not fill the shape {shape}.")
    return values.reshape(shape)


def _from_csr(arrays: Sequence[Array], shape: list[int], where: str, *, pad: int) -> Array:
    """Makes a sparse matrix dense; `pad` fills the cells that it does not list. arrays: pointers to
    rows, columns, values."""
    crow, col, values = arrays
    if len(shape) != 2 or min(shape) < 0:
        raise invalid(f"{where} is sparse with the shape {shape}; expected [N, K].")
    rows, columns = shape
    is_right = (
        len(crow) == rows + 1
        and crow[0] == 0
        and crow[-1] == len(values) == len(col)
        and bool((np.diff(crow) >= 0).all())
    )
    if not is_right or (len(col) and not (col.min() >= 0 and col.max() < columns)):
        raise invalid(
            f"{where}: the indices of this sparse tensor are inconsistent ({len(values)} values, "
            f"{len(crow)} row pointers, {len(col)} columns, shape {shape})."
        )
    row = np.repeat(np.arange(rows), np.diff(crow))
    if len(np.unique(row * columns + col)) != len(col):
        raise invalid(f"{where}: this sparse tensor lists a place twice.")
    found = np.full((rows, columns), pad, values.dtype)
    found[row, col] = values
    return found


def _spans(spans: Iterable[Any], num: int, where: str) -> tuple[Span, ...]:
    found: list[Span] = []
    for at, span in enumerate(spans):
        kind = span.WhichOneof("span")
        if kind is None:
            raise invalid(f"{where}[{at}] is neither of a prompt nor of sampled tokens.")
        part = getattr(span, kind)
        if part.offset < 0 or part.length < 0 or not part.sequence_id:
            raise invalid(
                f"{where}[{at}] has sequence_id={part.sequence_id[:80]!r} offset={part.offset} "
                f"length={part.length}; expected an id, an offset from 0 and a length from 0."
            )
        if part.length:  # a reply of one token has none among the inputs
            place = {"sequence_id": part.sequence_id, "offset": part.offset, "length": part.length}
            found.append(Span(kind=kind.removesuffix("_tokens"), **place))
    total = sum(span.length for span in found)
    if found and total != num:
        raise invalid(f"{where} have {total} tokens together, and the model_input {num}.")
    return tuple(found)


# -- reading: JSON --------------------------------------------------------------------------------


def canonical(body: Value) -> bytes:
    """One text for a body, in whatever order its fields come."""
    return json.dumps(body.object(), sort_keys=True).encode()


def whole_number(value: Value, least: int = 0, most: int = MAX_SEQ_ID) -> int:
    """One that must be given."""
    found = value.integer(least, most)
    if found is None:
        raise value.wrong(f"a whole number from {least}")
    return found


def metadata_of(value: Value) -> dict[str, str]:
    """The sender's notes, which every listing repeats. Raises Refusal (400) unless they are text by
    names, and short."""
    found = {name: value[name].text() for name, raw in value.object().items() if raw is not None}
    if (size := sum(map(len, (*found, *found.values())))) > MAX_METADATA_CHARS:
        raise value.refusal(f"has {size} characters; at most {MAX_METADATA_CHARS} are kept.")
    return found


Fields = Mapping[str, Callable[[Value], Any]]
"""Name of a field -> reads its value; None if it is left out."""

_LORA: Fields = {
    "rank": lambda value: whole_number(value, 0, 65536),  # 0 trains the whole model
    "seed": lambda value: value.integer(-(2**63), 2**63 - 1),
    **dict.fromkeys(("train_unembed", "train_mlp", "train_attn"), lambda value: value.truth(True)),
}
_ADAM: Fields = {
    **dict.fromkeys(("learning_rate", "eps", "weight_decay"), lambda value: value.number(0, 1e30)),
    **dict.fromkeys(("beta1", "beta2"), lambda value: value.number(0, 1 - 1e-9)),
    "grad_clip_norm": lambda value: value.number(-1e30, 1e30),
}


def fields_of(body: Value, fields: Fields) -> dict[str, Any]:
    """The given fields of a body, by name. Raises Refusal for an unknown one."""
    body.check_known("type", *fields)
    found = {name: read(body[name]) for name, read in fields.items()}
    return {name: value for name, value in found.items() if value is not None}


def model_spec_of(body: Value) -> ModelSpec:
    """Reads `create_model`."""
    names = ("session_id", "model_seq_id", "base_model", "lora_config", "optimizer_config")
    body.check_known("type", *names, "user_metadata")
    check_optimizer(body["optimizer_config"])
    lora = fields_of(body["lora_config"], _LORA)
    return ModelSpec(base_model=body["base_model"].text(), **lora)


def custom_loss_of(body: Value) -> GraphLoss:
    """Reads `create_custom_loss`."""
    inputs = [each.object() for each in body["inputs"].entries()]
    return GraphLoss(body["name"].text(), inputs, body["graph"].object())


def check_optimizer(config: Value) -> None:
    if config["type"].text("adamw") != "adamw":
        raise config["type"].unsupported("AdamW alone is served; leave optimizer_config out.")


def optim_step_of(body: Value) -> OptimStep:
    body.check_known("type", "model_id", "seq_id", "adam_params", "optimizer_params")
    if body["optimizer_params"].raw is not None:
        raise body["optimizer_params"].unsupported("AdamW alone is served; send adam_params.")
    params = body["adam_params"]
    if params.raw is None:
        raise params.wrong("an object with learning_rate, beta1, beta2, eps, weight_decay")
    given = fields_of(params, _ADAM)
    if nulls := [name for name in _ADAM if params.object().get(name, 0) is None]:
        text = "must be a finite number, found null: NaN or infinity at the client."
        raise params[nulls[0]].refusal(text)
    if "learning_rate" not in given:
        raise params["learning_rate"].wrong("a number from 0")
    given["grad_clip_norm"] = max(0.0, given.get("grad_clip_norm", 0.0))
    return OptimStep(**given)


_SAMPLE_FIELDS = (
    *("sampling_session_id", "seq_id", "num_samples", "prompt", "sampling_params"),
    *("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"),
    *("target_prompt_logprobs", "prompt_logprobs_last_n", "record_stability_info"),
)


def sampling_of(body: Value, base: BaseModel, *, substitute: str = "") -> Sampling:
    """Reads `asample`. substitute: the loss in place of stable_reinforce, which needs no more than
    the log-probs; empty refuses its records.

    Raises TinkerError (422), or the refusal of a wrong type.
    """
    if body["record_stability_info"].truth() and not substitute:
        raise invalid(
            "record_stability_info is for loss_fn='stable_reinforce', which is not served. "
            "Use loss_fn='importance_sampling' and leave record_stability_info out, or start the "
            "server with tinker.stable_reinforce=importance_sampling."
        )
    body.check_known("type", *_SAMPLE_FIELDS)
    prompt_ids = _prompt_ids(body["prompt"], base)
    num, params = len(prompt_ids), body["sampling_params"]
    params.check_known("type", "max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
    max_tokens = params["max_tokens"].integer(1)
    if num >= base.max_tokens or num + (max_tokens or 1) > base.max_tokens:
        asked = f" and sampling_params.max_tokens is {max_tokens}" if max_tokens else ""
        raise invalid(
            f"the prompt has {num} tokens{asked}; {base.name} is served with at most "
            f"{base.max_tokens} tokens together. Send less, or serve it with a larger max_tokens."
        )
    temperature = params["temperature"].temperature()
    stop_ids, stop_strings = _stops(params["stop"], base)
    has_logprobs = body["prompt_logprobs"].truth()
    last_n = body["prompt_logprobs_last_n"].integer(1, max(1, num - 1))
    if last_n is not None and not has_logprobs:
        raise body["prompt_logprobs_last_n"].refusal("needs prompt_logprobs=true.")
    return Sampling(
        prompt_ids=prompt_ids,
        num_samples=body["num_samples"].integer(1, MAX_SAMPLES) or 1,
        params=SamplingParams(
            max_tokens=max_tokens or base.max_tokens - num,
            temperature=1.0 if temperature is None else temperature,
            top_p=params["top_p"].number(1e-6, 1) or 1.0,
            top_k=max(0, params["top_k"].integer(-1) or 0),
            stop_ids=stop_ids,
            stop_strings=stop_strings,
        ),
        seed=params["seed"].integer(-(2**63), 2**64 - 1),
        has_prompt_logprobs=has_logprobs,
        topk_prompt_logprobs=_top_k(body["topk_prompt_logprobs"], base),
        topk_sample_logprobs=_top_k(body["topk_sample_logprobs"], base),
        target_ids=_targets(body["target_prompt_logprobs"], num, base),
        has_sparse_targets=body["target_prompt_logprobs"]["sparse_crow_indices"].raw is not None,
        num_alternatives=_top_k(body["prompt_alt_tokens_k"], base),
        first=1 if last_n is None else num - last_n,
    )


def _top_k(value: Value, base: BaseModel) -> int:
    return value.integer(0, min(MAX_TOP_K, base.vocab_size)) or 0


def _prompt_ids(prompt: Value, base: BaseModel) -> npt.NDArray[np.int32]:
    found: list[int] = []
    for chunk in prompt["chunks"].entries():
        kind = chunk["type"].text("encoded_text")
        if kind != "encoded_text":
            raise _no_text(chunk.where, kind)
        found += _integers(chunk["tokens"])
    if not found:
        raise prompt.refusal("is empty: there is nothing to continue.")
    ids = np.array(found, np.int64)
    _check_ids(ids, prompt.where, base)
    return ids.astype(np.int32)


def _integers(value: Value) -> list[int]:
    """A list of whole numbers within 64 bits."""
    found, high = value.raw, 2**63
    if isinstance(found, list) and all(type(n) is int and -high <= n < high for n in found):
        return found
    raise value.wrong("a list of whole numbers")


def _stops(value: Value, base: BaseModel) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Stop ids and stop strings. The model's own stop ids stay in force beside strings; an empty
    list switches them off."""
    if value.raw is None:
        return base.stop_ids, ()
    if isinstance(value.raw, str) or any(isinstance(each.raw, str) for each in value.entries()):
        return base.stop_ids, value.stops()
    ids = _integers(value)
    _check_ids(np.array(ids, np.int64), value.where, base)
    return tuple(ids), ()


def _targets(value: Value, num: int, base: BaseModel) -> npt.NDArray[np.int64] | None:
    """Reads an int64 tensor [num - 1, K] whose cells are ids, or -1 for nothing."""
    if value.raw is None:
        return None
    if value["dtype"].text() != "int64":
        raise value["dtype"].wrong("int64")
    shape = _integers(value["shape"]) if value["shape"].raw is not None else []
    _check_size([shape])
    names = ("sparse_crow_indices", "sparse_col_indices", "data")
    if value["sparse_crow_indices"].raw is None:
        found = _dense(np.array(_integers(value["data"]), np.int64), shape, value.where)
    else:
        arrays = tuple(np.array(_integers(value[name]), np.int64) for name in names)
        found = _from_csr(arrays, shape, value.where, pad=-1)
    if found.ndim != 2 or len(found) != num - 1:
        raise invalid(
            f"{value.where} has the shape {list(found.shape)}; expected [{num - 1}, K]: a row for "
            "each prompt token but the first."
        )
    if not (found >= 0).any():
        raise invalid(f"{value.where} names no id: every cell is -1.")
    _check_ids(np.where(found == -1, 0, found), value.where, base)
    return found


# -- writing --------------------------------------------------------------------------------------


def write_forward_backward(result: ForwardBackwardResult) -> bytes:
    """Writes the log-probs; neighbours of one shape share a record."""
    found = message("ForwardBackwardOutput")
    found.loss_fn_output_type = "ArrayRecord"
    for trailing, group in groupby(result.logprobs, key=lambda values: values.shape[1:]):
        parts = [np.ascontiguousarray(each, "<f4").tobytes() for each in group]
        record = found.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts))
        field = record.fields["logprobs"]
        field.data, field.dtype = b"".join(parts), 1
        field.offsets = np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes()
        field.trailing_shape.extend(trailing)
    for name, value in result.metrics.items():
        assert name.count(":") == 1, f"metric {name!r}: clients read `name:reduction` alone"
        found.metrics[name] = value
    return found.SerializeToString(deterministic=True)


def write_sampling(result: SamplingResult, request: Sampling) -> bytes:
    found = message("SampleResponse")
    for sequence in result.sequences:
        field = found.sequences.add()
        field.stop_reason = ("stop", "length").index(sequence.stop_reason)
        field.tokens = sequence.token_ids.astype("<i4").tobytes()
        field.logprobs = sequence.logprobs.astype("<f4").tobytes()
        if sequence.topk is not None:
            _write_top_k(field.topk_sampled_logprobs, sequence.topk)
    found.prompt_cache_hit_tokens = result.num_cached_tokens
    if result.prompt_logprobs is not None:
        found.prompt_logprobs = result.prompt_logprobs.astype("<f4").tobytes()
    if result.topk_prompt is not None:
        _write_top_k(found.topk_prompt_logprobs, result.topk_prompt)
    if result.target_logprobs is not None and request.target_ids is not None:
        named = request.target_ids >= 0 if request.has_sparse_targets else None
        values = np.nan_to_num(result.target_logprobs, nan=0.0)
        _write_tensor(found.target_prompt_logprobs, values, named)
    if result.alternatives is not None:
        _write_tensor(found.prompt_alt_tokens.tokens, result.alternatives.ids)
        _write_tensor(found.prompt_alt_tokens.logprobs, result.alternatives.logprobs)
    return found.SerializeToString(deterministic=True)


def _write_top_k(field: Any, topk: TopK) -> None:
    is_there = ~np.isnan(topk.logprobs)
    field.token_ids = np.where(is_there, topk.ids, 0).astype("<i4").tobytes()
    field.logprobs = np.where(is_there, topk.logprobs, NO_LOGPROB).astype("<f4").tobytes()
    field.length, field.k = topk.ids.shape


def _write_tensor(field: Any, values: Array, named: Array | None = None) -> None:
    """named: cells of a sparse tensor that are listed; None writes a dense one."""
    dtype = np.dtype("<f4" if values.dtype.kind == "f" else "<i8")
    field.dtype = 1 if dtype.kind == "f" else 2
    field.shape.extend(values.shape)
    if named is None:
        field.dense = np.ascontiguousarray(values, dtype).tobytes()
        return
    field.sparse_csr.values = values[named].astype(dtype).tobytes()
    crow = np.concatenate([[0], np.cumsum(named.sum(axis=1))])
    field.sparse_csr.crow_indices = crow.astype("<i8").tobytes()
    field.sparse_csr.col_indices = np.nonzero(named)[1].astype("<i8").tobytes()
