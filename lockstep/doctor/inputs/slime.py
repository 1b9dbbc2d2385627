"""slime and miles: the rollouts and the training batches that they save for debugging.

    --save-debug-rollout-data DIR/{rollout_id}.pt    sampled rows
    --save-debug-train-data DIR/{rollout_id}.pt      the same with the trainer's log-probs
    --dump-details DIR                               both, in DIR/rollout_data and DIR/train_data

Field names as in slime's main branch of November 2026 (utils/types.py,
observability/rollout_data_utils.py and train_data_utils.py) and miles' (utils/train_dump_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    Values,
    array_of,
    ids_of,
    numbers,
    picked,
    row_name,
    whole,
)
from lockstep.doctor.inputs.base import HOW_TO_GET_OF
from lockstep.doctor.inputs.lines import FileDump
from lockstep.doctor.inputs.pickles import is_torch_file, read_torch
from lockstep.doctor.rows import BoolArray
from lockstep.errors import DataError

_FOLDERS = ("train_data", "rollout_data")
"""Directories that --dump-details writes; the first has more columns."""


class SlimeDump(FileDump):
    """A `.pt` file of slime or miles, or a directory of them.

    In a directory, files of evaluations are left out: they are never trained. A directory with
    train_data/ and rollout_data/ is read from the first.
    """

    format: ClassVar[str] = "slime"
    patterns: ClassVar[tuple[str, ...]] = ("*.pt",)
    suffixes: ClassVar[tuple[str, ...]] = (".pt", ".pth")
    why: ClassVar[Mapping[str, str]] = HOW_TO_GET_OF["slime"]

    @classmethod
    def files_of(cls, path: Path) -> list[Path]:
        if path.is_file() and not path.suffix:
            return [path]
        folder = next((path / name for name in _FOLDERS if (path / name).is_dir()), path)
        return [file for file in super().files_of(folder) if not file.name.startswith("eval_")]

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return is_torch_file(path)

    def rows_in(self, path: Path) -> Iterator[Row]:
        yield from _rows(read_torch(path), path)

    def rows(self) -> Iterator[Row]:
        read = ((read_torch(path), path) for path in self.files)
        for (_, is_shard), group in groupby(read, lambda pair: _batch_of(pair[0])):
            rows = (row for content, path in group for row in _rows(content, path))
            if not is_shard:
                yield from rows
                continue
            # Every rank saved its share: tensor-parallel ranks the same rows, and only the last
            # pipeline stage the trainer's log-probs. The row with the most columns is kept.
            kept: dict[str, Row] = {}
            for row in rows:
                other = kept.get(row.row_id)
                if other is None or len(row.columns) > len(other.columns):
                    kept[row.row_id] = row
            yield from kept.values()


def live_rows(batch: Any, index: Sequence[int], *, step: int, rank: int) -> Iterator[Row]:
    """The rows `index` of a list of samples, or of one rank's `rollout_data`."""
    content: dict[str, Any] = {"rollout_id": step, "rank": rank}
    if isinstance(batch, Mapping):
        raw = {"raw_reward": batch.get("raw_reward")}  # of the whole batch, not of the rank
        content["rollout_data"] = picked({"partition": _places(batch, rank), **batch}, index) | raw
    else:
        samples = [batch[i] for i in index]
        samples = [s.to_dict() if hasattr(s, "to_dict") else dict(s) for s in samples]
        content["samples"] = [
            {name: array_of(value) for name, value in sample.items()} | {"rollout_position": i}
            for i, sample in zip(index, samples, strict=True)
        ]
    return _rows(content, f"the batch of step {step}")


def _batch_of(content: Any) -> tuple[Any, bool]:
    """(the rollout, whether the file is the share of one rank)."""
    if not isinstance(content, dict):
        return None, False
    return content.get("rollout_id"), "rollout_data" in content


