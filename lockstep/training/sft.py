"""Supervised training on dialogues, or on ids with a loss mask, from a JSONL file.

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}

A dialogue is written by the same renderer calls as in a rollout: the first prompt once, each reply
as the ids that the model would sample, and only what lies between replies after that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.objectives.losses import supervised_loss
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.training.config import SFTConfig
from lockstep.training.trainer import Metrics, Trainer
from lockstep.types import Message, Sample, ToolSchema, frozen_ids

_DIALOGUE_KEYS = {"messages", "tools"}
_ID_KEYS = {"token_ids", "loss_mask", "weights"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SFTExample:
    """One line of the file: a dialogue, or ids."""

    where: str
    """`path:line`, for messages."""
    messages: tuple[Message, ...] = ()
    message_weights: tuple[float, ...] = ()
    """Per message; that of an assistant's scales the loss of its tokens, and 0 leaves them out."""
    tools: tuple[ToolSchema, ...] = ()
    sample: Sample | None = None
    """Set where the line gives ids: nothing is left to render."""


def load_examples(path: str | Path) -> list[SFTExample]:
    """Reads and checks the whole file. Raises DataError `path:line` for the first bad line."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} does not exist. sft.path names a JSONL file, an object per line.")
    out: list[SFTExample] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                out.append(_read_line(line, f"{path}:{number}"))
    if not out:
        raise DataError(f"{path} is empty. It needs an object per line with messages or token_ids.")
    return out


def sft_row(
    example: SFTExample,
    renderer: Renderer | None,
    *,
    observed_weight: float = 0.0,
    word_weights: Mapping[str, float] | None = None,
) -> Sample:
    """One example as a training row with the column `weights`; see SFTConfig for the weights.

    A token is trained where its weight is above 0. `renderer` is needed for dialogues. Raises
    DataError `path:line` if the dialogue cannot be written.
    """
    if example.sample is not None:
        return _with_observed(example.sample, observed_weight)
    if renderer is None:
        raise ConfigError(f"{example.where} has messages: a renderer is needed to write them.")
    try:
        pieces = list(_write_dialogue(example, renderer))
    except LockstepError as error:
        raise DataError(f"{example.where}: {error}") from error
    ids: list[int] = []
    weights: list[npt.NDArray[np.float32]] = []
    for piece_ids, weight in pieces:
        ids += piece_ids
        if weight is None:
            weights.append(np.full(len(piece_ids), observed_weight, np.float32))
        else:
            of_words = token_weights(renderer.tokenizer, piece_ids, word_weights or {})
            weights.append(of_words * np.float32(weight))
    return _make_sample(example.where, ids, np.concatenate(weights))


def token_weights(
    tokenizer: Tokenizer, token_ids: Sequence[int], word_weights: Mapping[str, float]
) -> npt.NDArray[np.float32]:
    """[T]: 1, or for the tokens that spell one of the words, its weight; the largest where several
    meet. A word is matched whole, on the bytes, however it is cut into tokens; a control token is
    no part of a word."""
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


class SFTRows:
    """An endless stream of rows, pass after pass over the examples, that can be resumed.

    renderer_of: the renderer of the row at a position of the stream. A tokenizer with BPE dropout
    that is seeded by it writes every pass differently and repeats exactly; None if all examples are
    ids.
    """

    def __init__(
        self,
        examples: Sequence[SFTExample],
        renderer_of: Callable[[int], Renderer] | None,
        config: SFTConfig,
        *,
        max_tokens: int,
        seed: int = 0,
    ) -> None:
        """max_tokens: of a row, where the config names none. Raises DataError for no example."""
        if not examples:
            raise DataError("there is no example to train on.")
        self.examples = examples
        self.renderer_of = renderer_of
        self.config = config
        self.max_tokens = config.max_tokens or max_tokens
        self.seed = seed
        self.position = 0
        """Examples taken so far, the dropped ones included."""
        self.num_dropped = 0
        """Examples left out because they were too long."""

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        for _ in range(len(self.examples)):
            sample = self._take()
            if sample is not None:
                return sample
        raise DataError(
            f"every one of the {len(self.examples)} examples is longer than {self.max_tokens} "
            "tokens. Raise sft.max_tokens and trainer.max_tokens_per_microbatch."
        )

    def _take(self) -> Sample | None:
        epoch, index = divmod(self.position, len(self.examples))
        if self.config.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
            index = int(order[index])
        example = self.examples[index]
        renderer = None if self.renderer_of is None else self.renderer_of(self.position)
        self.position += 1
        sample = sft_row(
            example, renderer,
            observed_weight=self.config.observed_weight, word_weights=self.config.word_weights,
        )  # fmt: skip
        if len(sample) <= self.max_tokens:
            return sample
        if self.config.long_rows == "error":
            raise DataError(
                f"{example.where}: {len(sample)} tokens, at most {self.max_tokens} fit. Raise "
                "sft.max_tokens and trainer.max_tokens_per_microbatch, shorten the example, or "
                "leave such rows out with sft.long_rows=drop."
            )
        self.num_dropped += 1
        return None

    def state_dict(self) -> dict[str, int]:
        """JSON-able; the stream of an equal `SFTRows` goes on with the very next row."""
        return {"position": self.position, "num_dropped": self.num_dropped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position, self.num_dropped = state["position"], state["num_dropped"]


def run_sft(
    trainer: Trainer, rows: Iterator[Sample], config: SFTConfig, *, first_step: int = 0
) -> Iterator[Metrics]:
    """Trains, and yields the metrics of each step (`step` among them) as soon as it is done.

    The loss is the weighted mean of -log-prob over the tokens of the step's rows.
    """
    for step in range(first_step, config.steps):
        batch = [next(rows) for _ in range(config.rows_per_step)]
        weight = sum(float(s.columns["weights"][s.loss_mask].sum()) for s in batch)
        metrics = trainer.forward_backward(
            batch, supervised_loss, denominator=weight, is_linear=True
        )
        yield {"step": float(step), **metrics, **trainer.optim_step()}


# -- mechanism ----------------------------------------------------------------------------------


def _write_dialogue(
    example: SFTExample, renderer: Renderer
) -> Iterator[tuple[list[int], float | None]]:
    """(ids, weight) of each piece in order; the weight is None where no assistant wrote it."""
    waiting: list[Message] = []
    reply: list[int] | None = None
    for message, weight in zip(example.messages, example.message_weights, strict=True):
        if message.role != "assistant":
            waiting.append(message)
            continue
        if reply is None:
            yield renderer.render(waiting, example.tools), None
        else:
            yield renderer.extend(reply, waiting), None
        waiting = []
        reply = renderer.render_reply(message)
        yield reply, weight


def _read_line(line: str, where: str) -> SFTExample:
    try:
        source = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}).") from None
    if not isinstance(source, dict):
        raise DataError(f"{where}: expected an object, found {type(source).__name__}.")
    known = _DIALOGUE_KEYS if "messages" in source else _ID_KEYS
    if unknown := sorted(set(source) - known):
        raise DataError(f"{where}: unknown keys {unknown}; known here are {sorted(known)}.")
    if "messages" in source:
        return _read_dialogue(source, where)
    if "token_ids" not in source or "loss_mask" not in source:
        raise DataError(f"{where}: expected `messages`, or `token_ids` with `loss_mask`.")
    return SFTExample(where=where, sample=_read_ids(source, where))


def _read_dialogue(source: Mapping[str, Any], where: str) -> SFTExample:
    raw = source["messages"]
    if not isinstance(raw, list) or not all(isinstance(m, dict) for m in raw):
        raise DataError(f"{where}: messages must be a list of objects.")
    messages: list[Message] = []
    weights: list[float] = []
    for at, fields in enumerate(raw):
        fields = dict(fields)
        weight = fields.pop("weight", 1.0)
        try:
            messages.append(Message.from_dict(fields))
        except (LockstepError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: message {at}: {error}") from error
        weights.append(_weight(weight, f"{where}: message {at}: weight"))
    if not messages or messages[-1].role != "assistant":
        last = f"the last is a {messages[-1].role}'s" if messages else "there is none"
        raise DataError(
            f"{where}: the last message must be an assistant's, {last}: nothing would be trained "
            "after it. Remove what follows the last reply."
        )
    return SFTExample(
        where=where,
        messages=tuple(messages),
        message_weights=tuple(weights),
        tools=_read_tools(source.get("tools") or [], where),
    )


def _read_tools(raw: Any, where: str) -> tuple[ToolSchema, ...]:
    listed = raw if isinstance(raw, list) else [raw]
    return tuple(
        ToolSchema.from_dict(tool, where=f"{where}: tool {at}") for at, tool in enumerate(listed)
    )


def _read_ids(source: Mapping[str, Any], where: str) -> Sample:
    ids, mask = source["token_ids"], source["loss_mask"]
    weights = source.get("weights")
    for name, values in (("token_ids", ids), ("loss_mask", mask), ("weights", weights)):
        if values is None and name == "weights":
            continue
        if not isinstance(values, list) or len(values) != len(ids) or not values:
            raise DataError(
                f"{where}: {name} must be a list with one entry per token; token_ids and loss_mask "
                "(and weights) have the same length, at least 2."
            )
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise DataError(f"{where}: token_ids must be integers.")
    wrong = next((v for v in mask if v not in (0, 1)), None)
    if wrong is not None:
        raise DataError(f"{where}: loss_mask must hold 0 and 1 (or false and true), found {wrong}.")
    if mask[0]:
        raise DataError(f"{where}: loss_mask[0] is set, but nothing predicts the first token.")
    loss = [_weight(w, f"{where}: weights[{i}]") for i, w in enumerate(weights or [1.0] * len(ids))]
    try:
        return _make_sample(where, ids, np.array(mask, bool) * np.array(loss, np.float32))
    except LockstepError as error:
        raise DataError(f"{where}: {error}") from error


def _weight(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value) or value < 0:
        raise DataError(f"{where}: expected a finite number, at least 0, found {value!r}.")
    return float(value)


def _make_sample(where: str, ids: Sequence[int], weights: npt.NDArray[np.floating[Any]]) -> Sample:
    """Trains what weighs something; the first token never: nothing predicts it."""
    weights = weights.astype(np.float32)
    weights[0] = 0.0
    if not weights.any():
        raise DataError(f"{where}: nothing in this row would be trained.")
    return Sample(
        id=where,
        token_ids=frozen_ids(ids, where=where),
        loss_mask=weights > 0,
        columns={"weights": weights},
    )


def _with_observed(sample: Sample, observed_weight: float) -> Sample:
    if observed_weight == 0:
        return sample
    weights = np.where(sample.loss_mask, sample.columns["weights"], np.float32(observed_weight))
    return _make_sample(sample.id, sample.token_ids.tolist(), weights)
