"""Trajectories as columns: one Parquet part per step, one row per trajectory, segments nested.

A part holds what cannot be derived (ids, log-probs, versions, messages, rewards) and a few summary
columns that can, so that a browser may sort thousands of trajectories without reading their tokens.
Only each segment's own ids are stored, never a path: a forest of n turns costs n turns.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.errors import AlignmentError, DataError, LockstepError
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

SCHEMA_VERSION = 4
"""Written into every part. A reader refuses a part that is newer than itself."""

# Rows that are read together when one trajectory is looked up.
_ROW_GROUP_SIZE = 32

_log = logging.getLogger(__name__)
TRAINED = ("trainer_logprobs", "advantages", "importance_weights")
"""Columns of a segment that come from the training rows."""

Address = tuple[Path, int]
"""Place of one stored trajectory: a part, and the index of its row."""
Values = Mapping[str, Float32Array | None]
"""Trained column -> [T] float32 of one segment."""


def _list(value: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("item", value))


_INTS, _FLOATS = _list(pa.int32()), _list(pa.float32())
_ARRAY = pa.struct([("dtype", pa.string()), ("shape", _INTS), ("bytes", pa.binary())])
_LEAF_REWARD = pa.struct([("leaf", pa.int32()), ("reward", pa.float64())])
_NAMED_NUMBERS = _list(pa.struct([("name", pa.string()), ("value", pa.float64())]))

_SEGMENT_COLUMNS: tuple[tuple[str, pa.DataType, Callable[[Segment, Values], Any]], ...] = (
    ("parent", pa.int32(), lambda s, _: s.parent),
    ("token_ids", _INTS, lambda s, _: s.token_ids),
    ("is_sampled", pa.bool_(), lambda s, _: s.is_sampled),
    ("turn", pa.int32(), lambda s, _: s.turn),
    ("logprobs", _FLOATS, lambda s, _: s.logprobs),
    *((name, _FLOATS, lambda _, trained, name=name: trained[name]) for name in TRAINED),
    ("policy_version", pa.int64(), lambda s, _: s.policy_version),
    ("finish_reason", pa.string(), lambda s, _: s.finish_reason),
    ("stop_json", pa.string(), lambda s, _: None if s.stop is None else json.dumps(s.stop)),
    ("sampling_json", pa.string(), lambda s, _: _sampling_json(s.sampling)),
    ("messages_json", pa.string(), lambda s, _: json.dumps([m.to_dict() for m in s.messages])),
    ("reason", pa.string(), lambda s, _: _text(s.reason)),
    ("reward", pa.float64(), lambda s, _: s.reward),
    ("fingerprint", pa.string(), lambda s, _: _text(s.fingerprint)),
    ("routed_experts", _ARRAY, lambda s, _: _array_to_dict(s.routed_experts)),
    ("boundary_routes", _ARRAY, lambda s, _: _array_to_dict(s.boundary_routes)),
    ("support_ids", _INTS, lambda s, _: None if s.support is None else s.support.values),
    ("support_sizes", _INTS, lambda s, _: None if s.support is None else s.support.sizes),
)
_AS_STORED = (
    *("parent", "is_sampled", "turn", "policy_version", "finish_reason"),
    *("reason", "reward", "fingerprint"),
)
"""Fields of a segment whose columns hold their values as they are."""
_SEGMENT = pa.struct([(name, dtype) for name, dtype, _ in _SEGMENT_COLUMNS])

_COLUMNS: tuple[tuple[str, pa.DataType, Callable[[TrajectoryRecord], Any]], ...] = (
    ("step", pa.int32(), lambda r: r.step),
    ("group", pa.int32(), lambda r: r.group),
    ("task_id", pa.string(), lambda r: _text(r.task.id)),
    ("task_source", pa.string(), lambda r: _text(r.task.source)),
    ("task_payload_json", pa.string(), lambda r: json.dumps(dict(r.task.payload))),
    ("id", pa.string(), lambda r: _text(r.trajectory.id)),
    ("trajectory_task_id", pa.string(), lambda r: _text(r.trajectory.task_id)),
    ("seat", pa.string(), lambda r: _text(r.trajectory.seat)),
    ("policy", pa.string(), lambda r: _text(r.trajectory.policy)),
    ("status", pa.string(), lambda r: r.trajectory.status),
    ("error", pa.string(), lambda r: _text(r.trajectory.error)),
    ("rewards", _list(_LEAF_REWARD), lambda r: list(r.trajectory.rewards.items())),
    ("reward_parts", _NAMED_NUMBERS, lambda r: _named_numbers(r.trajectory.reward_parts)),
    ("metrics", _NAMED_NUMBERS, lambda r: _named_numbers(r.trajectory.metrics)),
    ("reward", pa.float64(), lambda r: r.trajectory.reward),
    ("num_turns", pa.int32(), lambda r: r.trajectory.num_turns),
    ("num_tokens", pa.int64(), lambda r: sum(len(s) for s in r.trajectory.segments)),
    ("num_sampled_tokens", pa.int64(), lambda r: r.trajectory.num_sampled_tokens),
    ("max_abs_logprob_diff", pa.float32(), lambda r: _max_abs_diff(r)),
)
SCHEMA = pa.schema(
    [*((name, dtype) for name, dtype, _ in _COLUMNS), ("segments", _list(_SEGMENT))],
    metadata={"lockstep.trajectories": str(SCHEMA_VERSION)},
)
"""Columns whose name ends in `_json` hold JSON in ASCII: model output may contain anything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TrajectoryRecord:
    """One stored trajectory, with what the trainer computed for its tokens."""

    step: int
    group: int
    """Index of its group in the step."""
    task: Task
    trajectory: Trajectory
    trainer_logprobs: Sequence[Float32Array | None] = ()
    """Per segment: [T] float32, the trainer's log-probs before the update, of a sampled segment
    that was trained. None for every other."""
    advantages: Sequence[Float32Array | None] = ()
    """Per segment: [T] float32 in the same places."""
    importance_weights: Sequence[Float32Array | None] = ()
    """Per segment: [T] float32, the correction's factor on each token's loss, 0 where it was
    rejected; None where nothing was corrected."""

    def __repr__(self) -> str:
        return f"TrajectoryRecord(step {self.step}, group {self.group}, {self.trajectory!r})"

    def _repr_html_(self) -> str:
        return self.trajectory._repr_html_()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """The columns of a stored trajectory that are read without its tokens."""

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
    split: str
    """"train", or the name of an evaluation."""
    address: Address
    """Its place, for `read_row`."""


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_part(
    path: Path, groups: Sequence[Group], *, step: int, samples: Iterable[Sample] = ()
) -> None:
    """Writes the groups of one step as one part, atomically.

    samples: training rows made by `Trajectory.rows`. Their `advantages`, weights and the trainer's
    log-probs (`logprobs`, or else `old_logprobs` if the trainer computed them) are cut back into
    the segments that the row trains. A row may have been extended with columns, never with tokens:
    AlignmentError if its length is not its path's.
    """
    trained = _trained_values(groups, samples)
    records = [
        TrajectoryRecord(step=step, group=at, task=group.task, trajectory=t, **trained[t.id])
        for at, group in enumerate(groups)
        for t in group.trajectories
    ]
    table = pa.Table.from_pylist([_columns(record) for record in records], schema=SCHEMA)
    options = {"compression": "zstd", "row_group_size": _ROW_GROUP_SIZE}
    write_atomically(path, partial(pq.write_table, table, write_page_checksum=True, **options))


