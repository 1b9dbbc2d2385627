"""The formats of other trainers. formats.toml has their names of files and columns; here is what
differs from format to format: where a file has its rows, and where a row has its padding.

Each format has a dump, and `live`: the batch of a step in memory, as `lockstep.watch` is given it.
Field names are of November 2026: verl 0.9.1, TRL 1.16, tinker-cookbook 0.6.1 with tinker 0.38,
SkyRL 0.3.0 (and its a9564572 of August), AReaL 2.0.0, and the main branches of slime, miles,
prime-rl and NeMo-RL. The parity tests read files that verl, TRL, SkyRL and the cookbook wrote.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    array_of,
    floats_of,
    ids_of,
    numbers,
    per_token,
    real,
    row_name,
    row_of,
    whole,
)
from lockstep.doctor.inputs.lines import FileDump, Line, LineDump, Live, step_in
from lockstep.doctor.inputs.pickles import (
    Record,
    is_pickle,
    is_torch_file,
    mentions,
    plain,
    read_pickle,
    read_torch,
)
from lockstep.doctor.inputs.places import head_of
from lockstep.doctor.rows import BoolArray
from lockstep.errors import DataError

# -- JSON lines -----------------------------------------------------------------------------------


class PrimeRlDump(LineDump):
    """A file of the token export, a directory of steps, or the output directory of a run."""

    # trainer.enable_token_export = true    OUTPUT/token_exports/step_STEP/rank_RANK.jsonl
    # Log-probs are at their own token: the trainer shifts its own right by one.
    format: ClassVar[str] = "prime-rl"

    @classmethod
    def row_of(cls, line: Line, where: str, name: str = "") -> Row:
        ids = ids_of(line["token_ids"], f"{where}: token_ids")
        rewards = line.get("rewards")  # the reward of the row at each of its tokens
        known = [real(r) for r in rewards] if isinstance(rewards, list) else []
        step, run = line.get("export_step", line.get("step")), line.get("run_id")
        name = f"{step}/rank{line.get('rank', 0)}/{line.get('export_sequence_idx', '?')}"
        return cls.row(
            line,
            where,
            ids,
            row_id=f"{run}/{name}" if isinstance(run, str) else name,
            loss_mask=_trained(line, len(ids), where),
            rewards=next((r for r in reversed(known) if r is not None), None),
            steps=step,
        )

    @classmethod
    def live(cls, lines: Sequence[Line], *, step: int) -> Live:
        """lines: of `exported`."""

        def row(i: int) -> Row:
            line = {**lines[i], "export_sequence_idx": i}
            return cls.row_of(line, f"the batch of step {step}: sequence {i}")

        # One group: the sequences were chosen when they were taken.
        return [step] * len(lines), partial(map, row), {}

    @classmethod
    def exported(
        cls, batch: Mapping[str, Any], logprobs: Any, lengths: Sequence[int], *, step: int
    ) -> Iterator[dict[str, Any]]:
        """The lines that the token export writes of a micro batch: its trained sequences, without
        the padding behind them. logprobs: the trainer's, at their own token; lengths: of the
        sequences."""
        names = {name: name for name in (*cls.keys, "advantages", "rl_weights")}
        names |= {"token_ids": "input_ids"}
        found = {name: batch[key] for name, key in names.items() if batch.get(key) is not None}
        found["trainer_logprobs"] = logprobs
        how = 'Give the micro_batch, out["logprobs"] and the lengths of token_exporter.export.'
        cls.check(found, f"the micro batch of step {step}", how)
        columns = {name: array_of(column).reshape(-1) for name, column in found.items()}
        trained, begin = columns["loss_mask"].astype(np.bool_), 0
        environments = batch.get("env_names") or ["?"] * len(trained)
        for length in lengths:
            end = following = begin + length
            while end > begin and not trained[end - 1] and environments[end - 1] == "":
                end -= 1
            if trained[begin:end].any():
                line = {name: column[begin:end].tolist() for name, column in columns.items()}
                line |= {n: batch[n][begin:end] for n in ("losses", "rewards") if n in batch}
                yield {"step": step} | line
            begin = following


def _trained(line: Line, size: int, where: str) -> BoolArray:
    """[size] tokens of the policy's loss. `loss_mask` is the union of all losses, which includes
    the imitation of given tokens."""
    mask = floats_of(line["loss_mask"], size, f"{where}: loss_mask")
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{where}: loss_mask: expected true and false, or 1 and 0.")
    losses, weights = line.get("losses"), line.get("rl_weights")
    if isinstance(losses, list) and len(losses) == size:
        if not all(isinstance(at, dict) and isinstance(at.get("rl", {}), dict) for at in losses):
            raise DataError(f"{where}: losses must be an object per token, of objects.")
        if any("rl" in at for at in losses):
            return (mask > 0) & [bool(at.get("rl", {}).get("mask")) for at in losses]
    if isinstance(weights, list) and any(weights):
        return (mask > 0) & (floats_of(weights, size, f"{where}: rl_weights") != 0)
    return mask > 0


class NemoRlDump(LineDump):
    """`train_data_step*.jsonl` of a run's log directory, or one such file."""

    # logger.log_dir/exp_NNN/train_data_stepSTEP.jsonl    always written, except with
    #                                                     env.should_log_nemo_gym_responses
    # Rows are padded on the right; earlier versions logged texts without ids.
    format: ClassVar[str] = "nemo-rl"

    def rows_of(self, line: Line, path: Path, number: int, where: str) -> Iterator[Row]:
        # Each value is a batch of one.
        source = {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in line.items()}
        padded = ids_of(source["token_ids"], f"{where}: token_ids")
        size = whole(source["input_lengths"])
        if size is None or not 0 <= size <= len(padded):
            raise DataError(f"{where}: input_lengths must be a whole number, 0 to {len(padded)}.")
        step = step_in(path)
        row = self.row(
            source,
            where,
            padded[:size],
            kept=np.arange(len(padded)) < size,
            row_id=row_name(step, number - 1),
            prompt_lengths=None,
            rewards=source.get("rewards"),
            steps=step,
        )
        if (weight := real(source.get("sample_loss_mask"))) is not None and weight <= 0:
            row.loss_mask[:] = False  # a sample that was filtered out
        trainer = row.columns["trainer_logprobs"]
        trainer[:1] = np.nan  # a filler: nothing predicts the first token
        if not np.any(trainer[1:]):
            del row.columns["trainer_logprobs"]
        yield row


