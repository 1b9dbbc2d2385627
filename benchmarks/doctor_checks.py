"""How fast the doctor's checks are, in tokens per second and core, against loops over rows.

A dump is made: agent rows of a few hundred tokens in several turns, both sides' log-probs, dense
noise, and in every twentieth row a defect. Each check of arrays looks at all of it by itself, then
all together; the checks of text, which encode, are told apart. Time is CPU time of one thread, the
best of the repeats; reading files is not in it.

Against what: the same questions as a trainer asks them in Python, one row after the other (where
each turn ends, zeros, offsets, repeated prompts), written as plainly as they are in such loops.

`lockstep doctor` itself is timed too, from its start to its verdict, on such dumps of --megabytes
each: Parquet and JSON lines, with messages and the tokenizer, without a model.

    python benchmarks/doctor_checks.py [--json] [--tokens N] [--repeats N] [--megabytes N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pyarrow.parquet as pq

from lockstep.doctor.findings import Check, Setting
from lockstep.doctor.checks.examine import all_stages
from lockstep.doctor.rows import Rows
from lockstep.doctor.inputs.base import CHUNK_TOKENS
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.watch import Watch
from lockstep.models.locate import locate_model
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message, ToolCall

NAME = "doctor-checks"
NUM_DIALOGUES = 200
"""Different rows; a dump repeats their ids, with log-probs of its own each time."""
MEAN_TOKENS = 480
"""Tokens of a dialogue, about."""
GOALS = {"arrays": 2e6, "text": 2e5}
"""Tokens per second and core."""
TEXT = {
    "tokens/reencoded",
    "tokens/rerendered",
    "tokens/post_processed",
    "tokens/injected_control",
    "template/thinking_dropped",
    "template/unlike_template",
}
"""Checks that encode, decode or render."""
ASKED = "ids, masks, places"
"""The checks that ask what the loops ask, and more."""
HOW = (
    "tokens per second and core over made agent rows: the nine checks of ids, masks and places "
    "against six of their questions in a loop; best of the repeats, CPU time of one thread"
)
SYLLABLES = ("the", "pet", "sar", "ly", "is", "a", "cat", "tion", "her", "jo", "baker", "in", "ro")
WORDS = tuple(map("".join, itertools.product(SYLLABLES, repeat=3)))
"""2,197 words, so that text is packed no better than people's."""


def make_chunks(
    num_tokens: int, setting: Setting, num_dialogues: int = NUM_DIALOGUES
) -> list[Rows]:
    """Chunks as the doctor reads them, `num_tokens` in all, of so many different dialogues."""
    renderer = setting.renderer
    assert renderer is not None, "made above"
    rng = np.random.default_rng(0)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(low, high))))

    kinds: list[tuple[np.ndarray, np.ndarray, tuple[Message, ...]]] = []
    for _ in range(num_dialogues):
        messages = [
            Message(role="system", content=words(30, 60)),
            Message(role="user", content=words(10, 30)),
        ]
        ids = renderer.render(messages)
        turn = [-1] * len(ids)
        num_turns = int(rng.integers(2, 6))
        for at in range(num_turns):
            call = ToolCall(name="find", arguments=json.dumps({"q": words(1, 4)}))
            message = Message(role="assistant", thinking=words(10, 60), tool_calls=(call,))
            if at + 1 == num_turns:
                message = Message(role="assistant", content=words(10, 40))
            sampled = renderer.render_reply(message)
            messages.append(message)
            ids, turn = [*ids, *sampled], [*turn, *[at] * len(sampled)]
            if at + 1 < num_turns:
                replies = [Message(role="tool", name="find", content=words(10, 60))]
                messages += replies
                glue = renderer.extend(sampled, replies)
                ids, turn = [*ids, *glue], [*turn, *[-1] * len(glue)]
        kinds.append((np.array(ids, np.int32), np.array(turn, np.int32), tuple(messages)))
    chunks: list[Rows] = []
    left = num_tokens
    while left > 0:
        chosen: list[int] = []
        size = 0
        while size < min(left, CHUNK_TOKENS):
            chosen.append(int(rng.integers(num_dialogues)))
            size += len(kinds[chosen[-1]][0])
        chunks.append(_chunk([kinds[i] for i in chosen], rng))
        left -= size
    return chunks


