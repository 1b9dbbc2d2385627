"""Trajectories as columns: one Parquet part per step, one row per trajectory, segments nested.

A part holds what cannot be derived (ids, log-probs, versions, messages, rewards) and a few summary
columns that can, so that a browser may sort thousands of trajectories without reading their tokens.
Only each segment's own ids are stored, never a path: a forest of n turns costs n turns.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import AlignmentError, DataError
from lockstep.store.files import write_atomically
from lockstep.types import (
    Float32Array,
    Group,
    Message,
    Ragged,
    Sample,
    SamplingParams,
    Segment,
    Task,
    Trajectory,
    frozen_ids,
)

SCHEMA_VERSION = 3
"""Written into every part. A reader refuses a part that is newer than itself."""

# Rows that are read together when one trajectory is looked up.
_ROW_GROUP_SIZE = 32


def _list(value: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("item", value))


_ARRAY = pa.struct([("dtype", pa.string()), ("shape", _list(pa.int32())), ("bytes", pa.binary())])
_LEAF_REWARD = pa.struct([("leaf", pa.int32()), ("reward", pa.float64())])
_NAMED_NUMBER = pa.struct([("name", pa.string()), ("value", pa.float64())])
_SEGMENT = pa.struct(
    [
        ("parent", pa.int32()),
        ("token_ids", _list(pa.int32())),
        ("is_sampled", pa.bool_()),
        ("turn", pa.int32()),
        ("logprobs", _list(pa.float32())),
        ("trainer_logprobs", _list(pa.float32())),
        ("advantages", _list(pa.float32())),
        ("importance_weights", _list(pa.float32())),
        ("policy_version", pa.int64()),
        ("finish_reason", pa.string()),
        ("stop_json", pa.string()),
        ("sampling_json", pa.string()),
        ("messages_json", pa.string()),
        ("reason", pa.string()),
        ("reward", pa.float64()),
        ("fingerprint", pa.string()),
        ("routed_experts", _ARRAY),
        ("boundary_routes", _ARRAY),
        ("support_ids", _list(pa.int32())),
        ("support_sizes", _list(pa.int32())),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("group", pa.int32()),
        ("task_id", pa.string()),
        ("task_source", pa.string()),
        ("task_payload_json", pa.string()),
        ("id", pa.string()),
        ("trajectory_task_id", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("rewards", _list(_LEAF_REWARD)),
        ("reward_parts", _list(_NAMED_NUMBER)),
        ("metrics", _list(_NAMED_NUMBER)),
        ("reward", pa.float64()),
        ("num_turns", pa.int32()),
        ("num_tokens", pa.int64()),
        ("num_sampled_tokens", pa.int64()),
        ("max_abs_logprob_diff", pa.float32()),
        ("segments", _list(_SEGMENT)),
    ],
    metadata={"lockstep.trajectories": str(SCHEMA_VERSION)},
)
"""Columns whose name ends in `_json` hold JSON in ASCII: model output may contain anything."""

SUMMARY_COLUMNS = (
    "step", "group", "task_id", "id", "status", "reward", "num_turns", "num_tokens",
    "num_sampled_tokens", "max_abs_logprob_diff",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryRecord:
    """One stored trajectory, with what the trainer computed for its tokens."""

    step: int
    group: int
    """Index of its group in the step."""
    task: Task
    trajectory: Trajectory
    trainer_logprobs: tuple[Float32Array | None, ...] = ()
    """Per segment: [T] float32, the trainer's log-probs before the update, of a sampled segment
    that was trained. None for every other."""
    advantages: tuple[Float32Array | None, ...] = ()
    """Per segment: [T] float32, likewise."""
    importance_weights: tuple[Float32Array | None, ...] = ()
    """Per segment: [T] float32, likewise: what a correction multiplied each token's loss by, 0
    where it was rejected. None where nothing was corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """What can be said of a stored trajectory without reading its tokens."""

    step: int
    group: int
    task_id: str
    id: str
    status: str
    reward: float
    """Mean over the rewarded leaves; NaN if there is none."""
    num_turns: int
    num_tokens: int
    num_sampled_tokens: int
    max_abs_logprob_diff: float | None
    """Largest |trainer - rollout| log-prob of its tokens; None where nothing was compared."""


