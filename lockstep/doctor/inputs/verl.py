"""verl: the texts that it logs, and the batches that it saves.

    trainer.rollout_data_dir=DIR         DIR/STEP.jsonl: prompts and replies as texts, scores
    skip.rollout.enable=true skip.rollout.steps=[1] skip.rollout.dump_dir=DIR
                                         DIR/.../STEP/gen_batch.dp: what was sampled, with ids
    skip.rollout_tq...                   DIR/.../STEP/N/tq_batch.pt: the same of the v1 trainer
    batch.save_to_disk(DIR/STEP.dp)      a `DataProto` with whatever it has at that place

Field names as in verl 0.9.1 (trainer/ppo/ray_trainer.py, experimental/agent_loop/agent_loop.py,
protocol.py, utils/skip/rollout_skip.py). The parity tests read files that its own code wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
from lockstep.doctor.inputs.files import head_of
from lockstep.doctor.inputs.native import json_line, lines_of
from lockstep.doctor.inputs.pickles import (
    Record,
    is_pickle,
    is_torch_file,
    numbers,
    plain,
    read_pickle,
    read_torch,
    read_torch_bytes,
)
from lockstep.errors import DataError

_LOGGED = frozenset({"input", "output", "score", "step"})
"""Keys of a line that `_dump_generations` writes."""
_BATCHES = ("gen_batch.dp", "tq_batch.pt")


class VerlTexts(Dump):
    """`trainer.rollout_data_dir`: STEP.jsonl, one line per sample with its texts.

    There are no ids in it, and none are made by encoding the texts: whether the ids that were
    trained are those that were sampled is what the doctor is asked.
    """

    format: ClassVar[str] = "verl-texts"
    has_ids: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _by_step(path, "*.jsonl")
        if not self._files:
            raise DataError(f"{path} has no .jsonl file. Expected verl's trainer.rollout_data_dir.")
        if not _is_logged(self._files[0]):
            raise DataError(
                f"{self._files[0]}: the first line has not all of the keys that verl's "
                f"trainer.rollout_data_dir writes: {', '.join(sorted(_LOGGED))}."
            )

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = _by_step(path, "*.jsonl")
        return bool(files) and _is_logged(files[0])

    @property
    def facts(self) -> Facts:
        return Facts(trainer="verl")

    @property
    def has(self) -> frozenset[str]:
        return frozenset({"texts", "rewards", "steps"})

    @property
    def lacks(self) -> Mapping[str, str]:
        why = (
            "trainer.rollout_data_dir logs texts only. For ids and log-probs set "
            "skip.rollout.enable=true, skip.rollout.steps=[...] and skip.rollout.dump_dir (of the "
            "v1 trainer: skip.rollout_tq), or save a batch: batch.save_to_disk(PATH)."
        )
        return {"token_ids": why, "rollout_logprobs": why, "trainer_logprobs": why}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        return in_chunks(self._rows(), self.has, max_tokens=max_tokens)

    def _rows(self) -> Iterator[Row]:
        nothing = np.empty(0, np.int32), np.empty(0, np.bool_)
        for path in self._files:
            for line, text in lines_of(path):
                where = f"{path}:{line}"
                logged = json_line(text, where)
                if not isinstance(logged.get("output"), str):
                    raise DataError(f"{where}: `output` must be text, as verl writes it.")
                columns: dict[str, Any] = {"texts": logged["output"]}
                if (score := real(logged.get("score"))) is not None:
                    columns["rewards"] = score
                if (step := whole(logged.get("step"))) is not None:
                    columns["steps"] = step
                name = f"{path.stem}/{line - 1}"
                yield Row(row_id=name, token_ids=nothing[0], loss_mask=nothing[1], columns=columns)


def _is_logged(path: Path) -> bool:
    try:
        line, text = next(lines_of(path))
        return json_line(text, f"{path}:{line}").keys() >= _LOGGED
    except (DataError, StopIteration):
        return False


def _by_step(path: Path, pattern: str) -> list[Path]:
    """Files of a directory in the order of the numbers in their places; a file alone is itself."""
    if path.is_file():
        return [path]
    found = (p for p in path.glob(pattern) if p.is_file())
    return sorted(found, key=lambda p: ([int(n) for n in re.findall(r"\d+", str(p))], str(p)))


# -- batches ----------------------------------------------------------------------------------


class VerlDump(Dump):
    """Batches of verl: `DataProto.save_to_disk`, and what `skip.rollout` keeps of each step.

    A file is read whole, one after the other. Prompts are padded on the left and responses on the
    right; what the attention mask leaves out is left out here. Log-probs stand at the tokens of
    the response. `old_log_probs` are the trainer's, before the update.
    """

    format: ClassVar[str] = "verl"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _batches(path)
        if not self._files:
            raise DataError(
                f"{path}: no {' or '.join(_BATCHES)} is in it. Expected skip.rollout.dump_dir of "
                "verl, or a file of DataProto.save_to_disk."
            )
        batch = _Batch(self._files[0])
        head = list(batch.rows({}))
        if not head:
            raise DataError(f"{self._files[0]} is a batch of 0 rows: there is nothing to look at.")
        self._has = columns_of(head)
        self._facts = batch.facts()

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = _batches(path)
        if not files:
            return False
        if files[0].name in _BATCHES:
            return True
        return is_pickle(files[0]) and b"verl.protocol" in head_of(files[0])

    @property
    def facts(self) -> Facts:
        return self._facts

    @property
    def has(self) -> frozenset[str]:
        return self._has

    @property
    def lacks(self) -> Mapping[str, str]:
        why = {
            "rollout_logprobs": "set actor_rollout_ref.rollout.calculate_log_probs=true.",
            "trainer_logprobs": "skip.rollout keeps a batch as it was sampled; for the trainer's "
            "log-probs save it later: batch.save_to_disk(PATH) in fit(), after "
            "compute_advantage.",
            "advantages": "save the batch after compute_advantage: batch.save_to_disk(PATH).",
            "routed_experts": "actor_rollout_ref.rollout.enable_rollout_routing_replay=true "
            "records the sampler's experts.",
            "policy_version": "min_global_steps and max_global_steps are in batches of the agent "
            "loop; where they differ, no token is known to be of either.",
            "texts": "trainer.rollout_data_dir logs them, in files of their own.",
            "messages": "verl keeps the prompt as messages and the reply as ids.",
        }
        return {name: reason for name, reason in why.items() if name not in self._has}

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        return in_chunks(self._rows(), self._has, max_tokens=max_tokens)

    def _rows(self) -> Iterator[Row]:
        groups: dict[str, int] = {}
        for path in self._files:
            yield from _Batch(path).rows(groups)


def _batches(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for pattern in ("*.dp", *(f"**/{name}" for name in _BATCHES)):
        if files := _by_step(path, pattern):
            return files
    return []


class _Batch:
    """One file's tensors by verl's names: padded ([B, ...]), or a list of B arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: Mapping[str, Any] = {}
        self.per_row: dict[str, Sequence[Any]] = {}
        """Of `non_tensor_batch`, and of the tags of the v1 trainer."""
        if is_torch_file(path):
            saved = read_torch(path)
            tensors = saved.get("tensordict", saved) if isinstance(saved, dict) else None
            if isinstance(saved, dict) and isinstance(tags := saved.get("tags"), list):
                for name in ("min_global_steps", "max_global_steps", "is_padding"):
                    if all(isinstance(tag, dict) for tag in tags):
                        self.per_row[name] = [tag.get(name) for tag in tags]
                keys = saved.get("keys")
                if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
                    # KEY is {uid}_{session}_{index}: rows of one uid are of one task.
                    self.per_row["uid"] = [key.rsplit("_", 2)[0] for key in keys]
                self.meta = {"global_steps": saved.get("global_steps")}
        else:
            saved = read_pickle(path)
            tensors = self._of_proto(saved)
        if not isinstance(tensors, dict) or any(
            not isinstance(tensors.get(name), list)
            and not (isinstance(tensors.get(name), np.ndarray) and tensors[name].ndim == 2)
            for name in ("prompts", "responses")
        ):
            raise DataError(
                f"{path} is not a batch of verl with `prompts` and `responses`: it was not written "
                "by DataProto.save_to_disk or skip.rollout after the rollout."
            )
        self.tensors: dict[str, Any] = tensors

    def _of_proto(self, saved: Any) -> Any:
        if not isinstance(saved, Record) or saved.name != "verl.protocol.DataProto":
            return None
        if not isinstance(saved.state, tuple) or len(saved.state) != 3:
            return None
        batch, non_tensor, meta = saved.state
        if isinstance(meta, dict):
            self.meta = meta
        if isinstance(non_tensor, dict):
            for name, values in non_tensor.items():
                if isinstance(values := plain(values), np.ndarray) and values.ndim == 1:
                    self.per_row[name] = values.tolist()
        if isinstance(batch, bytes):
            return read_torch_bytes(batch, f"{self.path} (its tensors)")
        if isinstance(batch, tuple) and len(batch) == 3 and isinstance(batch[2], dict):
            # VERL_DATAPROTO_SERIALIZATION_METHOD=numpy: name -> (dtype, shape, bytes)
            return {name: self._of_numpy(name, value) for name, value in batch[2].items()}
        return None

    def _of_numpy(self, name: str, value: Any) -> Any:
        """(dtype, shape, bytes) of a tensor, or (layout, list of those) of a nested one."""
        entries: Any = value
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], list):
            return [self._of_numpy(name, entry) for entry in value[1]]
        try:
            dtype, shape, raw = entries
            raw = plain(raw).tobytes()
            if dtype == "bfloat16":
                halves = np.frombuffer(raw, "<u2")
                return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
            return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{self.path}: tensor {name!r} cannot be read: {error}.") from None

    # -- rows -----------------------------------------------------------------------------------

    def facts(self) -> Facts:
        stop = self.meta.get("eos_token_id")
        stops = map(whole, stop if isinstance(stop, list) else [stop])
        return Facts(
            trainer="verl",
            temperature=real(self.meta.get("temperature")),
            pad_id=whole(self.meta.get("pad_token_id")),
            stop_ids=frozenset(s for s in stops if s is not None),
            is_moe=True if "routed_experts" in self.tensors else None,
        )

    def rows(self, groups: dict[str, int]) -> Iterator[Row]:
        step = self._step()
        for i in range(len(self.tensors["responses"])):
            where = f"{self.path}: row {i}"
            if self._of_row("is_padding", i):  # put in to fill a batch, never trained
                continue
            prompt, mask_of_prompt = self._part("prompts", i, where)
            reply, mask_of_reply = self._part("responses", i, where)
            ids = np.concatenate([prompt[mask_of_prompt], reply[mask_of_reply]])
            self._compare(i, prompt, reply, where)
            columns: dict[str, Any] = {"prompt_lengths": int(mask_of_prompt.sum())}
            trained = self._response("response_mask", i, mask_of_reply, where)
            if trained is None:
                trained = np.ones(int(mask_of_reply.sum()), np.bool_)
            trained = trained.astype(np.bool_)
            size = len(ids)
            loss_mask = of_response(trained, size, where, fill=False, dtype="?")
            for ours, theirs in (
                ("rollout_logprobs", "rollout_log_probs"),
                ("trainer_logprobs", "old_log_probs"),
                ("advantages", "advantages"),
            ):
                values = self._response(theirs, i, mask_of_reply, where)
                if values is None:
                    continue
                values = of_response(values, size, where, fill=np.nan, dtype="f4")
                if ours == "rollout_logprobs":
                    values[~loss_mask & (values == 0.0)] = np.nan  # verl's filler of tool replies
                columns[ours] = values
            routes = self._routes(i, mask_of_prompt, mask_of_reply, where)
            if routes is not None:
                columns["routed_experts"] = routes
            for theirs in ("token_level_scores", "rm_scores"):
                scores = self._response(theirs, i, mask_of_reply, where)
                if scores is not None:
                    columns["rewards"] = float(scores.sum())
                    break
            version = self._version(i)
            if version is not None:
                columns["policy_version"] = np.where(loss_mask, version, -1).astype(np.int32)
                if step is not None:  # step S trains the weights that step S - 1 made
                    columns["trainer_version"] = step - 1
            if (uid := self._of_row("uid", i)) is not None:
                columns["groups"] = groups.setdefault(str(uid), len(groups))
            if step is not None:
                columns["steps"] = step
            name = f"{i}" if step is None else f"{step}/{i}"
            yield Row(row_id=name, token_ids=ids, loss_mask=loss_mask, columns=columns)

    def _step(self) -> int | None:
        step = whole(self.meta.get("global_steps"))
        if step is not None:
            return step
        beside = self.path.with_name("meta.json")  # written by skip.rollout
        if self.path.name in _BATCHES and beside.is_file():
            try:
                return whole(json.loads(beside.read_bytes()).get("global_steps"))
            except (ValueError, AttributeError, RecursionError):
                raise DataError(f"{beside} is not the JSON that skip.rollout writes.") from None
        return None

    def _of_row(self, name: str, i: int) -> Any:
        values = self.per_row.get(name, ())
        return values[i] if i < len(values) else None

    def _version(self, i: int) -> int | None:
        first, last = (self._of_row(name, i) for name in ("min_global_steps", "max_global_steps"))
        return first if first == last else None

    def _row(self, name: str, i: int, where: str, *, ndim: int = 1) -> Array | None:
        column = self.tensors.get(name)
        if column is None or isinstance(column, Record):
            return None
        if not isinstance(column, list) and not (isinstance(column, np.ndarray) and column.ndim):
            raise DataError(f"{where}: {name} must be a tensor with a row per sample.")
        if i >= len(column):
            raise DataError(f"{where}: {name} has {len(column)} rows only.")
        values = numbers(column[i])
        if values is None or values.ndim != ndim:
            raise DataError(
                f"{where}: {name} must be a tensor with a row of numbers per sample, of "
                f"{ndim} dimension{'s' * (ndim > 1)}."
            )
        return values

    def _part(self, name: str, i: int, where: str) -> tuple[Array, Array]:
        """(ids, which of them are no padding) of the prompt or the response."""
        ids = self._row(name, i, where)
        if ids is None:
            raise DataError(f"{where}: {name} must be a tensor of ids.")
        ids = ids_of(ids, f"{where}: {name}")
        if isinstance(self.tensors[name], list):
            return ids, np.ones(len(ids), np.bool_)  # jagged: never padded
        attended = self._row("attention_mask", i, where)
        if attended is None:
            raise DataError(
                f"{where}: the batch has no attention_mask, so that padding and text cannot be "
                "told apart. Save it with attention_mask."
            )
        other = self._row("responses" if name == "prompts" else "prompts", i, where)
        width = len(ids) + (0 if other is None else len(other))
        if len(attended) != width:
            raise DataError(
                f"{where}: attention_mask has {len(attended)} places; prompts and responses have "
                f"{width} together."
            )
        part = attended[: len(ids)] if name == "prompts" else attended[width - len(ids) :]
        return ids, part.astype(np.bool_)

    def _compare(self, i: int, prompt: Array, reply: Array, where: str) -> None:
        whole = self._row("input_ids", i, where)
        if whole is None or not isinstance(self.tensors["prompts"], np.ndarray):
            return
        both = np.concatenate([prompt, reply])
        if len(whole) != len(both) or (whole != both).any():
            at = int((whole != both).argmax()) if len(whole) == len(both) else len(whole)
            raise DataError(
                f"{where}: input_ids are not prompts and responses one after the other (place "
                f"{at}): log-probs would be computed over other tokens than those that were "
                "sampled."
            )

    def _response(self, name: str, i: int, mask: Array, where: str) -> Array | None:
        """Of the response's tokens, without padding."""
        values = self._row(name, i, where)
        if values is None:
            return None
        if len(values) != len(mask):
            raise DataError(
                f"{where}: {name} has {len(values)} places, and responses have {len(mask)}."
            )
        return values[mask]

    def _routes(self, i: int, prompt: Array, reply: Array, where: str) -> Array | None:
        """[T, L, K], -1 where verl has zeros for none and at the last token."""
        values = self._row("routed_experts", i, where, ndim=3)
        if values is None:
            return None
        if len(values) != len(prompt) + len(reply):
            raise DataError(
                f"{where}: routed_experts has shape {values.shape}; expected "
                f"({len(prompt) + len(reply)}, layers, experts per token)."
            )
        routes = values[np.concatenate([prompt, reply])].astype(np.int16)
        if routes.shape[2] > 1:  # no token goes to expert 0 twice
            routes[(routes == 0).all((1, 2))] = -1
        routes[-1:] = -1
        return routes