def _chunk(
    rows: Sequence[tuple[np.ndarray, np.ndarray, tuple[Message, ...]]], rng: np.random.Generator
) -> Rows:
    ids = np.concatenate([row[0] for row in rows])
    turn = np.concatenate([row[1] for row in rows])
    offsets = np.cumsum([0, *(len(row[0]) for row in rows)])
    sampled = turn >= 0
    true = -rng.exponential(0.7, len(ids)) * (rng.random(len(ids)) > 0.2)
    rollout = np.where(sampled, true, np.nan).astype(np.float32)
    trainer = np.minimum(rollout + rng.normal(0, 0.01, len(ids)), 0).astype(np.float32)
    for r in range(0, len(rows), 20):
        whole = slice(int(offsets[r]), int(offsets[r + 1]))
        at = np.flatnonzero(sampled[whole]) + whole.start
        if r % 40:
            rollout[at] = np.append(rollout[at][1:], np.float32(0.0))  # shifted
        else:
            rollout[at[::9]] = 0.0  # fillers
    return Rows(
        row_ids=tuple(f"row-{i}" for i in range(len(rows))),
        offsets=offsets,
        token_ids=ids,
        loss_mask=sampled,
        rollout_logprobs=rollout,
        trainer_logprobs=trainer,
        is_sampled=sampled,
        turn=turn,
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        trainer_version=np.zeros(len(rows), np.int64),
        advantages=sampled.astype(np.float32),
        groups=np.arange(len(rows)) // 8,
        steps=np.zeros(len(rows), np.int64),
        rewards=rng.random(len(rows)),
        prompt_lengths=np.array([int(np.flatnonzero(row[1] >= 0)[0]) for row in rows]),
        messages=tuple(row[2] for row in rows),
    )


def fresh(rows: Rows) -> Rows:
    """The same without what earlier checks have computed of it."""
    return rows.with_()


def look_by(kinds: Sequence[type[Check]], setting: Setting, chunks: Sequence[Rows]) -> None:
    """As the examination does: all checks look at a chunk before the next is read."""
    checks = [kind(setting) for kind in kinds]
    for rows in map(fresh, chunks):
        for check in checks:
            check.look(rows)
    for check in checks:
        check.conclude()


def loops(chunks: Sequence[Rows], stops: frozenset[int]) -> dict[str, int]:
    """What such programs count in Python, row by row."""
    counts = dict.fromkeys(("open", "behind", "zeros", "shifted", "twice", "observed"), 0)
    for rows in chunks:
        rollout, trainer = rows.rollout_logprobs, rows.trainer_logprobs
        assert rollout is not None and trainer is not None, "made above"
        for whole in rows.slices:
            ids, mask = rows.token_ids[whole].tolist(), rows.loss_mask[whole].tolist()
            one, other = rollout[whole].tolist(), trainer[whole].tolist()
            at = [i for i, trained in enumerate(mask) if trained]
            for i in at:
                last = i + 1 == len(ids) or not mask[i + 1]
                counts["open"] += last and ids[i] not in stops
                counts["behind"] += not last and ids[i] in stops
                counts["zeros"] += one[i] == 0.0 and other[i] < -0.1
            gaps = {
                by: [abs(other[at[k]] - one[at[k - by]]) for k in range(1, len(at) - 1)]
                for by in (-1, 0, 1)
            }
            means = {by: sum(gap) / max(len(gap), 1) for by, gap in gaps.items()}
            counts["shifted"] += means[0] > 0.05 and min(means, key=lambda by: means[by]) != 0
            begin = mask.index(True) if True in mask else len(ids)
            prompt = ids[:begin]
            counts["twice"] += any(
                ids[i : i + begin] == prompt for i in range(1, len(ids) - begin + 1)
            )
            counts["observed"] += bool(mask[0])
    return counts


def _has(setting: Setting, rows: Rows, name: str) -> bool:
    """Whether the dump, or what is known besides, has what a check needs."""
    values = (getattr(one, name, None) for one in (setting, rows))
    return any(
        value is not None and not (isinstance(value, tuple) and not value) for value in values
    )


def seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """CPU seconds, the least of all runs."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


def look_seconds(chunk: Rows, num_rows: int, tokenizer: Tokenizer, repeats: int) -> float:
    """CPU seconds that `lockstep.watch` takes for rows of a step without a defect."""
    healthy = [i for i in range(len(chunk)) if i % 20]
    unlike = {chunk.token_ids[chunk.slices[i]].tobytes(): i for i in healthy}
    rows = chunk.take(list(unlike.values())[:num_rows]).with_(messages=None)
    with tempfile.TemporaryDirectory() as directory:
        watch = Watch(directory, tokenizer=tokenizer, rows=num_rows, max_share=float("inf"))
        return seconds_of(lambda: watch.look(0, lambda _: rows.with_()), repeats)


def verdict_seconds(name: str, megabytes: float, setting: Setting) -> tuple[float, int]:
    """(seconds of `lockstep doctor` on a dump of this size under this name, tokens in it). No
    dialogue of the dump comes twice, except by chance."""
    with tempfile.TemporaryDirectory() as directory:
        path, num_tokens = Path(directory) / name, round(2e3 * megabytes)
        for _ in range(2):  # a first one, to know the bytes of a token
            chunks = make_chunks(num_tokens, setting, 1 + num_tokens // MEAN_TOKENS)
            size = sum(rows.num_tokens for rows in chunks)
            write_dump(path, chunks)
            num_tokens = round(size * megabytes * 1e6 / path.stat().st_size)
        command = [str(Path(sys.executable).with_name("lockstep")), "doctor", str(path), "--json"]
        command += ["--tokenizer", str(locate_model("tiny-qwen3")), "--renderer", "chatml"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode > 1:
            raise SystemExit(f"lockstep doctor {name}: {done.stderr.strip()[-2000:]}")
        told = f"{path.stat().st_size / 1e6:.3g} MB, {size / 1e6:.3g} M tokens"
        note(f"lockstep doctor {name} ({told}): {seconds:.1f} s to the verdict")
        return seconds, size


def write_dump(path: Path, chunks: Sequence[Rows]) -> None:
    """Parquet, or the same rows as JSON lines."""
    parquet = path.with_suffix(".parquet")
    write_rows(parquet, chunks)
    if path == parquet:
        return
    with path.open("w") as file, pq.ParquetFile(parquet) as rows:
        for batch in rows.iter_batches(256):
            for row in batch.to_pylist():
                for side in ("rollout_logprobs", "trainer_logprobs"):
                    row[side] = [None if value != value else value for value in row[side]]
                file.write(json.dumps(row) + "\n")


def compare(num_tokens: int, repeats: int, megabytes: float) -> dict[str, Any]:
    """Everything, printed as it is found; the JSON line."""
    tokenizer = Tokenizer.from_file(locate_model("tiny-qwen3"))
    renderer = ChatMLRenderer(tokenizer)
    setting = Setting(
        tokenizer=tokenizer, renderer=renderer, stop_ids=frozenset(renderer.stop_ids),
        temperature=1.0, top_p=1.0, top_k=0, generation_defaults={"temperature": 1.0},
    )  # fmt: skip
    chunks = make_chunks(num_tokens, setting)
    size = sum(rows.num_tokens for rows in chunks)
    num_rows = sum(len(rows) for rows in chunks)
    note(f"{size} tokens in {num_rows} rows, {len(chunks)} chunks")
    kinds = [
        kind
        for checks in all_stages().values()
        for kind in checks
        if all(_has(setting, chunks[0], name) for name in kind.needs)
    ]
    rates = {
        kind.name: size / seconds_of(lambda k=kind: look_by([k], setting, chunks), repeats)
        for kind in kinds
    }
    for name, rate in sorted(rates.items(), key=lambda pair: pair[1]):
        note(f"  {name:28s} {rate / 1e6:8.2f} M tokens/s" + ("  (text)" * (name in TEXT)))
    groups = {
        "arrays": [kind for kind in kinds if kind.name not in TEXT],
        ASKED: [k for k in kinds if k.name not in TEXT and "tokens/" in k.name],
        "text": [kind for kind in kinds if kind.name in TEXT],
    }
    together = {
        group: size / seconds_of(lambda m=members: look_by(m, setting, chunks), repeats)
        for group, members in groups.items()
    }
    looks = {str(num): look_seconds(chunks[0], num, tokenizer, repeats) for num in (8, 32, 128)}
    for num, seconds in looks.items():
        note(f"a look of lockstep.watch at {num} rows: {1e3 * seconds:.0f} ms")
    names = ("rows.parquet", "rows.jsonl")
    verdicts = {name: verdict_seconds(name, megabytes, setting) for name in names}
    peer = size / seconds_of(lambda: loops(chunks, setting.stop_ids), max(1, repeats // 2))
    for group, rate in together.items():
        goal = f", goal {GOALS[group] / 1e6:g} M" if group in GOALS else ""
        note(f"{group}, {len(groups[group])} checks: {rate / 1e6:.2f} M tokens/s and core{goal}")
    note(f"six questions in a loop over rows: {peer / 1e6:.2f} M tokens/s")
    return {
        "name": NAME,
        "ours": round(together[ASKED]),
        "peer": round(peer),
        "unit": "tokens/s",
        "ratio": round(together[ASKED] / peer, 3),
        "better": "higher",
        "how": HOW,
        "tokens_per_second": {group: round(rate) for group, rate in together.items()},
        "look_seconds": {num: round(seconds, 4) for num, seconds in looks.items()},
        "verdicts": {
            name: {"megabytes": megabytes, "seconds": round(seconds, 1), "tokens": tokens}
            for name, (seconds, tokens) in verdicts.items()
        },
        "by_check": {name: round(rate) for name, rate in rates.items()},
        "tokens": size,
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone on stdout")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the dump")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each check")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of each dump that is read")
    options = parser.parse_args()
    if min(options.repeats, options.tokens) < 1 or not options.megabytes > 0:
        parser.error("--repeats and --tokens must be at least 1, --megabytes above 0")
    print(json.dumps(compare(options.tokens, options.repeats, options.megabytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