@dataclass(slots=True)
class _TrainerValues:
    """What training rows say about one trajectory's segments."""

    logprobs: dict[int, Float32Array] = field(default_factory=dict)
    advantages: dict[int, Float32Array] = field(default_factory=dict)
    importance_weights: dict[int, Float32Array] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_part(
    path: Path, groups: Sequence[Group], *, step: int, samples: Iterable[Sample] = ()
) -> None:
    """Writes the groups of one step as one part, atomically.

    samples: training rows made by `Trajectory.rows`. Their `advantages` and the trainer's log-probs
    (`logprobs`, or else `old_logprobs` if the trainer computed them) are cut back into the segments
    that the row trains. A row may have been extended with columns, never with tokens:
    AlignmentError if its length is not its path's.
    """
    by_id = _trainer_values(groups, samples)
    rows = [
        (group_index, group.task, trajectory, by_id.get(trajectory.id, _TrainerValues()))
        for group_index, group in enumerate(groups)
        for trajectory in group.trajectories
    ]
    trajectories = [trajectory for _, _, trajectory, _ in rows]
    tasks = [task for _, task, _, _ in rows]
    columns: dict[str, Any] = {
        "step": [step] * len(rows),
        "group": [index for index, _, _, _ in rows],
        "task_id": [_text(task.id) for task in tasks],
        "task_source": [_text(task.source) for task in tasks],
        "task_payload_json": [json.dumps(dict(task.payload)) for task in tasks],
        "id": [_text(t.id) for t in trajectories],
        "trajectory_task_id": [_text(t.task_id) for t in trajectories],
        "status": [t.status for t in trajectories],
        "error": [_text(t.error) for t in trajectories],
        "rewards": [
            [{"leaf": leaf, "reward": float(reward)} for leaf, reward in t.rewards.items()]
            for t in trajectories
        ],
        "reward_parts": [_named_numbers(t.reward_parts) for t in trajectories],
        "metrics": [_named_numbers(t.metrics) for t in trajectories],
        "reward": [t.reward for t in trajectories],
        "num_turns": [t.num_turns for t in trajectories],
        "num_tokens": [sum(len(s) for s in t.segments) for t in trajectories],
        "num_sampled_tokens": [t.num_sampled_tokens for t in trajectories],
        "max_abs_logprob_diff": [
            _max_abs_diff(trajectory, values.logprobs) for _, _, trajectory, values in rows
        ],
    }
    arrays = [pa.array(columns[name], SCHEMA.field(name).type) for name in columns]
    arrays.append(_segments_column(trajectories, [values for _, _, _, values in rows]))
    table = pa.Table.from_arrays(arrays, schema=SCHEMA)
    write_atomically(
        path,
        lambda file: pq.write_table(
            table, file, compression="zstd", row_group_size=_ROW_GROUP_SIZE
        ),
    )


def _trainer_values(
    groups: Sequence[Group], samples: Iterable[Sample]
) -> dict[str, _TrainerValues]:
    """Cuts the rows' per-token columns back into segments: trajectory id -> values."""
    trajectories: dict[str, Trajectory] = {}
    for group in groups:
        for trajectory in group.trajectories:
            if trajectories.setdefault(trajectory.id, trajectory) is not trajectory:
                raise DataError(
                    f"two trajectories of one step have the id {trajectory.id!r}; training rows "
                    "could not be told apart. Ids must differ within a step."
                )
    out: dict[str, _TrainerValues] = {}
    for sample in samples:
        trajectory_id, _, leaf = sample.id.rpartition("/")
        trajectory = trajectories.get(trajectory_id)
        if trajectory is None or not leaf.isdigit() or int(leaf) >= len(trajectory.segments):
            raise AlignmentError(
                f"training row {sample.id!r} belongs to no trajectory of this step; expected "
                "TRAJECTORY/LEAF, as `Trajectory.rows` names them."
            )
        path = trajectory.path(int(leaf))
        lengths = [len(trajectory.segments[index]) for index in path]
        if sum(lengths) != len(sample):
            raise AlignmentError(
                f"training row {sample.id!r} has {len(sample)} tokens, its path has {sum(lengths)}."
            )
        values = out.setdefault(trajectory_id, _TrainerValues())
        trainer_logprobs = _trainer_logprobs(sample)
        for index, end in zip(path, accumulate(lengths), strict=True):
            segment = trajectory.segments[index]
            tokens = slice(end - len(segment), end)
            # A shared segment stands in several rows; the one that trains it has the last word.
            if not segment.is_sampled or not (
                sample.loss_mask[tokens].any() or index not in values.logprobs
            ):
                continue
            for column, target in (
                (trainer_logprobs, values.logprobs),
                (sample.columns.get("advantages"), values.advantages),
                (sample.columns.get("importance_weights"), values.importance_weights),
            ):
                if column is not None and not np.isnan(column[tokens]).all():
                    target[index] = column[tokens]
    return out