def _rows(content: Any, path: object) -> Iterator[Row]:
    samples = _samples(content) if isinstance(content, dict) else None
    if samples is None:
        raise DataError(
            f"{path} is a file of torch.save without `samples` or `rollout_data`: it was not "
            "written by slime's or miles' --save-debug-rollout-data or --save-debug-train-data."
        )
    step, raw = whole(content.get("rollout_id")), content.get("raw_reward")
    for number, sample in enumerate(samples):
        where = f"{path}: sample {number}"
        if not isinstance(sample, dict) or "tokens" not in sample:
            raise DataError(f"{where}: expected a dict with `tokens`, as Sample.to_dict() makes.")
        at = sample.get("rollout_position", number)
        if isinstance(raw, list) and isinstance(at, int) and 0 <= at < len(raw):
            sample.setdefault("reward", raw[at])  # before it was normalised
        yield _row(sample, step, at, where)


def _samples(content: dict[str, Any]) -> list[Any] | None:
    """The samples of a file, each a dict by slime's names; None for any other content."""
    shard = content.get("rollout_data")
    if isinstance(content.get("samples"), list):
        return content["samples"]
    if not isinstance(shard, dict) or not isinstance(shard.get("tokens"), list):
        return None
    # The share of one rank: field -> list over samples; partition: places in the whole batch.
    size = len(shard["tokens"])
    content["raw_reward"] = shard.get("raw_reward")
    lists = {n: v for n, v in shard.items() if isinstance(v, list | range) and len(v) == size}
    places = lists.get("partition", _places(lists, content.get("rank")))
    return [
        {name: values[i] for name, values in lists.items()} | {"rollout_position": places[i]}
        for i in range(size)
    ]


def _places(shard: Mapping[str, Any], rank: Any) -> list[str]:
    return [f"rank{rank}/{i}" for i in range(len(shard["tokens"]))]


def _row(sample: Mapping[str, Any], step: int | None, name: Any, where: str) -> Row:
    ids = ids_of(sample["tokens"], f"{where}: tokens")
    size = len(ids)
    length = whole(sample.get("response_length", sample.get("response_lengths")))
    if length is None or length < 0:
        raise DataError(f"{where}: response_length must be a whole number from 0.")
    kept = np.broadcast_to(np.True_, (length,))  # takes no memory, however long it is said to be
    values = Values(source=sample, where=where, size=size, kept=kept)
    mask = values.mask("loss_mask", "loss_masks")
    if mask is None:  # slime trains the whole response then
        mask = np.arange(size) >= size - length
    text, reward = sample.get("response"), sample.get("reward")
    if isinstance(reward, dict) and len(reward) == 1:
        reward = next(iter(reward.values()))
    return Row.of(
        row_id=row_name(step, name),
        token_ids=ids,
        loss_mask=mask & (not sample.get("remove_sample")),
        prompt_lengths=size - length,
        rollout_logprobs=values.floats("rollout_log_probs"),
        trainer_logprobs=values.floats("log_probs"),
        advantages=values.floats("advantages"),
        policy_version=_versions(sample.get("weight_versions"), mask),
        routed_experts=_routes(numbers(sample.get("rollout_routed_experts")), size, where),
        texts=text if isinstance(text, str) and text else None,
        rewards=reward,
        groups=sample.get("group_index"),
        steps=step,
    )


def _routes(routes: Array | None, size: int, where: str) -> Array | None:
    """[T, L, K], -1 at the last token."""
    if routes is None or routes.ndim != 3:
        return None
    if len(routes) not in (size - 1, size):
        found = f"rollout_routed_experts has {len(routes)} positions"
        raise DataError(f"{where}: {found}; {size} tokens need {size - 1}.")
    out = np.full((size, *routes.shape[1:]), -1, np.int16)
    out[: len(routes)] = routes
    return out


def _versions(versions: Any, mask: BoolArray) -> Array | None:
    """[T] int32 version of the weights of each turn, -1 elsewhere; None if the file does not say
    which turn has which. versions: one text per request, as the engine numbers them."""
    if not isinstance(versions, list) or not versions:
        return None
    if not all(re.fullmatch("[0-9]{1,9}", str(version)) for version in versions):
        return None
    known = list(map(int, versions))
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    if len(set(known)) == 1:
        known = known[:1] * int(begins.sum())
    if len(known) != begins.sum():
        return None
    return np.where(mask, np.array([*known, -1])[np.cumsum(begins) - 1], -1).astype(np.int32)
