"""verl: the batches that it saves.

    skip.rollout.enable=true skip.rollout.steps=[1] skip.rollout.dump_dir=DIR
                                         DIR/.../STEP/gen_batch.dp: sampled ids and log-probs
    skip.rollout_tq...                   DIR/.../STEP/N/tq_batch.pt: the same by the v1 trainer
    batch.save_to_disk(DIR/STEP.dp)      a `DataProto` with every tensor that it has by then

Field names as in verl 0.9.1 (trainer/ppo/ray_trainer.py, experimental/agent_loop/agent_loop.py,
protocol.py, utils/skip/rollout_skip.py). The parity tests read files that its own code wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    Values,
    floats_of,
    ids_of,
    numbers,
    picked,
    real,
    row_name,
    row_of,
    whole,
)
from lockstep.doctor.inputs.base import HOW_TO_GET_OF
from lockstep.doctor.inputs.lines import FileDump, step_in
from lockstep.doctor.inputs.pickles import (
    Record,
    is_pickle,
    is_torch_file,
    plain,
    read_pickle,
    read_torch,
)
from lockstep.doctor.inputs.places import head_of
from lockstep.doctor.rows import BoolArray
from lockstep.errors import DataError

_BATCHES = ("gen_batch.dp", "tq_batch.pt")


class VerlDump(FileDump):
    """Batches of verl: `DataProto.save_to_disk`, and the files of `skip.rollout`.

    Prompts are padded on the left and responses on the right; places that the attention mask leaves
    out are left out. Log-probs are at the tokens of the response. `old_log_probs` are the
    trainer's, before the update.
    """

    format: ClassVar[str] = "verl"
    patterns: ClassVar[tuple[str, ...]] = ("*.dp", *(f"**/{name}" for name in _BATCHES))
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    why: ClassVar[Mapping[str, str]] = HOW_TO_GET_OF["verl"]

    def __init__(self, path: Path) -> None:
        self._groups: dict[str, int] = {}
        """uid -> number of the group."""
        super().__init__(path)
        _, _, meta = _read(self.files[0])
        self.facts = replace(self.facts, **facts_of(meta))

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return path.name in _BATCHES or (is_pickle(path) and b"verl.protocol" in head_of(path))

    def rows_in(self, path: Path) -> Iterator[Row]:
        batch = _read(path)
        step = whole(batch[2].get("global_steps"))
        if step is None and path.name in _BATCHES:
            step = step_in(path.parent)  # a directory for each step
        yield from _rows(batch, self._groups, step, path)


def live_batch(batch: Any, *, tags: Any = None, keys: Any = None) -> Batch:
    """A `DataProto` in memory; or the TensorDict of the v1 trainer's queue, with the tags and the
    keys of its rows."""
    if hasattr(batch, "non_tensor_batch"):
        tensors = dict(batch.batch.items()) if batch.batch is not None else {}
        return tensors, _tags(batch.non_tensor_batch), dict(batch.meta_info)
    tensors = dict(batch.items()) if hasattr(batch, "items") else {}
    keys = None if keys is None else list(keys)
    return _of_queue({"tensordict": tensors, "tags": tags, "keys": keys})


def live_rows(
    batch: Batch, index: Sequence[int], groups: dict[str, int], *, step: int
) -> Iterator[Row]:
    """The rows `index` of a `live_batch`."""
    tensors, tags, meta = batch
    where = f"the batch of step {step}"
    chosen = _checked((picked(tensors, index), picked(tags, index), meta), where)
    return _rows(chosen, groups, step, where, index)


def facts_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the run in the settings of a batch."""
    stop = meta.get("eos_token_id")
    stops = map(whole, stop if isinstance(stop, list) else [stop])
    return {
        "temperature": real(meta.get("temperature")),
        "pad_id": whole(meta.get("pad_token_id")),
        "stop_ids": frozenset(id_ for id_ in stops if id_ is not None),
    }


def _rows(
    batch: Batch,
    groups: dict[str, int],
    step: int | None,
    where: object,
    names: Sequence[int] | None = None,
) -> Iterator[Row]:
    tensors, columns, _ = batch
    for i, name in enumerate(names or range(len(tensors["responses"]))):
        tags = {name: values[i] for name, values in columns.items() if i < len(values)}
        if not tags.get("is_padding"):  # fills the batch, never trained
            source = row_of(tensors, i)
            yield _row(source, tags, groups, name, step, f"{where}: row {name}")


