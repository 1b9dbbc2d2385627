"""verl: the batches that it saves.

    skip.rollout.enable=true skip.rollout.steps=[1] skip.rollout.dump_dir=DIR
                                         DIR/.../STEP/gen_batch.dp: sampled ids and log-probs
    skip.rollout_tq...                   DIR/.../STEP/N/tq_batch.pt: the same by the v1 trainer
    batch.save_to_disk(DIR/STEP.dp)      a `DataProto` with every tensor that it has by then

Field names as in verl 0.9.1 (trainer/ppo/ray_trainer.py, experimental/agent_loop/agent_loop.py,
protocol.py, utils/skip/rollout_skip.py). The parity tests read files that its own code wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import (
    Array,
    Row,
    at_the_end,
    ids_of,
    numbers,
    real,
    row_name,
    whole,
)
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.lines import FileDump
from lockstep.doctor.inputs.pickles import (
    Record,
    is_pickle,
    is_torch_file,
    plain,
    read_pickle,
    read_torch,
)
from lockstep.doctor.inputs.places import head_of
from lockstep.errors import DataError

_BATCHES = ("gen_batch.dp", "tq_batch.pt")


class VerlDump(FileDump):
    """Batches of verl: `DataProto.save_to_disk`, and the files of `skip.rollout`.

    Prompts are padded on the left and responses on the right; places that the attention mask leaves
    out are left out. Log-probs are at the tokens of the response. `old_log_probs` are the
    trainer's, before the update.
    """

    format: ClassVar[str] = "verl"
    trainer: ClassVar[str] = "verl"
    patterns: ClassVar[tuple[str, ...]] = ("*.dp", *(f"**/{name}" for name in _BATCHES))
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    no_row: ClassVar[str] = (
        f" has 0 rows of a batch of verl. Give skip.rollout.dump_dir ({' or '.join(_BATCHES)}), or "
        "a file of DataProto.save_to_disk."
    )
    why: ClassVar[Mapping[str, str]] = {
        "rollout_logprobs": "set actor_rollout_ref.rollout.calculate_log_probs=true.",
        "trainer_logprobs": "skip.rollout keeps a batch as it was sampled; for the trainer's "
        "log-probs save it later: batch.save_to_disk(PATH) in fit(), after compute_advantage.",
        "advantages": "save the batch after compute_advantage: batch.save_to_disk(PATH).",
        "routed_experts": "actor_rollout_ref.rollout.enable_rollout_routing_replay=true records "
        "the sampler's experts.",
        "policy_version": "min_global_steps and max_global_steps are in batches of the agent loop; "
        "where they differ, no token is known to be of either.",
        "texts": "trainer.rollout_data_dir logs them, without ids.",
        "messages": "verl keeps the prompt as messages and the reply as ids.",
    }

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.facts = _Batch(self.files[0]).facts()

    @classmethod
    def is_own(cls, path: Path) -> bool:
        return path.name in _BATCHES or (is_pickle(path) and b"verl.protocol" in head_of(path))

    def rows(self) -> Iterator[Row]:
        self._groups: dict[str, int] = {}
        yield from super().rows()

    def rows_in(self, path: Path) -> Iterator[Row]:
        batch = _Batch(path)
        for i in range(len(batch.tensors["responses"])):
            if not batch.of_row("is_padding", i):  # fills the batch, never trained
                yield batch.row(i, self._groups)


class _Batch:
    """The tensors of one file by verl's names: padded ([B, ...]), or a list of B arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: Mapping[str, Any] = {}
        self.per_row: dict[str, Sequence[Any]] = {}
        """`non_tensor_batch`, or the tags of the v1 trainer."""
        tensors = self._of_torch() if is_torch_file(path) else self._of_proto(read_pickle(path))
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
        self.step = self._step()

    def _of_torch(self) -> Any:
        """The batch of the v1 trainer: tensors, tags by row, and the keys of the rows."""
        saved = read_torch(self.path)
        if not isinstance(saved, dict):
            return None
        tags, keys = saved.get("tags"), saved.get("keys")
        if isinstance(tags, list) and all(isinstance(tag, dict) for tag in tags):
            for name in ("min_global_steps", "max_global_steps", "is_padding"):
                self.per_row[name] = [tag.get(name) for tag in tags]
            if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
                # KEY is {uid}_{session}_{index}: rows of one uid belong to one task.
                self.per_row["uid"] = [key.rsplit("_", 2)[0] for key in keys]
            self.meta = {"global_steps": saved.get("global_steps")}
        return saved.get("tensordict", saved)

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
        return read_torch(batch, f"{self.path} (its tensors)") if isinstance(batch, bytes) else None

    def _step(self) -> int | None:
        step = whole(self.meta.get("global_steps"))
        beside = self.path.with_name("meta.json")  # written by skip.rollout
        if step is not None or self.path.name not in _BATCHES or not beside.is_file():
            return step
        try:
            return whole(json.loads(beside.read_bytes()).get("global_steps"))
        except (ValueError, AttributeError, RecursionError):
            raise DataError(f"{beside} is not the JSON that skip.rollout writes.") from None

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

    # -- rows -----------------------------------------------------------------------------------

    def row(self, i: int, groups: dict[str, int]) -> Row:
        where = f"{self.path}: row {i}"
        prompt, is_prompt = self._part("prompts", i, where)
        reply, is_reply = self._part("responses", i, where)
        ids = np.concatenate([prompt[is_prompt], reply[is_reply]])

        def response(name: str) -> Array | None:
            """[tokens of the response], without padding."""
            values = self._row(name, i, where)
            if values is not None and len(values) != len(is_reply):
                raise DataError(
                    f"{where}: {name} has {len(values)} places, and responses have {len(is_reply)}."
                )
            return None if values is None else values[is_reply]

        def column(name: str) -> Array | None:
            values = response(name)
            return None if values is None else at_the_end(values, len(ids), where)

        trained = response("response_mask")
        if trained is None:
            trained = np.ones(int(is_reply.sum()), np.bool_)
        mask = at_the_end(trained.astype(np.bool_), len(ids), where, fill=False, dtype="?")
        scores = response("token_level_scores")
        if scores is None:
            scores = response("rm_scores")
        first, last = (self.of_row(name, i) for name in ("min_global_steps", "max_global_steps"))
        version = first if first == last else None
        uid = self.of_row("uid", i)
        return Row(
            row_id=row_name(self.step, i),
            token_ids=ids,
            loss_mask=mask,
            columns={
                "prompt_lengths": int(is_prompt.sum()),
                "rollout_logprobs": column("rollout_log_probs"),
                "trainer_logprobs": column("old_log_probs"),
                "advantages": column("advantages"),
                "routed_experts": self._routes(i, is_prompt, is_reply, where),
                "rewards": None if scores is None else float(scores.sum()),
                "policy_version": None
                if version is None
                else np.where(mask, version, -1).astype(np.int32),
                # step S trains the weights that step S - 1 made
                "trainer_version": None if version is None or self.step is None else self.step - 1,
                "groups": None if uid is None else groups.setdefault(str(uid), len(groups)),
                "steps": self.step,
            },
        )

    def of_row(self, name: str, i: int) -> Any:
        values = self.per_row.get(name, ())
        return values[i] if i < len(values) else None

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
        """(ids, true where an id is no padding) of the prompt or the response."""
        ids = ids_of(self._row(name, i, where), f"{where}: {name}")
        if isinstance(self.tensors[name], list):
            return ids, np.ones(len(ids), np.bool_)  # jagged: never padded
        attended = self._row("attention_mask", i, where)
        if attended is None:
            raise DataError(
                f"{where}: the batch has no attention_mask, so that padding and text cannot be "
                "told apart. Save it with attention_mask."
            )
        widths = [self.tensors[part].shape[1] for part in ("prompts", "responses")]
        if len(attended) != sum(widths):
            raise DataError(
                f"{where}: attention_mask has {len(attended)} places; prompts and responses have "
                f"{sum(widths)} together."
            )
        part = attended[: widths[0]] if name == "prompts" else attended[widths[0] :]
        return ids, part.astype(np.bool_)

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
