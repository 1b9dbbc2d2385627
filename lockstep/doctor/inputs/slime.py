"""slime and miles: the rollouts and the training batches that they save for debugging.

    --save-debug-rollout-data DIR/{rollout_id}.pt    what was sampled
    --save-debug-train-data DIR/{rollout_id}.pt      the same with the trainer's log-probs
    --dump-details DIR                               both, in DIR/rollout_data and DIR/train_data

Field names as in slime's main branch of November 2026 (utils/types.py,
observability/rollout_data_utils.py and train_data_utils.py) and miles' (utils/train_dump_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    columns_of,
    ids_of,
    in_chunks,
    of_response,
    real,
    whole,
)
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.inputs.pickles import is_torch_file, numbers, read_torch
from lockstep.errors import DataError

_FOLDERS = ("train_data", "rollout_data")
"""That --dump-details makes, the more telling one first."""


class SlimeDump(Dump):
    """A `.pt` file of slime or miles, or a directory of them.

    Each file is read whole, one after the other. In a directory those of evaluations are left out,
    which nothing was trained on; where it holds train_data/ and rollout_data/, the first is read.
    """

    format: ClassVar[str] = "slime"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _files(path)
        if not self._files:
            raise DataError(
                f"{path}: no .pt file of a training rollout is in it. Expected what slime's or "
                "miles' --save-debug-rollout-data or --save-debug-train-data wrote."
            )
        head = next(self._batches())
        if not head:
            raise DataError(f"{self._files[0]} has 0 samples: there is nothing to look at.")
        self._has = columns_of(head)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = _files(path)
        return bool(files) and is_torch_file(files[0])

    @property
    def facts(self) -> Facts:
        return Facts(trainer="slime", is_moe=True if "routed_experts" in self._has else None)

    @property
    def has(self) -> frozenset[str]:
        return self._has

    @property
    def lacks(self) -> Mapping[str, str]:
        why = {
            "rollout_logprobs": "the samples have no rollout_log_probs: a custom generate function "
            "must set them from meta_info.output_token_logprobs.",
            "trainer_logprobs": "the trainer's log-probs are in what --save-debug-train-data "
            "writes, unless --use-rollout-logprobs leaves them out.",
            "advantages": "they are in what --save-debug-train-data writes.",
            "routed_experts": "--use-rollout-routing-replay records the sampler's experts.",
            "policy_version": "weight_versions are in what --save-debug-rollout-data writes; they "
            "are given to tokens only if each turn has one, or all are the same number.",
            "texts": "the response as text is in what --save-debug-rollout-data writes.",
            "messages": "slime keeps no parsed messages.",
        }
        return {name: reason for name, reason in why.items() if name not in self.has}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        rows = (row for batch in self._batches() for row in batch)
        return in_chunks(rows, self.has, max_tokens=max_tokens)

    def _batches(self) -> Iterator[list[Row]]:
        """The rows of each file, or of all ranks' files of one rollout."""
        read = ((read_torch(path), path) for path in self._files)
        for (_, is_shard), group in groupby(read, lambda pair: _batch_of(pair[0])):
            if not is_shard:
                for content, path in group:
                    yield _rows(content, path)
                continue
            # Every rank saved its share: tensor-parallel ones the same, and only those of the last
            # pipeline stage with the trainer's log-probs.
            kept: dict[str, Row] = {}
            for content, path in group:
                for row in _rows(content, path):
                    other = kept.get(row.row_id)
                    if other is None or len(row.columns) > len(other.columns):
                        kept[row.row_id] = row
            yield list(kept.values())


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in (".pt", ".pth", "") else []
    folder = next((path / name for name in _FOLDERS if (path / name).is_dir()), path)
    files = [p for p in folder.glob("*.pt") if not p.name.startswith("eval_")]
    return sorted(files, key=lambda p: ([int(n) for n in re.findall(r"[0-9]+", p.stem)], p.name))


def _batch_of(content: Any) -> tuple[Any, bool]:
    """(the rollout, whether the file is one rank's share of it)."""
    if not isinstance(content, dict):
        return None, False
    return content.get("rollout_id"), "rollout_data" in content


def _rows(content: Any, path: Path) -> list[Row]:
    samples = _samples(content)
    if samples is None:
        raise DataError(
            f"{path} is a file of torch.save without `samples` or `rollout_data`: it was not "
            "written by slime's or miles' --save-debug-rollout-data or --save-debug-train-data."
        )
    step = whole(content.get("rollout_id"))
    rows: list[Row] = []
    for number, sample in enumerate(samples):
        where = f"{path}: sample {number}"
        if not isinstance(sample, dict) or "tokens" not in sample:
            raise DataError(f"{where}: expected a dict with `tokens`, as Sample.to_dict() makes.")
        rows.append(_row(sample, step, sample.get("rollout_position", number), where))
    return rows