def _columns(record: TrajectoryRecord) -> dict[str, Any]:
    segments: list[dict[str, Any]] = []
    for index, segment in enumerate(record.trajectory.segments):
        trained: Values = {name: getattr(record, name)[index] for name in TRAINED}
        segments.append({name: get(segment, trained) for name, _, get in _SEGMENT_COLUMNS})
    return {**{name: get(record) for name, _, get in _COLUMNS}, "segments": segments}


def _trained_values(
    groups: Sequence[Group], samples: Iterable[Sample]
) -> dict[str, dict[str, list[Float32Array | None]]]:
    """Cuts the rows' per-token columns back: trajectory id -> column -> values per segment."""
    trajectories: dict[str, Trajectory] = {}
    for trajectory in (t for group in groups for t in group.trajectories):
        if trajectories.setdefault(trajectory.id, trajectory) is not trajectory:
            raise DataError(
                f"two trajectories of one step have the id {trajectory.id!r}; training rows could "
                "not be told apart. Ids must differ within a step."
            )
    out: dict[str, dict[str, list[Float32Array | None]]] = {
        t.id: {name: [None] * len(t.segments) for name in TRAINED} for t in trajectories.values()
    }
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
        columns = {**sample.columns, "trainer_logprobs": trainer_logprobs(sample)}
        for index, end in zip(path, accumulate(lengths), strict=True):
            segment, values = trajectory.segments[index], out[trajectory_id]
            tokens = slice(end - len(segment), end)
            # Several rows may share a segment; the row that trains it overrides the others.
            is_first = values["trainer_logprobs"][index] is None
            if not segment.is_sampled or not (sample.loss_mask[tokens].any() or is_first):
                continue
            for name in TRAINED:
                column = columns.get(name)
                if column is not None and not np.isnan(column[tokens]).all():
                    values[name][index] = column[tokens]
    return out