class TinkerDump(LineDump):
    """Datums, one per line: the input ids, and for each the target with the sampler's log-prob."""

    # One line in the cookbook's loop saves them (docs/doctor-dumps.md). `training_logprobs`, from
    # the forward pass of the step, are the trainer's. A target is one place after the input that
    # predicts it: a row is the first input and all targets.
    format: ClassVar[str] = "tinker"

    @classmethod
    def row_of(cls, line: Line, where: str, name: str) -> Row:
        given = ids_of(line["model_input"], f"{where}: model_input")
        targets = ids_of(line["target_tokens"], f"{where}: target_tokens")
        if len(given) != len(targets) or (given[1:] != targets[:-1]).any():
            raise DataError(
                f"{where}: target_tokens ({len(targets)}) must be model_input ({len(given)}) one "
                "place on. A datum with images cannot be read."
            )
        floats_of(line["mask"], len(targets), f"{where}: mask")  # null is no mask
        ids, kept = np.concatenate([given[:1], targets]), np.ones(len(targets), np.bool_)
        return cls.row(line, where, ids, kept=kept, row_id=name, prompt_lengths=None)

    @classmethod
    def live(cls, datums: Sequence[Any], logprobs: Sequence[Any] | None, *, step: int) -> Live:
        """logprobs: the trainer's of every datum, or None."""

        def row(i: int) -> Row:
            where = f"the batch of step {step}: datum {i}"
            line = {name: values.tolist() for name, values in datums[i].loss_fn_inputs.items()}
            line["model_input"] = datums[i].model_input.to_ints()
            if logprobs is not None:
                line["training_logprobs"] = array_of(logprobs[i])
            how = "Give datums of assemble_training_data before their mask is removed."
            cls.check(line, where, how)
            return cls.row_of(line, where, f"{step}/{i}")

        return range(len(datums)), partial(map, row), {}


# -- batches of tensors ---------------------------------------------------------------------------