def _trainer_logprobs(sample: Sample) -> Float32Array | None:
    """What the trainer computed for the row; None where it computed nothing.

    Whoever drives the trainer by hand may take the sampler's own numbers for the old policy: the
    column is then the same array, and comparing it with itself would report a mismatch of 0 that
    nobody measured.
    """
    for name in ("logprobs", "old_logprobs"):
        column = sample.columns.get(name)
        if column is not None and column is not sample.columns.get("rollout_logprobs"):
            return column
    return None


def _max_abs_diff(trajectory: Trajectory, trainer: dict[int, Float32Array]) -> float | None:
    gaps = [
        np.abs(values.astype(np.float64) - logprobs.astype(np.float64))
        for index, values in trainer.items()
        if (logprobs := trajectory.segments[index].logprobs) is not None
    ]
    if not gaps:
        return None
    every = np.concatenate(gaps)
    compared = every[~np.isnan(every)]
    return float(compared.max()) if compared.size else None


def _segments_column(
    trajectories: Sequence[Trajectory], values: Sequence[_TrainerValues]
) -> pa.ListArray:
    segments = [segment for t in trajectories for segment in t.segments]
    places = [
        (v, index)
        for t, v in zip(trajectories, values, strict=True)
        for index in range(len(t.segments))
    ]
    trainer = [v.logprobs.get(index) for v, index in places]
    advantages = [v.advantages.get(index) for v, index in places]
    weights = [v.importance_weights.get(index) for v, index in places]
    columns: dict[str, Any] = {
        "parent": [s.parent for s in segments],
        "token_ids": _numbers([s.token_ids for s in segments], pa.int32()),
        "is_sampled": [s.is_sampled for s in segments],
        "turn": [s.turn for s in segments],
        "logprobs": _numbers([s.logprobs for s in segments], pa.float32()),
        "trainer_logprobs": _numbers(trainer, pa.float32()),
        "advantages": _numbers(advantages, pa.float32()),
        "importance_weights": _numbers(weights, pa.float32()),
        "policy_version": [s.policy_version for s in segments],
        "finish_reason": [s.finish_reason for s in segments],
        "stop_json": [None if s.stop is None else json.dumps(s.stop) for s in segments],
        "sampling_json": [
            None if s.sampling is None else _sampling_json(s.sampling) for s in segments
        ],
        "messages_json": [json.dumps([m.to_dict() for m in s.messages]) for s in segments],
        "reason": [_text(s.reason) for s in segments],
        "reward": [s.reward for s in segments],
        "fingerprint": [_text(s.fingerprint) for s in segments],
        "routed_experts": [_array_to_dict(s.routed_experts) for s in segments],
        "boundary_routes": [_array_to_dict(s.boundary_routes) for s in segments],
        "support_ids": _numbers(
            [None if s.support is None else s.support.values for s in segments], pa.int32()
        ),
        "support_sizes": _numbers(
            [None if s.support is None else s.support.sizes for s in segments], pa.int32()
        ),
    }
    struct = pa.StructArray.from_arrays(
        [
            column if isinstance(column, pa.Array) else pa.array(column, _SEGMENT.field(name).type)
            for name, column in columns.items()
        ],
        fields=list(_SEGMENT),
    )
    offsets = [0, *accumulate(len(t.segments) for t in trajectories)]
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), struct, type=_list(_SEGMENT))


def _numbers(arrays: Sequence[npt.NDArray[Any] | None], dtype: pa.DataType) -> pa.ListArray:
    """Ragged rows without a Python object per number; None stays null."""
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([0 if a is None else len(a) for a in arrays], out=offsets[1:])
    present = [a for a in arrays if a is not None]
    flat = np.concatenate(present) if present else np.empty(0)
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(flat.astype(dtype.to_pandas_dtype(), copy=False)),
        mask=pa.array([a is None for a in arrays], pa.bool_()),
        type=_list(dtype),
    )


def _named_numbers(numbers: dict[str, float]) -> list[dict[str, Any]]:
    return [{"name": _text(name), "value": float(value)} for name, value in numbers.items()]


@lru_cache(maxsize=64)  # a step's segments share a handful
def _sampling_json(sampling: SamplingParams) -> str:
    return json.dumps(dataclasses.asdict(sampling))