def trainer_logprobs(sample: Sample) -> Float32Array | None:
    """[T] the trainer's log-probs of the row before its update; None if it did not score the row.

    A loop of your own may use the sampler's log-probs as the old policy's. The column is then the
    same array, and comparing it with itself would report a mismatch of 0 that nobody measured.
    """
    rollout = sample.columns.get("rollout_logprobs")
    columns = (sample.columns.get(name) for name in ("logprobs", "old_logprobs"))
    return next((c for c in columns if c is not None and c is not rollout), None)


def _max_abs_diff(record: TrajectoryRecord) -> float | None:
    """Largest |trainer - rollout| log-prob of a trajectory; None where nothing was compared."""
    gaps: list[float] = []
    for trainer, segment in zip(record.trainer_logprobs, record.trajectory.segments, strict=True):
        rollout = segment.logprobs
        if trainer is not None and rollout is not None:
            gap = np.abs(trainer.astype(np.float64) - rollout)
            gaps += gap[~np.isnan(gap)].tolist()
    return max(gaps, default=None)


def _named_numbers(numbers: dict[str, float]) -> list[tuple[str, float]]:
    return [(_text(name), float(value)) for name, value in numbers.items()]


@lru_cache(maxsize=64)  # a step's segments share a handful
def _sampling_json(sampling: SamplingParams | None) -> str | None:
    return None if sampling is None else json.dumps(dataclasses.asdict(sampling))


def _text(text: str) -> str:
    """Escapes halves of surrogate pairs: a broken decoder can leave them in an error text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _array_to_dict(array: npt.NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    return {"dtype": array.dtype.str, "shape": list(array.shape), "bytes": array.tobytes()}


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def read_part(path: Path) -> Iterator[TrajectoryRecord]:
    """The trajectories of one part, in the order written, a few at a time. One that cannot be read
    is left out with a warning that names it."""
    with _open(path) as part:
        num_left = part.metadata.num_rows
        for batch in part.iter_batches(batch_size=_ROW_GROUP_SIZE, use_threads=False):
            for row in batch.to_pylist():
                index = part.metadata.num_rows - num_left
                num_left -= 1
                try:
                    record = _record(row, f"{path}, row {index}")
                except DataError as error:
                    _log.warning("%s It is left out.", error)
                else:
                    yield record
        if num_left:  # the header of a page, which has no checksum, says that it is empty
            raise ValueError(f"{num_left} of its {part.metadata.num_rows} rows are missing")


def read_summaries(path: Path, *, split: str = "train") -> list[TrajectorySummary]:
    """The summary columns of one part, in the order written."""
    fields = (field.name for field in dataclasses.fields(TrajectorySummary))
    columns = [name for name in fields if name in SCHEMA.names]
    with _open(path) as part:
        rows = part.read(columns=columns, use_threads=False).to_pylist()
    return [TrajectorySummary(**row, split=split, address=(path, n)) for n, row in enumerate(rows)]


def find_text(path: Path, text: str) -> tuple[list[int], int]:
    """(indices of the rows that hold `text`, number of rows) of one part. Searched are ids, task,
    error, and the messages with their thoughts and calls; upper and lower case are one."""
    text = text.lower()
    names = ("id", "task_id", "task_payload_json", "error")
    with _open(path) as part:
        table = part.read(columns=[*names, _MESSAGES_PATH], use_threads=False)
    # JSON writes such a text as it is: most rows are passed over without being parsed.
    is_plain = json.dumps(text)[1:-1] == text
    found: list[int] = []
    for index, row in enumerate(table.to_pylist()):
        written = [segment["messages_json"] for segment in row.pop("segments")]
        said: list[str] = [row[name] for name in names]
        for messages in written:
            if not is_plain or text in messages.lower():
                said += _texts(json.loads(messages))
        if any(text in each.lower() for each in said):
            found.append(index)
    return found, table.num_rows


_MESSAGES_PATH = "segments.list.element.messages_json"


def _texts(said: Any) -> Iterator[str]:
    """The texts of stored messages, also of messages that are no longer valid."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, list):
        for each in said:
            yield from _texts(each)
    elif isinstance(said, dict):
        for name, each in said.items():
            if name not in ("role", "type", "id", "tool_call_id"):
                yield from _texts(each)


