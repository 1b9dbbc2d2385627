"""Plays the same model, engine and trainer on rung after rung, to find where a gap begins.

The rungs are plain text, one turn, several turns, and the rows that are trained in the end. Each
rung adds one thing to the rung below it. The first rung on which the two sides differ names the
culprit, and every rung below it rules something out, with its figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.agent.environment import Environment
from lockstep.agent.harness import Harness
from lockstep.agent.loop import Budget, training_sampling
from lockstep.agent.tasks import derive_seed
from lockstep.agent.turns import Prompt, TurnSampler
from lockstep.config import tag
from lockstep.doctor.causes import CAUSES
from lockstep.doctor.examine import examine
from lockstep.doctor.findings import Setting
from lockstep.doctor.gap import Gap, gap_of
from lockstep.doctor.monitor import rows_of
from lockstep.doctor.rows import Rows
from lockstep.errors import ConfigError, DataError
from lockstep.launch.config import ParallelConfig
from lockstep.objectives.config import GRPO
from lockstep.observe.alarms import Alarm, mismatch_alarm
from lockstep.renderers.origins import rendered_anew, turns_of
from lockstep.run.build import Parts, build
from lockstep.run.episodes import play_tasks
from lockstep.run.preflight import preflight
from lockstep.run.steps import play_over
from lockstep.run_config import Config
from lockstep.training.rows import rows_for_training
from lockstep.types import Group, Sample, Task, Trajectory

NUM_EPISODES = 32
"""Episodes per rung: some hundred sampled tokens, enough to show a gap that matters."""
JUMP = 3.0
"""Largest ratio of a rung's gap to the gap of the rung below it that leaves the rung without blame:
the gap of kernels is on every rung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rung: the part of the program that it adds, and its measurements."""

    name: str
    adds: str
    """Part that can only go wrong from this rung on."""
    gap: Gap
    alarm: Alarm
    match: float
    """Share of the sampled tokens that are still at the place where they were sampled; NaN if
    unknown."""
    causes: tuple[str, ...] = ()
    """Causes in its rows, the largest share first."""
    is_what_if: bool = False
    """True if it shows another program's result, not the result of this program."""

    @property
    def is_high(self) -> bool:
        return self.alarm.level in ("warning", "critical")


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All rungs, from the bottom up."""

    rungs: tuple[Rung, ...]

    @property
    def culprits(self) -> list[Rung]:
        """Rungs that are high, and higher than those below them; the worst first."""
        out: list[Rung] = []
        below = 0.0
        for rung in (rung for rung in self.rungs if not rung.is_what_if):
            k2 = rung.gap.means()["k2"]
            if rung.is_high and k2 > JUMP * below:
                out.append(rung)
            below = max(below, k2)
        return sorted(out, key=lambda rung: -rung.gap.means()["k2"])

    @property
    def ruled_out(self) -> list[str]:
        """One sentence for each rung that is not high, with its evidence."""
        return [
            f"not {rung.adds} ({rung.name}: k3 {rung.gap.means()['k3']:.1e}, the largest "
            f"difference {rung.gap.max_abs:.1e}, {rung.gap.tokens} tokens)"
            for rung in self.rungs
            if not rung.is_what_if and not rung.is_high
        ]

    @property
    def verdict(self) -> str:
        """One sentence for each culprit."""
        found = []
        for rung in self.culprits:
            told = "".join(f" {CAUSES[cause].title}" for cause in rung.causes)
            if rung.match < 1:
                told += f" {rung.match:.1%} of the sampled tokens are still in their places."
            found.append(f"It begins on {rung.name}: {rung.adds}.{told}")
        return " ".join(found) or "Consistent on every rung."

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "culprits": [rung.name for rung in self.culprits],
            "ruled_out": self.ruled_out,
            "rungs": [
                asdict(r) | {"gap": r.gap.means(), "match": None if np.isnan(r.match) else r.match}
                for r in self.rungs
            ],
        }

    def summary(self) -> str:
        """The rungs from the bottom up, the verdict, and everything that is ruled out."""
        columns = {"k1": "k1", "k2": "k2", "k3": "k3", "largest": "max_abs_diff"}
        lines = [f"{'rung':30} {' '.join(f'{h:>9}' for h in columns)} {'tokens':>7} {'match':>7}"]
        for rung in self.rungs:
            means = rung.gap.means()
            match = "-" if np.isnan(rung.match) else f"{rung.match:.1%}"
            figures = " ".join(f"{means[name]:9.1e}" for name in columns.values())
            kind = "what if" if rung.is_what_if else rung.alarm.level
            lines.append(f"{rung.name:30} {figures} {rung.gap.tokens:7} {match:>7}  {kind}")
        lines += ["", self.verdict, *(f"ruled out: {sentence}" for sentence in self.ruled_out)]
        return "\n".join(lines)


def climb(
    config: Config, *, weights: Path | None = None, num_episodes: int = NUM_EPISODES
) -> Ladder:
    """Plays every rung with the model, template, engine and tasks of `config`.

    weights: a checkpoint in place of the model's own. Raises ConfigError or DataError before a
    model is loaded.
    """
    if num_episodes < 1:
        raise DataError(f"{num_episodes} episodes show nothing; expected at least 1.")
    tasks = config.task.tasks(split="train", seed=config.seed).take(num_episodes)
    if not tasks:
        raise DataError("the task source has no task to play.")
    of_task = "from several seats, and the ladder plays one dialogue" if config.task.SEATS else ""
    if not of_task and isinstance(config.task.environment(tasks[0], config.agent), Harness):
        of_task = "by an agent that asks over HTTP, and the ladder plays environments"
    if of_task:
        raise ConfigError(
            f"task={tag(type(config.task))} is played {of_task}. Climb with another task, or look "
            "at a run of it."
        )
    config = replace(config, parallel=ParallelConfig())  # both sides in this process
    model_files = preflight(config, is_training=False)
    parts = build(config, model_files, weights=weights, is_training=False)
    climber = _Climber(config, parts, tasks)
    return Ladder(rungs=play_over(config, parts, lambda *_: climber.rungs()))


class _Climber:
    """Plays and measures the rungs with shared parts."""

    def __init__(self, config: Config, parts: Parts, tasks: list[Task]) -> None:
        self.config, self.parts, self.tasks = config, parts, tasks
        self.renderer = parts.renderer
        self.setting = Setting(
            trainer="lockstep",
            tokenizer=parts.renderer.tokenizer,
            renderer=parts.renderer,
            stop_ids=frozenset(parts.renderer.stop_ids),
            temperature=config.agent.temperature,
        )
        self.budget = Budget.of(config.agent, max_tokens=config.max_tokens)
        self.sampling = training_sampling(
            config.agent,
            parts.engine.capabilities,
            record_routes=config.trainer.routing_replay == "rollout",
        )

    async def rungs(self) -> tuple[Rung, ...]:
        text = await asyncio.gather(*map(self._continued, self.tasks), return_exceptions=True)
        turn = await self._play("one-turn", replace(self.budget, max_turns=1))
        turns = await self._play("several-turns", self.budget)
        return (
            self._sampled("plain text", "kernels, precision or weights of the two sides", text),
            self._sampled("one turn", "the template's prompt and its control tokens", turn),
            self._sampled(
                "several turns, extended",
                "the tokens between turns, and keys that are kept over them",
                turns,
            ),
            self._rendered_anew(turns),
            self._trained(turns),
        )

    # -- played ---------------------------------------------------------------------------------

    def _environment(self, task: Task) -> Environment:
        environment = self.config.task.environment(task, self.config.agent)
        assert isinstance(environment, Environment), "agents over HTTP are refused before"
        return environment

    async def _continued(self, task: Task) -> Trajectory:
        """The task's first messages as plain text, without a template, and what the model adds."""
        environment = self._environment(task)
        try:
            words = "\n".join(m.content for m in await environment.reset())
        finally:
            await environment.close()
        prompt_ids = np.array(self.renderer.tokenizer.encode(words), np.int32)
        trajectory = Trajectory(id=f"plain-text/0/{task.id}/0", task_id=task.id)
        sampler = TurnSampler(
            self.parts.engine, self.renderer, trajectory, sampling=self.sampling, budget=self.budget
        )
        await sampler.sample(
            Prompt(prompt_ids, None, lambda: (trajectory.observe(prompt_ids), "")),
            name="0",
            seed=derive_seed(self.config.seed, trajectory.id),
            deadline=time.monotonic() + self.budget.max_seconds,
        )
        return trajectory

    async def _play(self, split: str, budget: Budget) -> list[Trajectory]:
        """One episode per task."""
        more = {"group_size": 1, "budget": budget, "split": split, "group_scorer": lambda _: None}
        groups = await play_tasks(self.config, self.parts, self.tasks, **more)
        return [t for group in groups for t in group.trajectories]

    # -- measured -------------------------------------------------------------------------------

    def _sampled(self, name: str, adds: str, played: Sequence[Trajectory | BaseException]) -> Rung:
        kept = _kept(played)
        if not kept:
            errors = [t.error if isinstance(t, Trajectory) else str(t) for t in played]
            raise DataError(f"{name}: no sampled token in {len(played)} episodes. {min(errors)}")
        return self._measured(name, adds, [t.row(t.leaves()[-1]) for t in kept], match=1.0)

    def _rendered_anew(self, played: Sequence[Trajectory]) -> Rung:
        """These episodes in a program that keeps messages and renders the history anew."""
        samples: list[Sample] = []
        num_same = num_anew = 0
        tasks = {task.id: task for task in self.tasks}
        for trajectory in _kept(played):
            turns = turns_of(trajectory, trajectory.leaves()[-1])
            tools = self._environment(tasks[trajectory.task_id]).tools
            row, same = rendered_anew(turns, self.renderer, tools=tools, id=trajectory.id)
            samples.append(row)
            num_same += sum(same[:-1])
            num_anew += sum(len(turn.token_ids) for turn in turns[:-1])
        return self._measured(
            "several turns, rendered anew",
            "rendering the history anew, where a program does",
            samples,
            match=num_same / num_anew if num_anew else float("nan"),
            is_what_if=True,
        )

    def _trained(self, played: Sequence[Trajectory]) -> Rung:
        """The rows that a step of this run would train, after its hooks."""
        groups = {task.id: Group(task=task, trajectories=[]) for task in self.tasks}
        for trajectory in _kept(played):
            groups[trajectory.task_id].trajectories.append(trajectory)
        control_ids = self.renderer.tokenizer.control_ids
        sampled = rows_for_training(list(groups.values()), GRPO(), control_ids=control_ids)
        log_probs = partial(self.parts.trainer.forward, column=None)
        rows = self.parts.hooks.change_rows(sampled, self.renderer, log_probs)
        adds = "the changes to rows on their way to the loss"
        played_as = rows_of(rows, list(groups.values()), version=0)
        return self._measured(
            "the training path",
            adds,
            rows,
            match=token_match(sampled, rows),
            engine_ids=played_as.engine_ids,
        )

    def _measured(
        self,
        name: str,
        adds: str,
        samples: Sequence[Sample],
        *,
        engine_ids: Any = None,
        **more: Any,
    ) -> Rung:
        """The trainer's log-probs of these rows against the recorded ones. more: for `Rung`."""
        trainer = self.parts.trainer.forward(samples, column=None)
        rows = Rows.of(samples, trainer_logprobs=np.concatenate(trainer), engine_ids=engine_ids)
        examined = examine(lambda: [rows], self.setting, has=rows.has, is_live=True)
        gap = gap_of(rows.gap)
        shares = {cause: share.k2 for cause, share in examined.shares.items()}
        causes = [f.cause for f in examined.findings if f.verdict == "differs"]
        alarm = mismatch_alarm(
            {f"mismatch/{key}": value for key, value in gap.means().items()},
            self.parts.model_files.model.family,
            is_one_process=self.config.is_in_step or self.parts.engine.capabilities.shares_weights,
        )
        return Rung(
            name=name,
            adds=adds,
            gap=gap,
            alarm=alarm,
            causes=tuple(sorted(causes, key=lambda cause: -shares.get(cause, 0.0))),
            **more,
        )


def _kept(played: Sequence[Trajectory | BaseException]) -> list[Trajectory]:
    """The episodes that have something to compare."""
    found = [t for t in played if isinstance(t, Trajectory) and t.status != "failed"]
    return [t for t in found if t.num_sampled_tokens]


def token_match(before: Sequence[Sample], after: Sequence[Sample]) -> float:
    """Share of the trained tokens of `before` that are in `after` at the same place, trained and
    with the same id. Rows are compared in order; 1.0 if no token is trained."""
    num_equal = num_trained = 0
    for old, new in zip(before, after, strict=True):
        size = min(len(old), len(new))
        is_equal = (old.token_ids[:size] == new.token_ids[:size]) & new.loss_mask[:size]
        num_equal += int((is_equal & old.loss_mask[:size]).sum())
        num_trained += old.num_trained
    return num_equal / num_trained if num_trained else 1.0
