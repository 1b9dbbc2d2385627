"""How fast the doctor is: facts in tokens per second and core, and a whole diagnosis of a file.

    python benchmarks/doctor_facts.py [--tokens N] [--megabytes N]

Rows are agent rows of some hundred tokens in several turns, with messages, the engine's ids, both
sides' log-probs, and dense noise. Time is processor time of one thread, without reading files; of
the file it is the time of `lockstep doctor` from its start to its verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import Row, main, note, row, seconds_of

import numpy as np

from lockstep.doctor.examine import examine
from lockstep.doctor.facts.base import FACTS
from lockstep.doctor.findings import Setting
from lockstep.doctor.rows import Rows
from lockstep.models.locate import locate_model
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message

GOAL = 2e6
"""Tokens per second and core."""
MOST_SECONDS = 30
"""For a file of 100 MB, a second process included."""


def dialogue(renderer: ChatMLRenderer, number: int) -> tuple[list[int], list[int], list[Message]]:
    """(ids, turn of each, messages) of one row."""
    words = " ".join(f"word{(number * 7 + i) % 97}" for i in range(90))
    said = [Message(role="user", content=f"question {number}: {words}")]
    ids = list(renderer.render(said))
    turn = [-1] * len(ids)
    for at in range(3):
        reply = Message(role="assistant", content=f"reply {at}: {words}")
        drawn = list(renderer.render_reply(reply))
        after = Message(role="user", content="go on")
        glue = list(renderer.extend(drawn, [after])) if at < 2 else []
        ids, turn = [*ids, *drawn, *glue], [*turn, *([at] * len(drawn)), *([-1] * len(glue))]
        said += [reply, after] if at < 2 else [reply]
    return ids, turn, said


def make_rows(renderer: ChatMLRenderer, num_tokens: int) -> Rows:
    made = [dialogue(renderer, number) for number in range(100)]
    chosen: list[Any] = []
    while sum(len(ids) for ids, *_ in chosen) < num_tokens:
        chosen.append(made[len(chosen) % len(made)])
    ids = [np.array(one, np.int32) for one, *_ in chosen]
    turns = [np.array(turn, np.int32) for _, turn, _ in chosen]
    turn = np.concatenate(turns)
    rng = np.random.default_rng(0)
    trainer = -rng.exponential(1.0, len(turn))
    rollout = np.minimum(trainer + rng.normal(0, 0.01, len(turn)), 0)
    replies = [
        tuple(row[t == n] for n in range(int(t.max()) + 1))
        for row, t in zip(ids, turns, strict=True)
    ]
    sent = [(row[: int(np.argmax(t >= 0))],) for row, t in zip(ids, turns, strict=True)]
    return Rows(
        row_ids=tuple(map(str, range(len(ids)))),
        offsets=np.cumsum([0, *map(len, ids)]),
        token_ids=np.concatenate(ids),
        loss_mask=turn >= 0,
        turn=turn,
        is_sampled=turn >= 0,
        rollout_logprobs=np.where(turn >= 0, rollout, np.nan).astype(np.float32),
        trainer_logprobs=np.where(turn >= 0, trainer, np.nan).astype(np.float32),
        messages=tuple(tuple(said) for *_, said in chosen),
        engine_ids=tuple(replies),
        engine_prompt_ids=tuple(sent),
    )


def write_lines(rows: Rows, path: Path, num_bytes: int) -> int:
    """JSON lines of about this size; the number of tokens in them."""
    lines = []
    for number, at in enumerate(rows.slices):
        line = {
            "token_ids": rows.token_ids[at].tolist(),
            "loss_mask": rows.loss_mask[at].astype(int).tolist(),
            "turn": rows.turns[at].tolist(),
        }
        for name in ("rollout_logprobs", "trainer_logprobs"):
            values = getattr(rows, name)[at].tolist()
            line[name] = [None if x != x else round(x, 7) for x in values]
        assert rows.messages is not None, "they are made"
        line["messages"] = [m.to_dict() for m in rows.messages[number] or ()]
        lines.append(json.dumps(line) + "\n")
    size = tokens = 0
    with open(path, "w") as file:
        while size < num_bytes:
            for line, count in zip(lines, rows.sizes.tolist(), strict=True):
                file.write(line)
                size, tokens = size + len(line), tokens + count
                if size >= num_bytes:
                    break
    return tokens


def compare(*, tokens: int = 1_000_000, megabytes: int = 100) -> Iterator[Row]:
    model = locate_model("tiny-qwen3")
    renderer = ChatMLRenderer(Tokenizer.from_file(model))
    rows = make_rows(renderer, tokens)
    setting = Setting(tokenizer=renderer.tokenizer, stop_ids=frozenset(renderer.stop_ids))
    for name, fact in FACTS.items():
        if all(need in rows.has | setting.has for need in fact.needs):
            seconds = seconds_of(lambda fact=fact: list(fact.look(rows, setting)))
            note(f"{name}: {rows.num_tokens / max(seconds, 1e-9):,.0f} tokens/s")
    seconds = seconds_of(lambda: examine(lambda: [rows], setting, has=rows.has, is_live=True))
    yield row("the doctor's facts", rows.num_tokens / seconds, GOAL, "tokens/s", better="higher",
              how="one core; the peer is the goal")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        num_tokens = write_lines(rows, path, megabytes << 20)
        words = ["lockstep.cli", "doctor", str(path), "--json", "--tokenizer", str(model)]
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, check=False)
        seconds = time.perf_counter() - began
    how = f"{num_tokens:,} tokens, exit code {done.returncode}; the peer is the goal"
    yield row(f"lockstep doctor, {megabytes} MB of JSON lines", seconds,
              MOST_SECONDS * megabytes / 100, "s", how=how)  # fmt: skip


if __name__ == "__main__":
    main(compare, short={"tokens": 300_000, "megabytes": 20})