def read_row(path: Path, index: int) -> TrajectoryRecord:
    """The trajectory at `index` of one part; reads only its neighbourhood."""
    with _open(path) as part:
        group, offset = divmod(index, _ROW_GROUP_SIZE)
        table = part.read_row_group(group, use_threads=False)
        return _record(table.slice(offset, 1).to_pylist()[0], f"{path}, row {index}")


def to_groups(records: Iterable[TrajectoryRecord]) -> list[Group]:
    """Trajectories of one step, put together again as they were sampled."""
    groups: dict[int, Group] = {}
    for record in records:
        group = groups.setdefault(record.group, Group(task=record.task, trajectories=[]))
        group.trajectories.append(record.trajectory)
    return list(groups.values())


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    """Opens a part. Raises DataError, also while it is read, if the file is damaged."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as part:
            found = (part.schema_arrow.metadata or {}).get(b"lockstep.trajectories", b"none")
            version = found.decode()
            if version == "none" or int(version) > SCHEMA_VERSION:
                raise DataError(
                    f"{path}: its schema version is {version}; this version of Lockstep reads up "
                    f"to {SCHEMA_VERSION}. Read it with the version that wrote it."
                )
            if int(version) == SCHEMA_VERSION and not part.schema_arrow.equals(SCHEMA):
                raise ValueError(f"other columns than those of version {version}")
            yield part
    except LockstepError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"{path}: the part is damaged ({str(error).rstrip('.')}). Restore the file, or move it "
            "away to read the others."
        ) from error


def _record(row: dict[str, Any], where: str) -> TrajectoryRecord:
    where, segments = f"{where}, trajectory {row['id']}", row["segments"]
    try:
        payload = json.loads(row["task_payload_json"])
        trajectory = Trajectory(
            id=row["id"],
            task_id=row["trajectory_task_id"],
            seat=row.get("seat", ""),  # parts up to version 3 have no seats
            policy=row.get("policy", ""),
            segments=[_segment(s, f"{where}, segment {i}") for i, s in enumerate(segments)],
            rewards={entry["leaf"]: entry["reward"] for entry in row["rewards"]},
            reward_parts={entry["name"]: entry["value"] for entry in row["reward_parts"]},
            status=row["status"],
            error=row["error"],
            metrics={entry["name"]: entry["value"] for entry in row["metrics"]},
        )
        return TrajectoryRecord(
            step=row["step"],
            group=row["group"],
            task=Task(id=row["task_id"], payload=payload, source=row["task_source"]),
            trajectory=trajectory,
            **{name: [_floats(s.get(name)) for s in segments] for name in TRAINED},
        )
    except (LockstepError, ValueError, TypeError, LookupError) as error:
        raise DataError(f"{where}: cannot be read: {str(error).rstrip('.')}.") from error


def _segment(row: dict[str, Any], where: str) -> Segment:
    return Segment(
        **{name: row[name] for name in _AS_STORED},
        token_ids=frozen_ids(row["token_ids"], where=where),
        logprobs=_floats(row["logprobs"]),
        stop=json.loads(row["stop_json"] or "null"),
        sampling=None if row["sampling_json"] is None else _sampling(row["sampling_json"]),
        messages=tuple(Message.from_dict(m) for m in json.loads(row["messages_json"])),
        routed_experts=_array_from_dict(row["routed_experts"]),
        boundary_routes=_array_from_dict(row["boundary_routes"]),
        support=_support(row),
    )


def _support(row: dict[str, Any]) -> Ragged | None:
    if row.get("support_sizes") is None:  # parts of version 1 have no support
        return None
    return Ragged.of_sizes(np.array(row["support_ids"], np.int32), row["support_sizes"])


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
    return np.frombuffer(source["bytes"], source["dtype"]).reshape(source["shape"])
