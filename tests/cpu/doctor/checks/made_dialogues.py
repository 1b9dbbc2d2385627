"""Rows of dialogues as a sound run makes them, token by token, and what defects do to them.

Log-probs are a hash of what stands before: a fifth of the tokens is forced, the others are spread.
Both sides have the same up to `noise`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import Examination, Stage, all_stages, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.renderers.base import Renderer
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.harmony import HARMONY_TOKENS, HarmonyRenderer
from lockstep.testing.tokenizers import CHATML_TOKENS, byte_tokenizer
from lockstep.types import Message, ToolCall

_MERGES = [("a", "s"), ("as", "s"), ("u", "s"), ("us", "e"), ("i", "s"), ("t", "h"), ("th", "e")]
_TOKENIZER = byte_tokenizer(
    merges=_MERGES, control_tokens=[*CHATML_TOKENS, *HARMONY_TOKENS, "<|endoftext|>"]
)
RENDERERS: dict[str, Renderer] = {
    "chatml": ChatMLRenderer(_TOKENIZER),
    "harmony": HarmonyRenderer(_TOKENIZER),
}
PAD_ID = _TOKENIZER.control_id("<|endoftext|>")
WORDS = (
    *("the", "moon", "is", "as", "old", "as", "the", "house", "of", "this", "man", "and"),
    *("nobody", "uses", "it", "but", "a", "thin", "mouse"),
)


@dataclass
class Made:
    """One row; lists of equal length."""

    name: str
    ids: list[int]
    turn: list[int]
    rollout: list[float]
    trainer: list[float]
    mask: list[bool]
    prompt_length: int = 0
    engine_ids: tuple[list[int], ...] = ()

    def spans(self) -> list[tuple[int, int]]:
        """(begin, end) of each sampled turn."""
        out = []
        for number in range(max(self.turn) + 1):
            at = [i for i, t in enumerate(self.turn) if t == number]
            out += [(at[0], at[-1] + 1)] if at else []
        return out

    def take(self, source: Sequence[int]) -> Made:
        """Of these of its tokens."""
        lists = {
            name: [getattr(self, name)[i] for i in source]
            for name in ("ids", "turn", "rollout", "trainer", "mask")
        }
        return replace(self, **lists)

    def insert(self, at: int, ids: Sequence[int]) -> Made:
        """With observed ids before its token `at`."""
        nan = [float("nan")] * len(ids)
        return replace(
            self,
            ids=[*self.ids[:at], *ids, *self.ids[at:]],
            turn=[*self.turn[:at], *[-1] * len(ids), *self.turn[at:]],
            rollout=[*self.rollout[:at], *nan, *self.rollout[at:]],
            trainer=[*self.trainer[:at], *nan, *self.trainer[at:]],
            mask=[*self.mask[:at], *[False] * len(ids), *self.mask[at:]],
        )


def dialogues(
    family: str,
    num_rows: int = 40,
    *,
    seed: int = 0,
    noise: float = 1e-6,
    max_turns: int = 3,
    max_turn_tokens: int = 10_000,
) -> list[Made]:
    """Rows of one to `max_turns` turns: calls of a tool, then an answer. A turn longer than
    `max_turn_tokens` is cut off."""
    rng = np.random.default_rng(seed)
    renderer = RENDERERS[family]

    def words(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS, size=int(rng.integers(low, high))))

    rows = []
    for number in range(num_rows):
        ids = renderer.render(
            [Message(role="system", content="be brief"), Message(role="user", content=words(3, 9))]
        )
        turn, prompt_length = [-1] * len(ids), len(ids)
        answers = []
        num_turns = int(rng.integers(1, max_turns + 1))
        for at in range(num_turns):
            if at + 1 < num_turns:
                call = ToolCall(name="find", arguments=f'{{"q": "{words(1, 4)}"}}')
                message = Message(role="assistant", tool_calls=(call,))
            else:
                message = Message(role="assistant", content=words(2, 14))
            sampled = renderer.render_reply(message)[:max_turn_tokens]
            answers.append(sampled)
            ids, turn = [*ids, *sampled], [*turn, *[at] * len(sampled)]
            if at + 1 < num_turns:
                reply = Message(role="tool", name="find", content=words(1, 8))
                more = renderer.extend(sampled, [reply])
                ids, turn = [*ids, *more], [*turn, *[-1] * len(more)]
        is_sampled = np.array(turn) >= 0
        true = -np.array([_surprise(ids[: i + 1]) for i in range(len(ids))])
        true = np.where(is_sampled, np.minimum(true, -1e-7), np.nan)
        other = np.minimum(true + rng.normal(0, noise, len(ids)) * (true < -1e-3), 0.0)
        rows.append(
            Made(
                f"r{number}", ids, turn, true.tolist(), other.tolist(), is_sampled.tolist(),
                prompt_length, tuple(answers),
            )
        )  # fmt: skip
    return rows


def _surprise(ids: Sequence[int]) -> float:
    """Nats of the last id after those before it: the same wherever they stand."""
    code = zlib.crc32(np.array(ids, np.int32).tobytes())
    nats = -0.8 * float(np.log1p(-(code % 99_991) / 99_991))
    return nats * (1e-6 if code % 5 == 0 else 1.0)


def rows_of(
    made: Sequence[Made], *, is_sampled: bool = True, engine: bool = False, trainer: bool = True
) -> Rows:
    """As a dump that knows what was sampled, or only its mask."""
    turn = np.concatenate([np.array(row.turn, np.int32) for row in made])
    return Rows(
        row_ids=tuple(row.name for row in made),
        offsets=np.cumsum([0, *(len(row.ids) for row in made)]),
        token_ids=np.concatenate([np.array(row.ids, np.int32) for row in made]),
        loss_mask=np.concatenate([np.array(row.mask, np.bool_) for row in made]),
        rollout_logprobs=np.concatenate([np.array(row.rollout, np.float32) for row in made]),
        trainer_logprobs=np.concatenate([np.array(row.trainer, np.float32) for row in made])
        if trainer
        else None,
        is_sampled=turn >= 0 if is_sampled else None,
        turn=turn if is_sampled else None,
        prompt_lengths=np.array([row.prompt_length for row in made]),
        engine_ids=tuple(
            tuple(np.array(answer, np.int32) for answer in row.engine_ids) for row in made
        )
        if engine
        else None,
    )


def setting_of(family: str) -> Setting:
    """All that a run of this renderer knows."""
    renderer = RENDERERS[family]
    return Setting(
        renderer=renderer, tokenizer=renderer.tokenizer, stop_ids=frozenset(renderer.stop_ids)
    )


def examined(rows: Rows, setting: Setting | None = None) -> Examination:
    has = {
        name
        for name in (
            *("rollout_logprobs", "trainer_logprobs", "is_sampled", "turn"),
            *("prompt_lengths", "engine_ids"),
        )
        if getattr(rows, name) is not None
    }
    stages = [Stage(checks=checks) for checks in all_stages().values()]
    return examine(lambda: [rows], stages, setting or Setting(), has=frozenset(has))


def causes(rows: Rows, setting: Setting | None = None) -> list[str]:
    """Of the findings that differ, in the order of the checks."""
    return [f.cause for f in examined(rows, setting).findings if f.verdict == "differs"]


def share_of(rows: Rows, cause: str, setting: Setting | None = None) -> float:
    return sum(s.k2 for s in examined(rows, setting).shares if s.cause == cause)


def hit(rows: Sequence[Made], change: Callable[[Made], Made], share: float = 1.0) -> list[Made]:
    """`rows` with `change` made to a share of them, evenly spread."""
    wanted = round(share * len(rows))
    chosen = {round(i * len(rows) / wanted) for i in range(wanted)}
    return [change(row) if i in chosen else row for i, row in enumerate(rows)]