class BatchDump(FileDump):
    """A format of batches: each column is a tensor [B, ...], or a list of B tensors."""

    no_batch: ClassVar[str]
    """Ends the error about anything else."""

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return is_torch_file(path) and mentions(path, cls.keys)

    def rows_in(self, path: Path) -> Iterator[Row]:
        saved = read_torch(path) if is_torch_file(path) else read_pickle(path)
        return self.rows_of(saved, path, step=step_in(path))

    @classmethod
    def _last(cls, batch: Any, where: object) -> Any:
        """The column of replies, or DataError for anything but a batch."""
        parts = [batch.get(name) if isinstance(batch, dict) else None for name in cls.keys]
        if any(not isinstance(part, list) and np.ndim(part) != 2 for part in parts):  # pyright: ignore[reportArgumentType]
            raise DataError(f"{where} is {cls.no_batch}.")
        return parts[-1]

    @classmethod
    @abstractmethod
    def row_of(cls, source: dict[str, Any], where: str, number: int, **known: Any) -> Iterator[Row]:
        """The row, or none. source: its values by the names of the batch. known: fields of `Rows`,
        and what a format gives to `rows_of`."""

    @classmethod
    def rows_of(
        cls, batch: Any, where: object, *, step: int | None, index: Sequence[int] = (), **more: Any
    ) -> Iterator[Row]:
        """The rows of a batch. index: their numbers; none means all. more: for `row_of`."""
        last = cls._last(batch, where)
        for number in index or range(len(last)):
            source = row_of(batch, number) | {"is_padded": not isinstance(last, list)}
            known = {"row_id": row_name(step, number), "steps": step}
            yield from cls.row_of(source, f"{where}: row {number}", number, **known, **more)

    @classmethod
    def in_memory(
        cls, batch: Any, *, step: int, **more: Any
    ) -> tuple[range, Callable[[Sequence[int]], Iterator[Row]]]:
        """(numbers of all rows, the rows of some numbers) of the batch of a step."""
        where = f"the batch of step {step}"
        size = range(len(cls._last(batch, where)))
        return size, lambda index: cls.rows_of(batch, where, step=step, index=index, **more)