def _row(
    source: Mapping[str, Any],
    tags: Mapping[str, Any],
    groups: dict[str, int],
    number: int,
    step: int | None,
    where: str,
) -> Row:
    prompt = ids_of(source["prompts"], f"{where}: prompts")
    reply = ids_of(source["responses"], f"{where}: responses")
    ids = np.concatenate([prompt, reply])
    kept = np.ones(len(ids), np.bool_)  # jagged rows have no padding
    if source["is_padded"]:
        if source.get("attention_mask") is None:
            raise DataError(f"{where}: the batch has no attention_mask. Save it with one.")
        attended = source["attention_mask"]
        kept = floats_of(attended, len(ids), f"{where}: attention_mask") > 0
    size, prompt_length = int(kept.sum()), int(kept[: len(prompt)].sum())
    values = Values(source=source, where=where, size=size, kept=kept[len(prompt) :])
    mask = values.mask("response_mask")
    if mask is None:
        mask = np.arange(size) >= prompt_length
    scores = values.floats("token_level_scores", "rm_scores")
    version: Any = tags.get("min_global_steps")
    is_known = version is not None and version == tags.get("max_global_steps")
    uid = tags.get("uid")
    return Row.of(
        row_id=row_name(step, number),
        token_ids=ids[kept],
        loss_mask=mask,
        prompt_lengths=prompt_length,
        rollout_logprobs=values.floats("rollout_log_probs"),
        trainer_logprobs=values.floats("old_log_probs"),
        advantages=values.floats("advantages"),
        routed_experts=_routes(numbers(source.get("routed_experts")), kept, where),
        rewards=None if scores is None else float(np.nansum(scores)),
        policy_version=np.where(mask, version or 0, -1) if is_known else None,
        # step S trains the weights that step S - 1 made
        trainer_version=step - 1 if is_known and step is not None else None,
        groups=None if uid is None else groups.setdefault(str(uid), len(groups)),
        steps=step,
    )


Batch = tuple[dict[str, Any], dict[str, Sequence[Any]], dict[str, Any]]
"""One file, by verl's names: its tensors (padded, [B, ...], or a list of B arrays), the columns of
`non_tensor_batch`, or of the v1 trainer's tags, [B] each, and its settings."""


def _read(path: Path) -> Batch:
    batch = _of_queue(read_torch(path)) if is_torch_file(path) else _of_proto(path)
    return _checked(batch, path)


def _checked(batch: Batch, where: object) -> Batch:
    tensors, tags, meta = batch
    parts: list[Any] = [tensors.get(name) for name in ("prompts", "responses")]
    if any(not isinstance(part, list) and np.ndim(part) != 2 for part in parts):
        raise DataError(
            f"{where} is not a batch of verl with `prompts` and `responses`: it was not written "
            "by DataProto.save_to_disk or skip.rollout after the rollout."
        )
    is_padded = [not isinstance(parts[0], list)] * len(parts[0])
    return {**tensors, "is_padded": is_padded}, tags, meta


def _of_queue(saved: Any) -> Batch:
    """The batch of the v1 trainer: tensors, tags by row, and the keys of the rows."""
    if not isinstance(saved, dict):
        return {}, {}, {}
    tags: dict[str, Sequence[Any]] = {}
    listed, keys = saved.get("tags"), saved.get("keys")
    if isinstance(listed, list) and all(isinstance(tag, dict) for tag in listed):
        for name in ("min_global_steps", "max_global_steps", "is_padding"):
            tags[name] = [tag.get(name) for tag in listed]
        if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            # KEY is {uid}_{session}_{index}: rows of one uid belong to one task.
            tags["uid"] = [key.rsplit("_", 2)[0] for key in keys]
    tensors = saved.get("tensordict", saved)
    return tensors if isinstance(tensors, dict) else {}, tags, saved


def _of_proto(path: Path) -> Batch:
    """A pickled DataProto: tensors as bytes of torch.save, arrays by row, settings."""
    saved = read_pickle(path)
    is_proto = isinstance(saved, Record) and saved.name == "verl.protocol.DataProto"
    if not is_proto or not isinstance(saved.state, tuple) or len(saved.state) != 3:
        return {}, {}, {}
    content, arrays, meta = saved.state
    found = read_torch(content, f"{path} (its tensors)") if isinstance(content, bytes) else {}
    tensors = found if isinstance(found, dict) else {}
    return tensors, _tags(arrays), meta if isinstance(meta, dict) else {}


def _tags(arrays: Any) -> dict[str, Sequence[Any]]:
    """`non_tensor_batch` without columns of anything but one value per row."""
    known = {n: plain(v) for n, v in arrays.items()} if isinstance(arrays, dict) else {}
    flat = {n: v for n, v in known.items() if isinstance(v, np.ndarray) and v.ndim == 1}
    return {name: values.tolist() for name, values in flat.items()}


def _routes(values: Array | None, kept: BoolArray, where: str) -> Array | None:
    """[T, L, K], -1 where verl has zeros for none and at the last token."""
    if values is None:
        return None
    if values.ndim != 3 or len(values) != len(kept):
        raise DataError(
            f"{where}: routed_experts has shape {values.shape}; expected ({len(kept)}, layers, "
            "experts per token)."
        )
    routes = values[kept].astype(np.int16)
    if routes.shape[2] > 1:  # no token goes to expert 0 twice
        routes[(routes == 0).all((1, 2))] = -1
    routes[-1:] = -1
    return routes
