"""Supervised training on dialogues, or on ids with a loss mask, from files: JSON lines, or others.

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    {"token_ids": [5, 6, 7], "loss_mask": [0, 0, 1],
     "teacher_ids": [null, null, [7, 9]], "teacher_logprobs": [null, null, [-0.2, -1.9]]}

The third kind has soft targets: a teacher's likeliest ids at each trained token, the same number at
every token of the file. The rows of one file are all soft, or none is.

A dialogue is written by the same renderer calls as in a rollout: the first prompt once, each reply
as the ids that the model would sample, and between replies only new messages.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.dialogues import BESIDE, COLUMNS, Dialogue, read_dialogue, read_weight
from lockstep.errors import ConfigError, DataError, LockstepError, located
from lockstep.objectives.losses import supervised_loss
from lockstep.renderers.base import Renderer, dialogue_pieces
from lockstep.renderers.jinja.marks import Marks
from lockstep.renderers.pieces import encode_pieces
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.store.run import Run, is_run, load_run
from lockstep.store.tables import data_files, read_rows
from lockstep.training.config import HeldOutConfig, SFTConfig
from lockstep.training.trainer import Metrics, Trainer
from lockstep.types import Sample, frozen_ids

MASS_ROUNDING = 1e-3  # of probabilities that were written with few digits


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTExample(Dialogue):
    """A dialogue to train on."""

    where: str
    """`path:line`, for errors."""


def load_examples(
    path: str | Path, *, min_reward: float = SFTConfig.min_reward, setting: str = "sft.path"
) -> list[SFTExample | Sample]:
    """Reads and checks the whole file, of any form of lockstep/store/tables.py, or folder of such;
    a line that gives ids is a row already. Of a run: see `sampled_rows`. Raises DataError
    `path:line` for the first bad line."""
    if is_run(Path(path).expanduser()):
        return [*sampled_rows(load_run(Path(path).expanduser()), min_reward=min_reward)]
    out: list[SFTExample | Sample] = []
    rows = (row for file in data_files(str(path), setting=setting) for row in read_rows(file))
    for where, record in rows:
        try:
            out.append(_read_record(record, where))
            if num_listed(out[-1]) != (expected := num_listed(out[0])):
                raise DataError(
                    f"this line lists {num_listed(out[-1])} teacher_ids per token, but the first "
                    f"line {expected}. All lines of a file must list equally many. Split the file."
                )
        except (LockstepError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: {error}") from error
    if not out:
        raise DataError(f"{path} is empty. It needs an object per line with messages or token_ids.")
    return out


def sampled_rows(run: Run, *, min_reward: float) -> list[Sample]:
    """The tokens of a run's training episodes with at least this reward, as they were sampled:
    rejection sampling. `Sample.group` numbers the tasks from 1. Raises DataError if no episode has
    it."""
    out: list[Sample] = []
    tasks: dict[str, int] = {}
    rewards: list[float] = []
    for record in run.trajectories():
        episode = record.trajectory
        if episode.status == "failed" or episode.policy:
            continue
        rewards += episode.rewards.values()
        kept = {leaf: reward for leaf, reward in episode.rewards.items() if reward >= min_reward}
        for row in replace(episode, rewards=kept).rows():
            where = f"{run.path}#{row.id}"
            mask = row.loss_mask.astype(np.float32)
            out.append(_make_sample(where, row.token_ids.tolist(), mask))
            out[-1].group = tasks.setdefault(record.task.id, len(tasks) + 1)
    if not out:
        highest = f"the highest of {len(rewards)} is {max(rewards):g}" if rewards else "it has none"
        raise DataError(
            f"{run.path}: no stored training episode has a reward of at least {min_reward:g}; "
            f"{highest}. Set sft.min_reward lower, or name a run that solves some tasks."
        )
    return out


def hold_out(
    examples: Sequence[SFTExample | Sample], config: HeldOutConfig, *, seed: int
) -> tuple[list[SFTExample | Sample], list[SFTExample | Sample]]:
    """(examples to train on, examples to test). Rows of one task are on the same side."""
    room = min(config.num_rows, int(config.share * len(examples)))
    tasks = [getattr(example, "group", 0) or -at for at, example in enumerate(examples)]
    sizes, held = Counter(tasks), set[int]()
    for task in np.random.default_rng([seed, 1]).permutation(sorted(sizes)).tolist():
        if sizes[task] <= room:
            held.add(task)
            room -= sizes[task]
    sides: tuple[list[SFTExample | Sample], list[SFTExample | Sample]] = [], []
    for task, example in zip(tasks, examples, strict=True):
        sides[task in held].append(example)
    return sides


def held_out_loss(trainer: Trainer, rows: Sequence[Sample]) -> float:
    """The weighted mean of -log-prob over the trained tokens of the rows."""
    is_trained = np.concatenate([row.loss_mask for row in rows])
    weights = np.concatenate([row.columns["weights"] for row in rows])[is_trained].astype(float)
    logprobs = np.concatenate(trainer.forward(rows, column=None))[is_trained]
    return float(-(weights * logprobs).sum() / weights.sum())


def num_listed(example: SFTExample | Sample) -> int:
    """Ids that a teacher lists per token; 0 without soft targets."""
    ids = example.columns.get("teacher_ids") if isinstance(example, Sample) else None
    return 0 if ids is None else ids.shape[1]


def sft_row(
    example: SFTExample | Sample,
    renderer: Renderer | None,
    *,
    observed_weight: float = 0.0,
    word_weights: Mapping[str, float] | None = None,
) -> Sample:
    """One example as a training row with the column `weights`; see SFTConfig for the weights.

    A token is trained where its weight is above 0. renderer: needed for dialogues. Raises
    DataError `path:line` if the dialogue cannot be written.
    """
    if isinstance(example, Sample):
        if observed_weight == 0 or num_listed(example):  # no teacher scored observed tokens
            return example
        fill = np.float32(observed_weight)
        filled = np.where(example.loss_mask, example.columns["weights"], fill)
        return _make_sample(example.id, example.token_ids.tolist(), filled)
    if renderer is None:
        raise ConfigError(f"{example.where} has messages: a renderer is needed to write them.")
    ids: list[int] = []
    weights: list[npt.NDArray[np.float32]] = []
    with located(example.where, DataError):
        for piece_ids, at in dialogue_pieces(renderer, example.messages, example.tools):
            ids += piece_ids
            if at is not None and example.weights[at]:
                _check_spelling(renderer, example.messages[at].content, f"message {at}")
            if at is None:
                weights.append(np.full(len(piece_ids), observed_weight, np.float32))
            else:
                of_words = token_weights(renderer.tokenizer, piece_ids, word_weights or {})
                weights.append(of_words * np.float32(example.weights[at]))
    return _make_sample(example.where, ids, np.concatenate(weights))


def _check_spelling(renderer: Renderer, content: str, where: str) -> None:
    """Raises DataError for a content that has thinking or calls between control tokens: as text,
    it would be trained letter by letter."""
    pieces = _marks_of(renderer.tokenizer).pieces(content, "")
    # One piece is text alone.
    read = renderer.parse(encode_pieces(renderer.tokenizer, pieces)) if len(pieces) > 1 else None
    if read is not None and (read.thinking or read.tool_calls):
        part = "thinking" if read.thinking else "calls"
        raise DataError(
            f"{where}: content spells {part} in control tokens, and text never becomes a control "
            "token. Move it to `thinking` or `tool_calls`, or set the message's `weight` to 0."
        )


_marks_of = lru_cache(maxsize=1)(Marks)


def soft_record(sample: Sample) -> dict[str, Any]:
    """A row that a teacher has scored (`Trainer.list_likely`) as a line of the file with soft
    targets."""
    trained = sample.loss_mask.tolist()

    def at_trained(name: str) -> list[Any]:
        values = sample.columns[name].tolist()
        return [value if is_it else None for value, is_it in zip(values, trained, strict=True)]

    return {
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": [int(is_it) for is_it in trained],
        "teacher_ids": at_trained("teacher_ids"),
        "teacher_logprobs": at_trained("teacher_ids_logprobs"),
    }


def token_weights(
    tokenizer: Tokenizer, token_ids: Sequence[int], word_weights: Mapping[str, float]
) -> npt.NDArray[np.float32]:
    """[T]: the weight of the word that a token spells, the largest of several; 1 for other tokens.

    A word is matched whole, on the bytes, however it is cut into tokens; a control token belongs to
    no word.
    """
    out = np.ones(len(token_ids), np.float32)
    if not word_weights:
        return out
    control_ids = tokenizer.control_ids
    pieces = [b"\0" if i in control_ids else tokenizer.token_bytes(i) for i in token_ids]
    ends = np.cumsum([len(p) for p in pieces])
    starts = ends - [len(p) for p in pieces]
    text = b"".join(pieces)
    is_matched = np.zeros(len(token_ids), bool)
    for word, weight in word_weights.items():
        for match in re.finditer(rb"(?<!\w)" + re.escape(word.encode()) + rb"(?!\w)", text):
            inside = (starts < match.end()) & (ends > match.start())
            out[inside] = np.where(is_matched[inside], np.maximum(out[inside], weight), weight)
            is_matched |= inside
    return out


def sft_rows(
    examples: Sequence[SFTExample | Sample],
    renderer: Renderer | None,
    config: SFTConfig,
    *,
    max_tokens: int,
    seed: int = 0,
) -> Iterator[Sample]:
    """An endless stream of rows, pass after pass over the examples.

    renderer: needed for dialogues. max_tokens: longest row. Raises
    DataError for a longer one, or if all are and long_rows=drop.
    """
    row_of = partial(sft_row, renderer=renderer, observed_weight=config.observed_weight)
    for epoch in count():
        order = np.arange(len(examples))
        if config.shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(len(examples))
        num_kept = 0
        for index in order.tolist():
            if fits(sample := row_of(examples[index]), config, max_tokens):
                num_kept += 1
                yield sample
        if not num_kept:
            raise DataError(
                f"every one of the {len(examples)} examples is longer than {max_tokens} tokens. "
                "Raise max_tokens and trainer.max_tokens_per_microbatch."
            )


def fits(sample: Sample, config: SFTConfig, max_tokens: int) -> bool:
    """True if a row is short enough. Raises DataError for a longer row, unless long_rows=drop."""
    if len(sample) > max_tokens and config.long_rows == "error":
        raise DataError(
            f"{sample.id}: {len(sample)} tokens, at most {max_tokens} fit. Raise "
            "max_tokens and trainer.max_tokens_per_microbatch, shorten the example, or "
            "leave such rows out with sft.long_rows=drop."
        )
    return len(sample) <= max_tokens


def run_sft(
    trainer: Trainer, rows: Iterator[Sample], config: SFTConfig, *, first_step: int = 0
) -> Iterator[Metrics]:
    """Trains, and yields the metrics of each step (`step` among them) as soon as it is done.

    The loss is the weighted mean over the tokens of the step's rows: of -log-prob, or with soft
    targets of KL(teacher || policy).
    """
    for step in range(first_step, config.steps):
        began = time.perf_counter()
        batch = [next(rows) for _ in range(config.rows_per_step)]
        weight = sum(float(s.columns["weights"][s.loss_mask].sum()) for s in batch)
        metrics = trainer.forward_backward(batch, supervised_loss, denominator=weight)
        metrics |= trainer.optim_step()
        yield {"step": step, **metrics, "time/train_seconds": time.perf_counter() - began}


# -- mechanism ----------------------------------------------------------------------------------


def _read_record(source: Mapping[str, Any], where: str) -> SFTExample | Sample:
    """Raises DataError without `where`, which is put before it."""
    if not isinstance(source, Mapping):
        raise DataError(f"expected an object, found {type(source).__name__}.")
    source = {key: value for key, value in source.items() if value is not None}
    known = {"token_ids", "loss_mask", "weights", "teacher_ids", "teacher_logprobs"}
    if is_dialogue := any(name in source for name in COLUMNS):
        known = {next(name for name in COLUMNS if name in source), *BESIDE}
    if not is_dialogue and "token_ids" not in source:
        raise DataError(
            "expected `messages` (OpenAI's form), `conversations` (ShareGPT's), or `token_ids` "
            f"with `loss_mask`; found {sorted(source)}."
        )
    if unknown := sorted(set(source) - known):
        raise DataError(f"unknown keys {unknown}: leave them out. Known here are {sorted(known)}.")
    if not is_dialogue:
        return _read_ids(source, where)
    found = read_dialogue(source)
    if not found.messages or found.messages[-1].role != "assistant":
        last = f"the last is a {found.messages[-1].role}'s" if found.messages else "there is none"
        raise DataError(f"the last message must be an assistant's, {last}.")
    return SFTExample(
        where=where, messages=found.messages, weights=found.weights, tools=found.tools
    )


def _read_ids(source: Mapping[str, Any], where: str) -> Sample:
    if "loss_mask" not in source:
        raise DataError(f"expected `loss_mask` beside `token_ids`; found {sorted(source)}.")
    ids, mask, weights = source["token_ids"], source["loss_mask"], source.get("weights")
    weights = [1.0] * len(mask) if weights is None else weights
    for name, values in (("token_ids", ids), ("loss_mask", mask), ("weights", weights)):
        if not isinstance(values, list) or len(values) != len(ids) or not values:
            raise DataError(f"{name} must be a list with one entry per token of token_ids.")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise DataError("token_ids must be integers.")
    wrong = next((v for v in mask if v not in (0, 1)), None)
    if wrong is not None:
        raise DataError(f"loss_mask must hold 0 and 1 (or false and true), found {wrong}.")
    if mask[0]:
        raise DataError("loss_mask[0] is set, but nothing predicts the first token.")
    loss = [read_weight(w, f"weights[{i}]") for i, w in enumerate(weights)]
    sample = _make_sample(where, ids, np.array(mask, bool) * np.array(loss, np.float32))
    if "teacher_ids" in source or "teacher_logprobs" in source:
        _add_soft_targets(sample, source.get("teacher_ids"), source.get("teacher_logprobs"))
    return sample


def _add_soft_targets(sample: Sample, listed: Any, logprobs: Any) -> None:
    size, trained = len(sample), np.flatnonzero(sample.loss_mask).tolist()
    for name, values in (("teacher_ids", listed), ("teacher_logprobs", logprobs)):
        if not isinstance(values, list) or len(values) != size:
            raise DataError(f"{name} must be a list with one entry per token of token_ids.")
        if missing := [i for i in trained if not isinstance(values[i], list) or not values[i]]:
            raise DataError(f"{name}[{missing[0]}] must list numbers: the token is trained.")
    num_listed = len(listed[trained[0]])
    ids = np.zeros((size, num_listed), np.int32)
    values = np.full((size, num_listed), np.nan, np.float32)
    for i in trained:
        if len(listed[i]) != num_listed or len(logprobs[i]) != num_listed:
            raise DataError(
                f"teacher_ids[{i}] lists {len(listed[i])} ids with {len(logprobs[i])} log-probs, "
                f"but the first trained token {num_listed}. All tokens must list equally many."
            )
        ids[i] = frozen_ids(listed[i], where=f"teacher_ids[{i}]")
        values[i] = logprobs[i]
        if len(set(listed[i])) < num_listed:
            raise DataError(f"teacher_ids[{i}] lists an id twice.")
        if not (np.isfinite(values[i]).all() and np.exp(values[i]).sum() <= 1 + MASS_ROUNDING):
            raise DataError(
                f"teacher_logprobs[{i}] must be finite natural logs of probabilities that sum up "
                f"to 1 at most; they sum up to {np.exp(values[i]).sum():.4f}."
            )
    sample.set("teacher_ids", ids)
    sample.set("teacher_ids_logprobs", values)


def _make_sample(where: str, ids: Sequence[int], weights: npt.NDArray[np.floating[Any]]) -> Sample:
    """Trains the tokens with a weight; never the first, which nothing predicts."""
    weights = weights.astype(np.float32)
    weights[0] = 0.0
    if not weights.any():
        raise DataError("nothing in this row would be trained.")
    return Sample(
        id=where,
        token_ids=frozen_ids(ids, where=where),
        loss_mask=weights > 0,
        columns={"weights": weights},
    )