class TrlDump(BatchDump):
    """Batches of a GRPOTrainer, saved by torch.save: a file, or a directory of them by step."""

    # A subclass of three lines saves the value of `_generate_and_score_completions`
    # (docs/doctor-dumps.md). Prompts are padded on the left and completions on the right. The
    # sampler's log-probs are of vLLM, or of a rollout_func; the trainer's, before the update.
    format: ClassVar[str] = "trl"

    @classmethod
    def live(cls, batch: Mapping[str, Any], *, step: int, group_size: int = 0) -> Live:
        """group_size: rows of one prompt, one after the other; 0 if it is unknown."""
        numbers, rows = cls.in_memory(batch, step=step, group_size=group_size)
        return [i // (group_size or 1) for i in numbers], rows, {}

    @classmethod
    def row_of(cls, source: dict[str, Any], where: str, number: int, **known: Any) -> Iterator[Row]:
        parts, group_size = list[Array](), known.pop("group_size", 0)
        kept = np.empty(0, np.bool_)
        for part in ("prompt", "completion"):
            ids = ids_of(source[f"{part}_ids"], f"{where}: {part}_ids")
            kept = floats_of(source[f"{part}_mask"], len(ids), f"{where}: {part}_mask") > 0
            parts.append(ids[kept])
        if not np.ndim(advantage := source.get("advantages", [])):  # one number of the row
            source["advantages"] = np.full(len(kept), advantage)
        known["groups"] = number // group_size if group_size else None
        yield cls.row(source, where, np.concatenate(parts), kept=kept, **known)


_BATCHES = ("gen_batch.dp", "tq_batch.pt")


class VerlDump(BatchDump):
    """Batches of verl: `DataProto.save_to_disk`, and the files of `skip.rollout`."""

    # skip.rollout.enable=true skip.rollout.steps=[1] skip.rollout.dump_dir=DIR
    #                                      DIR/.../STEP/gen_batch.dp: sampled ids and log-probs
    # skip.rollout_tq...                   DIR/.../STEP/N/tq_batch.pt: the same by the v1 trainer
    # batch.save_to_disk(DIR/STEP.dp)      a `DataProto` with every tensor that it has by then
    #
    # Prompts are padded on the left and responses on the right. `old_log_probs` are the trainer's,
    # before the update.
    format: ClassVar[str] = "verl"

    def __init__(self, path: Path) -> None:
        self._groups = dict[str, int]()
        self._settings: Mapping[str, Any] = {}
        super().__init__(path)
        self.facts = replace(self.facts, **self.facts_of(self._settings))

    @classmethod
    def is_own(cls, path: Path) -> bool:
        if path.name in _BATCHES or (is_pickle(path) and b"verl.protocol" in head_of(path)):
            return True
        return is_torch_file(path) and mentions(path, (*cls.keys, "response_mask"))

    def rows_in(self, path: Path) -> Iterator[Row]:
        batch, meta = _of_queue(read_torch(path)) if is_torch_file(path) else _of_proto(path)
        self._settings = self._settings or meta
        step = whole(meta.get("global_steps"))
        if step is None and path.name in _BATCHES:
            step = step_in(path.parent)  # a directory for each step
        yield from self.rows_of(batch, path, step=step, groups=self._groups)

    @classmethod
    def live(cls, batch: Any, *, step: int, tags: Any = None, keys: Any = None) -> Live:
        """A `DataProto`; or the TensorDict of the v1 trainer's queue, with the tags and the keys of
        its rows."""
        if hasattr(batch, "non_tensor_batch"):
            tensors = dict(batch.batch.items()) if batch.batch is not None else {}
            found, meta = tensors | _tags(batch.non_tensor_batch), dict(batch.meta_info)
        else:
            tensors = dict(batch.items()) if hasattr(batch, "items") else {}
            keys = None if keys is None else list(keys)
            found, meta = _of_queue({"tensordict": tensors, "tags": tags, "keys": keys})
        jagged: dict[str, Any] = {n: c for n, c in found.items() if getattr(c, "is_nested", False)}
        found |= {name: list(column.unbind()) for name, column in jagged.items()}
        numbers, rows = cls.in_memory(found, step=step, groups={})
        return found.get("uid") or numbers, rows, cls.facts_of(meta)

    @staticmethod
    def facts_of(meta: Mapping[str, Any]) -> dict[str, Any]:
        """Facts of the run in the settings of a batch."""
        stop = meta.get("eos_token_id")
        stops = map(whole, stop if isinstance(stop, list) else [stop])
        return {
            "temperature": real(meta.get("temperature")),
            "pad_id": whole(meta.get("pad_token_id")),
            "stop_ids": frozenset(id_ for id_ in stops if id_ is not None),
        }

    @classmethod
    def row_of(cls, source: dict[str, Any], where: str, number: int, **known: Any) -> Iterator[Row]:
        if source.get("is_padding"):  # fills the batch, never trained
            return
        groups: dict[str, int] = known.pop("groups")  # uid -> number of the group
        prompt, reply = (ids_of(source[part], f"{where}: {part}") for part in cls.keys)
        ids = np.concatenate([prompt, reply])
        kept = np.ones(len(ids), np.bool_)
        if source["is_padded"]:  # jagged rows have no padding
            if source.get("attention_mask") is None:
                raise DataError(f"{where}: the batch has no attention_mask. Save it with one.")
            kept = floats_of(source["attention_mask"], len(ids), f"{where}: attention_mask") > 0
        replied, names = kept[len(prompt) :], ("token_level_scores", "rm_scores")
        scores = per_token(source, names, where, size=int(kept.sum()), kept=replied)
        known["routed_experts"] = _verl_routes(numbers(source.get("routed_experts")), kept, where)
        known["rewards"] = None if scores is None else float(np.nansum(scores))
        row = cls.row(source, where, ids[kept], kept=replied, **known)
        version, step = whole(source.get("min_global_steps")), known["steps"]
        if version is not None and version == whole(source.get("max_global_steps")):
            row.columns["policy_version"] = np.where(row.loss_mask, version, -1)
            if step is not None:  # it trains the weights that the step before it made
                row.columns["trainer_version"] = step - 1
        if (uid := source.get("uid")) is not None:
            row.columns["groups"] = groups.setdefault(str(uid), len(groups))
        yield row


def _of_queue(saved: Any) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(columns, settings) of a batch of the v1 trainer: tensors, tags by row, and keys of rows."""
    if not isinstance(saved, dict):
        return {}, {}
    columns: dict[str, Any] = {}
    tags, keys = saved.get("tags"), saved.get("keys")
    if isinstance(tags, list) and all(isinstance(tag, dict) for tag in tags):
        for name in ("min_global_steps", "max_global_steps", "is_padding"):
            columns[name] = [tag.get(name) for tag in tags]
        if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            # KEY is {uid}_{session}_{index}: rows of one uid belong to one task.
            columns["uid"] = [key.rsplit("_", 2)[0] for key in keys]
    tensors = saved.get("tensordict", saved)
    return (tensors if isinstance(tensors, dict) else {}) | columns, saved


def _of_proto(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The same of a pickled DataProto: tensors as bytes of torch.save, arrays by row, settings."""
    saved = read_pickle(path)
    is_proto = isinstance(saved, Record) and saved.name == "verl.protocol.DataProto"
    if not is_proto or not isinstance(saved.state, tuple) or len(saved.state) != 3:
        return {}, {}
    content, arrays, meta = saved.state
    found = read_torch(content, f"{path} (its tensors)") if isinstance(content, bytes) else {}
    tensors = found if isinstance(found, dict) else {}
    return tensors | _tags(arrays), meta if isinstance(meta, dict) else {}


def _tags(arrays: Any) -> dict[str, list[Any]]:
    """`non_tensor_batch` without columns of anything but one value per row."""
    known = {n: plain(v) for n, v in arrays.items()} if isinstance(arrays, dict) else {}
    flat = {n: v for n, v in known.items() if isinstance(v, np.ndarray) and v.ndim == 1}
    return {name: values.tolist() for name, values in flat.items()}


def _verl_routes(values: Array | None, kept: BoolArray, where: str) -> Array | None:
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


class SkyRlDump(BatchDump):
    """Batches of `trainer.dump_data_batch`: a file, a directory of them, or the export path."""

    # trainer.dump_data_batch=true    EXPORT_PATH/dumped_data/global_step_N_training_input.pkl
    # Rows are padded on the left, and columns of the response too.
    format: ClassVar[str] = "skyrl"

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return is_pickle(path) and b"skyrl" in head_of(path)

    @classmethod
    def row_of(cls, source: dict[str, Any], where: str, number: int, **known: Any) -> Iterator[Row]:
        ids = ids_of(source["sequences"], f"{where}: sequences")
        is_there = floats_of(source["attention_mask"], len(ids), f"{where}: attention_mask") > 0
        mask = source["response_mask"]
        kept = floats_of(mask, len(mask), f"{where}: response_mask") > 0
        known["groups"] = source.get("prompt")
        yield cls.row(source, where, ids[is_there], kept=kept, **known)


class ArealDump(BatchDump):
    """Rollout batches of AReaL, saved by torch.save: a file, or a directory of them by version."""

    # A few lines around `compute_advantages` save them (docs/doctor-dumps.md): trajectories, each a
    # dict of tensors [n, T] with padding on the right. `logprobs` are at their own token,
    # `prox_logp` one place before it.
    format: ClassVar[str] = "areal"

    def rows_in(self, path: Path) -> Iterator[Row]:
        saved = read_torch(path)
        content = saved if isinstance(saved, dict) else {}
        batch, version = content.get("batch"), whole(content.get("version"))
        for number, one in enumerate(batch if isinstance(batch, list) else [None]):
            rows = self.rows_of(one, f"{path}: trajectory {number}", step=version, groups=number)
            for place, row in enumerate(rows):
                row.row_id = row_name(version, f"{number}.{place}")
                yield row

    @classmethod
    def row_of(cls, source: dict[str, Any], where: str, number: int, **known: Any) -> Iterator[Row]:
        ids = ids_of(source["input_ids"], f"{where}: input_ids")
        kept = floats_of(source["attention_mask"], len(ids), f"{where}: attention_mask") > 0
        if (following := numbers(source.get("prox_logp"))) is not None:
            source["prox_logp"] = np.append(np.nan, following[:-1])
        known |= {"prompt_lengths": None, "rewards": source.get("rewards")}
        known["trainer_version"] = known["steps"]
        yield cls.row(source, where, ids[kept], kept=kept, **known)


class SlimeDump(FileDump):
    """A `.pt` file of slime or miles, or a directory of them."""

    # --save-debug-rollout-data DIR/{rollout_id}.pt    sampled rows
    # --save-debug-train-data DIR/{rollout_id}.pt      the same with the trainer's log-probs
    # --dump-details DIR                               both, in DIR/rollout_data and DIR/train_data
    #
    # Evaluations are left out: they are never trained. Of the two directories the first with rows
    # is read.
    format: ClassVar[str] = "slime"
    _FOLDERS: ClassVar[tuple[str, ...]] = ("train_data", "rollout_data")
    """Directories that --dump-details writes; the first has more columns."""

    @classmethod
    def files_of(cls, path: Path) -> list[Path]:
        if path.is_file() and not path.suffix:
            return [path]
        folder = next((path / name for name in cls._FOLDERS if (path / name).is_dir()), path)
        return [file for file in super().files_of(folder) if not file.name.startswith("eval_")]

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return is_torch_file(path)

    def rows_in(self, path: Path) -> Iterator[Row]:
        return self._rows(read_torch(path), path)

    def rows(self) -> Iterator[Row]:
        def batch_of(pair: tuple[Any, Path]) -> tuple[Any, bool]:
            """(the rollout, whether the file is the share of one rank)."""
            content = pair[0] if isinstance(pair[0], dict) else {}
            return content.get("rollout_id"), "rollout_data" in content

        read = ((read_torch(path), path) for path in self.files)
        for (_, is_shard), group in groupby(read, batch_of):
            rows = (row for content, path in group for row in self._rows(content, path))
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

    @classmethod
    def live(cls, batch: Any, *, step: int, rank: int) -> Live:
        """A list of samples, or one rank's `rollout_data`."""
        is_shard = isinstance(batch, Mapping)
        numbers = range(len(batch.get("tokens", ())) if is_shard else len(batch))
        groups = [None if is_shard else getattr(batch[i], "group_index", None) for i in numbers]
        samples = {"rollout_data": dict(batch)} if is_shard else {"samples": list(batch)}
        content = {"rollout_id": step, "rank": rank, **samples}
        rows = partial(cls._rows, content, f"the batch of step {step}")
        return numbers if None in groups else groups, rows, {}

    @classmethod
    def _rows(cls, content: Any, path: object, index: Sequence[int] = ()) -> Iterator[Row]:
        """index: numbers of the samples; none means all."""
        samples = _samples(content) if isinstance(content, dict) else None
        if samples is None:
            raise DataError(
                f"{path} is a file of torch.save without `samples` or `rollout_data`: it is not of "
                "slime's or miles' --save-debug-rollout-data or --save-debug-train-data. Name "
                "another trainer's format: --format verl."
            )
        step, raw = whole(content.get("rollout_id")), content.get("raw_reward")
        for number in index or range(len(samples)):
            sample, where = samples[number], f"{path}: sample {number}"
            sample = sample.to_dict() if hasattr(sample, "to_dict") else sample
            if not isinstance(sample, dict) or "tokens" not in sample:
                raise DataError(f"{where}: expected a dict with `tokens`, as of Sample.to_dict().")
            sample = {name: array_of(value) for name, value in sample.items()}
            at = sample.get("rollout_position", number)
            if isinstance(raw, list) and isinstance(at, int) and 0 <= at < len(raw):
                sample.setdefault("reward", raw[at])  # before it was normalised
            yield cls._row(sample, where, row_id=row_name(step, at), steps=step)

    @classmethod
    def _row(cls, sample: Mapping[str, Any], where: str, **known: Any) -> Row:
        ids = ids_of(sample["tokens"], f"{where}: tokens")
        length = whole(sample.get("response_length", sample.get("response_lengths")))
        if length is None or length < 0:
            raise DataError(f"{where}: response_length must be a whole number from 0.")
        kept = np.broadcast_to(np.True_, (length,))  # takes no memory, however long it is said
        text, reward = sample.get("response"), sample.get("reward")
        if isinstance(reward, dict) and len(reward) == 1:
            reward = next(iter(reward.values()))
        routes = numbers(sample.get("rollout_routed_experts"))
        row = cls.row(
            sample,
            where,
            ids,
            kept=kept,
            routed_experts=_slime_routes(routes, len(ids), where),
            texts=text if isinstance(text, str) and text else None,
            rewards=reward,
            groups=sample.get("group_index"),
            **known,
        )
        versions = _slime_versions(sample.get("weight_versions"), row.loss_mask)
        row.columns |= {} if versions is None else {"policy_version": versions}
        row.loss_mask &= not sample.get("remove_sample")
        return row


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
    places = lists.get("partition", [f"rank{content.get('rank')}/{i}" for i in range(size)])
    return [
        {name: values[i] for name, values in lists.items()} | {"rollout_position": places[i]}
        for i in range(size)
    ]


def _slime_routes(routes: Array | None, size: int, where: str) -> Array | None:
    """[T, L, K], -1 at the last token."""
    if routes is None or routes.ndim != 3:
        return None
    if len(routes) not in (size - 1, size):
        found = f"rollout_routed_experts has {len(routes)} positions"
        raise DataError(f"{where}: {found}; {size} tokens need {size - 1}.")
    out = np.full((size, *routes.shape[1:]), -1, np.int16)
    out[: len(routes)] = routes
    return out


def _slime_versions(versions: Any, mask: BoolArray) -> Array | None:
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
