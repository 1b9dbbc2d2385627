"""What averaged log-probs cost: simulated, where the answer is arithmetic, and over real engines.

Simulated: an engine whose steps take 10 ms + 0.1 ms x tokens (`lockstep.testing.timed_engine`), 64
episodes that wait for tools, and eight re-scorings of every turn. `idle` is the time in which that
engine has nothing to do without them, `work` what they take of it. They may add at most
max(0.1 x work, work - idle) seconds to the batch.

Real: the quickstart's step with correction=averaged (eight re-scorings, no recompute) beside
correction.anchor=recomputed, which runs the trainer over the batch once more: processor seconds per
step, from fresh processes of 3 and of 13 steps, the difference over 10; the best of the rounds. In
one process nothing is idle but for tools, so work is work: this is the price, and not the gain.

    python benchmarks/averaging.py [--json] [--rounds N] [--only simulated|real]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from timed_engine import TimedEngine, run_in_virtual_time

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import Budget, collect, sampling_of
from lockstep.agent.rescoring import Rescorer
from lockstep.agent.tasks import derive_seed
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Group, Message, Request, Task, ToolCall

NAME = "averaging"
STEP_SECONDS, TOKEN_SECONDS = 0.01, 1e-4
NUM_RESCORINGS = 8
TOOL_SECONDS = (0.0, 1.0, 2.0, 3.0, 4.0)
"""What a tool takes on average: the longer, the more the engine is idle."""
REAL = {
    "averaged": ("correction=averaged",),
    "recomputed": ("correction.anchor=recomputed",),
    "rollout": ("correction=bypass",),
}

RENDERER = HarmonyRenderer(
    byte_tokenizer(),
    HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False),
)
CALL = RENDERER.render_reply(
    Message(role="assistant", tool_calls=(ToolCall(name="look", arguments='{"word": "a"}'),))
)
ANSWER = RENDERER.render_reply(Message(role="assistant", content="done"))


# -- simulated -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Seconds of one batch, without and with re-scorings."""

    alone: float
    """The whole batch without."""
    idle: float
    """Of these, in which the engine had nothing to do."""
    work: float
    """Of the engine, for the re-scorings."""
    added: float
    """How much longer the batch takes with them."""
    overlapped_share: float

    @property
    def bound(self) -> float:
        return max(0.1 * self.work, self.work - self.idle)


class WaitsForTools(Environment):
    """Answers each call after some time, which differs from call to call."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds, self._draw = seconds, np.random.default_rng(seed)

    async def reset(self) -> Sequence[Message]:
        return [Message(role="user", content="go")]

    async def step(self, message: Message) -> Observation:
        if not message.tool_calls:
            return Observation(done=True)
        await asyncio.sleep(self._draw.exponential(self._seconds))
        return Observation(messages=[Message(role="tool", name="look", content="seen")])

    async def score(self) -> Score:
        return Score(reward=1.0)


def reply(request: Request) -> Sequence[int]:
    """Two to four calls, by the episode, then the answer."""
    num_calls = 2 + derive_seed(0, request.affinity) % 3
    calls = request.prompt_ids.tobytes().count(np.array(CALL, np.int32).tobytes())
    return CALL if calls < num_calls else ANSWER


def simulate(tool_seconds: float, *, num_tasks: int = 8, group_size: int = 8) -> Simulated:
    """One batch with that many seconds of tools per call, played twice."""

    def play(num_scorings: int) -> tuple[TimedEngine, list[Group], float]:
        engine = TimedEngine(reply, step_seconds=STEP_SECONDS, token_seconds=TOKEN_SECONDS)
        seeds = iter(range(num_tasks * group_size))

        async def main() -> list[Group]:
            rescorer = Rescorer(engine, num_scorings=num_scorings, temperature=1.0)
            return await collect(
                engine,
                RENDERER,
                lambda task: WaitsForTools(tool_seconds, next(seeds)),
                [Task(id=str(number)) for number in range(num_tasks)],
                group_size=group_size,
                sampling=sampling_of(AgentConfig()),
                budget=Budget.of(AgentConfig(), max_tokens=100_000),
                run_seed=0,
                rescorer=rescorer if num_scorings else None,
            )

        groups, seconds = run_in_virtual_time(main())
        return engine, groups, seconds

    without, _, alone = play(0)
    engine, groups, seconds = play(NUM_RESCORINGS)
    told = [t.rescorings for g in groups for t in g.trajectories if t.rescorings is not None]
    return Simulated(
        alone=alone,
        idle=alone - without.sample_seconds,
        work=engine.score_seconds,
        added=seconds - alone,
        overlapped_share=sum(r.num_overlapped for r in told) / sum(r.num_scored for r in told),
    )


def simulated() -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for tool_seconds in TOOL_SECONDS:
        found = simulate(tool_seconds)
        idle = found.idle / found.alone
        is_kept = found.added <= found.bound * (1 + 1e-9)  # the clock is a sum of floats
        print(
            f"idle {idle:4.0%}: batch {found.alone:6.2f} s, work {found.work:5.2f} s, "
            f"added {found.added:5.2f} s, at most {found.bound:5.2f} s: "
            f"{'kept' if is_kept else 'MISSED'}; {found.overlapped_share:.0%} overlapped",
            file=sys.stderr,
        )
        parts.append(
            {
                "name": f"{NAME}, engine {idle:.0%} idle",
                "ours": found.added,
                "peer": found.bound,
                "unit": "s added",
                "ratio": found.bound / max(found.added, 1e-3),
                "better": "lower",
                "how": f"simulated: the batch takes {found.alone:.2f} s without, the re-scorings "
                f"{found.work:.2f} s of the engine; the peer is the bound",
            }
        )
    return parts


# -- real ------------------------------------------------------------------------------------------


def seconds_of(arm: str, steps: int) -> float:
    """Processor seconds of a whole run of the quickstart."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-m", "lockstep.cli", "train", "quickstart"),
                *(f"steps={steps}", "evaluation.at_start=false", "evaluation.num_tasks=1"),
                *("contract=none", "checkpoint.every=0", *REAL[arm]),
                *("--json", f"out={Path(scratch) / 'run'}"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def real(rounds: int) -> list[dict[str, Any]]:
    found = {
        arm: min((seconds_of(arm, 13) - seconds_of(arm, 3)) / 10 for _ in range(rounds))
        for arm in REAL
    }
    for arm, seconds in found.items():
        print(f"quickstart, {arm}: {seconds:.3f} processor seconds a step", file=sys.stderr)
    return [
        {
            "name": f"{NAME}, quickstart",
            "ours": found["averaged"],
            "peer": found["recomputed"],
            "unit": "s/step",
            "ratio": found["recomputed"] / found["averaged"],
            "better": "lower",
            "how": f"processor seconds; neither re-scored nor recomputed: {found['rollout']:.3f}",
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--rounds", type=int, default=2, help="of the real runs")
    parser.add_argument("--only", choices=("simulated", "real"))
    options = parser.parse_args()
    parts = simulated() if options.only != "real" else []
    parts += real(options.rounds) if options.only != "simulated" else []
    if options.json:
        print(json.dumps({"name": NAME, "parts": parts}))


if __name__ == "__main__":
    main()