def _samples(content: Any) -> list[Any] | None:
    """The samples of a file, each a dict by slime's names; None if it is of something else."""
    if not isinstance(content, dict):
        return None
    samples = content.get("samples")
    shard = content.get("rollout_data")
    if isinstance(samples, list):
        raw = content.get("raw_reward")
    elif isinstance(shard, dict) and isinstance(shard.get("tokens"), list):
        # One rank's share: field -> list over samples; partition: their places in the whole batch.
        size = len(shard["tokens"])
        lists = {n: v for n, v in shard.items() if isinstance(v, list | range) and len(v) == size}
        samples = [{name: values[i] for name, values in lists.items()} for i in range(size)]
        for number, sample in enumerate(samples):
            rank = content.get("rank")
            sample["rollout_position"] = sample.get("partition", f"rank{rank}/{number}")
        raw = shard.get("raw_reward")
    else:
        return None
    if isinstance(raw, list):  # of the whole batch, before it was normalised
        for number, sample in enumerate(samples):
            at = sample.get("rollout_position", number) if isinstance(sample, dict) else None
            if isinstance(at, int) and 0 <= at < len(raw):
                sample.setdefault("reward", raw[at])
    return samples


def _row(sample: Mapping[str, Any], step: int | None, name: Any, where: str) -> Row:
    ids = ids_of(sample["tokens"], f"{where}: tokens")
    size = len(ids)
    said = sample.get("response_length", sample.get("response_lengths"))
    length = whole(said)
    if length is None:
        raise DataError(
            f"{where}: response_length must be a whole number, found {type(length).__name__}."
        )

    def response(*names: str, fill: Any = np.nan, dtype: str = "f4") -> Array | None:
        """[T, ...] of the first of these fields that the sample has."""
        field = next((n for n in names if sample.get(n) is not None), None)
        if field is None:
            return None
        values = numbers(sample[field])
        if values is None or (not values.ndim):
            raise DataError(f"{where}: {field} must be a list of numbers.")
        if len(values) != length:
            raise DataError(
                f"{where}: {field} has {len(values)} entries, and response_length is {length}. "
                "slime needs one per token of the response; if the run had context parallelism, "
                "each rank saved a part of it: dump with --context-parallel-size 1."
            )
        return of_response(values, size, f"{where}: {field}", fill=fill, dtype=dtype)

    mask = response("loss_mask", "loss_masks", fill=False, dtype="?")
    if mask is None:  # slime trains all of the response then
        mask = of_response(np.ones(max(length, 0), np.bool_), size, where, fill=False, dtype="?")
    columns: dict[str, Any] = {"prompt_lengths": size - length}
    for ours, theirs in (
        ("rollout_logprobs", "rollout_log_probs"),
        ("trainer_logprobs", "log_probs"),
        ("advantages", "advantages"),
    ):
        values = response(theirs)
        if values is not None:
            if ours == "rollout_logprobs":
                values[~mask & (values == 0.0)] = np.nan  # what slime writes for tool replies
            columns[ours] = values
    versions = _versions(sample.get("weight_versions"), mask)
    if versions is not None:
        columns["policy_version"] = versions
    routes = numbers(sample.get("rollout_routed_experts"))
    if routes is not None and routes.ndim == 3:
        if len(routes) not in (size - 1, size):
            raise DataError(
                f"{where}: rollout_routed_experts has {len(routes)} positions; {size} tokens need "
                f"{size - 1}."
            )
        columns["routed_experts"] = np.full((size, *routes.shape[1:]), -1, np.int16)
        columns["routed_experts"][: len(routes)] = routes
    if sample.get("remove_sample"):
        mask = np.zeros(size, np.bool_)
    if isinstance(response_text := sample.get("response"), str) and response_text:
        columns["texts"] = response_text
    reward = sample.get("reward")
    if isinstance(reward, dict) and len(reward) == 1:
        reward = next(iter(reward.values()))
    if (reward := real(reward)) is not None:
        columns["rewards"] = reward
    if (group := whole(sample.get("group_index"))) is not None:
        columns["groups"] = group
    if step is not None:
        columns["steps"] = step
    return Row(
        row_id=f"{name}" if step is None else f"{step}/{name}",
        token_ids=ids,
        loss_mask=mask,
        columns=columns,
    )


def _versions(versions: Any, mask: Array) -> Array | None:
    """[T] int32 of the weights by turn, -1 elsewhere; None if the file does not say which turn is
    which version. versions: one text per request, as the engine numbers them."""
    if not isinstance(versions, list) or not versions:
        return None
    if not all(isinstance(v, str | int) and str(v).isdecimal() for v in versions):
        return None
    numbers_of = [whole(int(v)) if len(str(v)) < 10 else None for v in versions]
    if None in numbers_of:
        return None
    known = np.array(numbers_of, np.int64)
    begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    out = np.full(len(mask), -1, np.int32)
    if len(set(known.tolist())) == 1:
        out[mask] = known[0]
    elif len(begins) == len(known):
        turn = np.searchsorted(begins, np.flatnonzero(mask), side="right") - 1
        out[mask] = known[turn]
    else:
        return None
    return out