def _text(text: str) -> str:
    """Half of a surrogate pair, which a broken decoder can leave in an error text, has no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _array_to_dict(array: npt.NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    return {"dtype": array.dtype.str, "shape": list(array.shape), "bytes": array.tobytes()}


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def read_part(path: Path) -> Iterator[TrajectoryRecord]:
    """The trajectories of one part, in the order written, a few at a time."""
    with _open(path) as part:
        for rows in _read(path, part):
            yield from map(_record, rows)


def read_summaries(path: Path) -> list[TrajectorySummary]:
    """The summary columns of one part, in the order written."""
    with _open(path) as part:
        rows = part.read(columns=list(SUMMARY_COLUMNS), use_threads=False).to_pylist()
    return [TrajectorySummary(**row) for row in rows]


def read_row(path: Path, index: int) -> TrajectoryRecord:
    """The trajectory at `index` of one part; reads only its neighbourhood."""
    with _open(path) as part:
        group, offset = divmod(index, _ROW_GROUP_SIZE)
        table = part.read_row_group(group, use_threads=False)
    return _record(table.slice(offset, 1).to_pylist()[0])


def to_groups(records: Iterable[TrajectoryRecord]) -> list[Group]:
    """Trajectories of one step, put together again as they were sampled."""
    groups: dict[int, Group] = {}
    for record in records:
        group = groups.setdefault(record.group, Group(task=record.task, trajectories=[]))
        group.trajectories.append(record.trajectory)
    return list(groups.values())


def _read(path: Path, part: pq.ParquetFile) -> Iterator[list[dict[str, Any]]]:
    try:
        for batch in part.iter_batches(batch_size=_ROW_GROUP_SIZE, use_threads=False):
            yield batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: the part was damaged on its way ({error}).") from error


def _open(path: Path) -> pq.ParquetFile:
    try:
        part = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable trajectory part ({error}).") from error
    version = (part.schema_arrow.metadata or {}).get(b"lockstep.trajectories")
    if version is None or int(version) > SCHEMA_VERSION:
        part.close()
        found = "none" if version is None else version.decode()
        raise DataError(
            f"{path}: its schema version is {found}; this version of Lockstep reads up to "
            f"{SCHEMA_VERSION}. Read it with the version that wrote it."
        )
    return part


def _record(row: dict[str, Any]) -> TrajectoryRecord:
    where = f"trajectory {row['id']}"
    return TrajectoryRecord(
        step=row["step"],
        group=row["group"],
        task=Task(
            id=row["task_id"],
            payload=json.loads(row["task_payload_json"]),
            source=row["task_source"],
        ),
        trajectory=Trajectory(
            id=row["id"],
            task_id=row["trajectory_task_id"],
            segments=[_segment(s, f"{where}, segment {i}") for i, s in enumerate(row["segments"])],
            rewards={entry["leaf"]: entry["reward"] for entry in row["rewards"]},
            reward_parts={entry["name"]: entry["value"] for entry in row["reward_parts"]},
            status=row["status"],
            error=row["error"],
            metrics={entry["name"]: entry["value"] for entry in row["metrics"]},
        ),
        trainer_logprobs=tuple(_floats(s["trainer_logprobs"]) for s in row["segments"]),
        advantages=tuple(_floats(s["advantages"]) for s in row["segments"]),
        importance_weights=tuple(_floats(s.get("importance_weights")) for s in row["segments"]),
    )


def _segment(row: dict[str, Any], where: str) -> Segment:
    return Segment(
        parent=row["parent"],
        token_ids=frozen_ids(row["token_ids"], where=where),
        is_sampled=row["is_sampled"],
        turn=row["turn"],
        logprobs=_floats(row["logprobs"]),
        policy_version=row["policy_version"],
        finish_reason=row["finish_reason"],
        stop=None if row["stop_json"] is None else json.loads(row["stop_json"]),
        sampling=None if row["sampling_json"] is None else _sampling(row["sampling_json"]),
        messages=tuple(Message.from_dict(m) for m in json.loads(row["messages_json"])),
        reason=row["reason"],
        reward=row["reward"],
        fingerprint=row["fingerprint"],
        routed_experts=_array_from_dict(row["routed_experts"]),
        boundary_routes=_array_from_dict(row["boundary_routes"]),
        support=_support(row, where),
    )


def _support(row: dict[str, Any], where: str) -> Ragged | None:
    if row.get("support_sizes") is None:  # parts of version 1 have no support
        return None
    return Ragged.of_sizes(frozen_ids(row["support_ids"], where=where), row["support_sizes"])


def _sampling(text: str) -> SamplingParams:
    values: dict[str, Any] = json.loads(text)
    # JSON has no tuples.
    values.update((name, tuple(v)) for name, v in values.items() if isinstance(v, list))
    return SamplingParams(**values)


def _floats(values: list[float] | None) -> Float32Array | None:
    if values is None:
        return None
    array = np.array(values, dtype=np.float32)
    array.setflags(write=False)
    return array


def _array_from_dict(source: dict[str, Any] | None) -> npt.NDArray[Any] | None:
    if source is None:
        return None
    flat = np.frombuffer(source["bytes"], dtype=np.dtype(source["dtype"]))
    return flat.reshape(source["shape"])
