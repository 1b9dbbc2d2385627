"""Where does it begin? The same model, engine and trainer, on rung after rung: plain text, one
turn, several turns, and what is trained in the end.

Each rung adds one thing to the one below it. The first on which the two sides part says what is
responsible, and every rung below it rules something out, with its figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.harness import Harness
from lockstep.config import tag
from lockstep.doctor.checks.attribution import gap_of_all
from lockstep.doctor.checks.base import Gap, Setting
from lockstep.doctor.checks.causes import CAUSES
from lockstep.doctor.checks.examine import Stage, examine
from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.checks.suite import STAGES
from lockstep.errors import ConfigError, DataError
from lockstep.launch.config import ParallelConfig
from lockstep.observe.alarms import Alarm, mismatch_alarm
from lockstep.renderers.anew import rendered_anew, turns_of
from lockstep.run_config import Config
from lockstep.types import Message, Sample, SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from lockstep.run.build import Parts

NUM_EPISODES = 32
"""Per rung: some hundred sampled tokens, where a gap that matters shows at once."""
JUMP = 3.0
"""A rung is responsible if its gap is this much larger than that of the rung below it, too: what
kernels do on every rung is not the template's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One rung: what it adds, and what was measured on it."""

    name: str
    adds: str
    """What could only go wrong from here on."""
    gap: Gap
    alarm: Alarm
    match: float
    """Share of the sampled tokens that stand where they were sampled; NaN if it is not known."""
    num_rows: int
    causes: tuple[str, ...] = ()
    """What the checks of arrays say of its rows."""
    is_what_if: bool = False
    """Not what this program does: what another one would get here."""

    @property
    def is_high(self) -> bool:
        return self.alarm.level in ("warning", "critical")


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All rungs, from the bottom up."""

    rungs: tuple[Rung, ...]

    @property
    def culprits(self) -> list[Rung]:
        """Rungs that are high, and not merely as high as those below them; the worst first."""
        out: list[Rung] = []
        below = 0.0
        for rung in self.rungs:
            k2 = rung.gap.means()["k2"]
            if not rung.is_what_if:
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
            titles = "".join(f" {CAUSES[cause].title}" for cause in rung.causes)
            found.append(f"It begins on {rung.name}: {rung.adds}.{titles}")
        return " ".join(found) or "Consistent on every rung."

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "culprits": [rung.name for rung in self.culprits],
            "ruled_out": self.ruled_out,
            "rungs": [
                {
                    **asdict(rung),
                    "gap": rung.gap.means(),
                    "match": None if np.isnan(rung.match) else rung.match,
                }
                for rung in self.rungs
            ],
        }


def climb(
    config: Config,
    *,
    weights: Path | None = None,
    num_episodes: int = NUM_EPISODES,
    dump: str | Path | None = None,
    on_rung: Callable[[str], None] = lambda _: None,
) -> Ladder:
    """Plays every rung with the model, template, engine and tasks of `config`.

    weights: a checkpoint in place of the model's own. dump: what another trainer has written from
    this model: the last rung is then its rows, and not those that Lockstep would train.
    on_rung: told what is played. Raises ConfigError or DataError before a model is loaded.
    """
    from lockstep.doctor.inputs.registry import open_dump
    from lockstep.run.build import build
    from lockstep.run.preflight import preflight

    if num_episodes < 1:
        raise DataError(f"{num_episodes} episodes show nothing; expected at least 1.")
    config = replace(config, parallel=ParallelConfig())
    model_files = preflight(config, is_training=False)
    first = next(config.task.tasks(split="train", seed=config.seed))
    if isinstance(config.task.environment(first, config.agent), Harness):
        raise ConfigError(
            f"task={tag(type(config.task))} is played by an agent that asks over HTTP, and the "
            "ladder plays environments. Look at a run of it (lockstep doctor RUN), or climb with "
            "another task and the same model and engine."
        )
    theirs = None if dump is None else open_dump(dump)
    on_rung("loading the model")
    parts = build(config, model_files, weights=weights, is_training=False)
    return asyncio.run(_climb(_Climber(config, parts, num_episodes), theirs, on_rung))


async def _climb(climber: _Climber, theirs: Any, on_rung: Callable[[str], None]) -> Ladder:
    parts = climber.parts
    rungs: list[Rung] = []
    try:
        if parts.publisher is not None:
            await parts.publisher.publish(parts.trainer.version)
        on_rung("plain text")
        rungs.append(
            climber.rung_of(
                "plain text",
                "kernels, precision or weights of the two sides",
                await climber.plain_text(),
            )
        )
        on_rung("one turn")
        rungs.append(
            climber.rung_of(
                "one turn",
                "the template's prompt and its control tokens",
                await climber.episodes("one-turn", max_turns=1),
            )
        )
        on_rung("several turns")
        played = await climber.episodes("several-turns")
        rungs.append(
            climber.rung_of(
                "several turns, extended",
                "what stands between turns, and keys kept over them",
                played,
            )
        )
        on_rung("the same, rendered anew")
        rungs.append(climber.rendered_anew(played))
        on_rung("the training path")
        rungs.append(
            climber.training_path(played) if theirs is None else climber.rung_of_dump(theirs)
        )
    finally:
        await climber.config.task.close()
        await parts.engine.close()
        if parts.publisher is not None:
            parts.publisher.close()
    return Ladder(rungs=tuple(rungs))


class _Climber:
    """The parts that every rung shares."""

    def __init__(self, config: Config, parts: Parts, num_episodes: int) -> None:
        from lockstep.agent.loop import training_sampling

        self.config, self.parts, self.num_episodes = config, parts, num_episodes
        self.renderer = parts.renderer
        self.tasks: list[Task] = config.task.tasks(split="train", seed=config.seed).take(
            num_episodes
        )
        if not self.tasks:
            raise DataError("the task source has no task to play.")
        self.sampling: SamplingParams = training_sampling(
            config.agent,
            parts.engine.capabilities,
            record_routes=config.trainer.routing_replay == "rollout",
        )
        self.setting = Setting(
            trainer="lockstep",
            tokenizer=parts.renderer.tokenizer,
            renderer=parts.renderer,
            stop_ids=frozenset(parts.renderer.stop_ids),
            temperature=config.agent.temperature,
        )

    # -- played ---------------------------------------------------------------------------------

    async def episodes(self, split: str, *, max_turns: int | None = None) -> list[Trajectory]:
        """Episodes of the run's own tasks, token in, token out."""
        from lockstep.agent.loop import Budget, EpisodeSlots, collect

        config = self.config
        budget = Budget.of(config.agent, max_tokens=config.max_tokens)
        if max_turns is not None:
            budget = replace(budget, max_turns=max_turns)
        groups = await collect(
            self.parts.engine,
            self.renderer,
            lambda task: config.task.environment(task, config.agent),
            self.tasks,
            group_size=1,
            sampling=self.sampling,
            budget=budget,
            run_seed=config.seed,
            split=split,
            slots=EpisodeSlots(config.agent.max_in_flight),
        )
        return _with_turns([t for group in groups for t in group.trajectories], split)

    async def plain_text(self) -> list[Trajectory]:
        """The tasks' words without a template, which the model goes on writing."""
        from lockstep.agent.loop import Budget, EpisodeSlots, collect

        config = self.config
        words: dict[str, str] = {}
        for task in self.tasks:
            environment = config.task.environment(task, config.agent)
            assert isinstance(environment, Environment), "agents of their own are refused before"
            try:
                words[task.id] = "\n".join(m.content for m in await environment.reset())
            finally:
                await environment.close()
        groups = await collect(
            self.parts.engine,
            _PlainText(self.renderer),
            lambda task: _OneReply(words[task.id]),
            self.tasks,
            group_size=1,
            sampling=self.sampling,
            budget=Budget.of(config.agent, max_tokens=config.max_tokens),
            run_seed=config.seed,
            split="plain-text",
            slots=EpisodeSlots(config.agent.max_in_flight),
        )
        return _with_turns([t for group in groups for t in group.trajectories], "plain text")

    # -- measured -------------------------------------------------------------------------------

    def rung_of(self, name: str, adds: str, played: Sequence[Trajectory]) -> Rung:
        samples = [t.row(leaf) for t in played for leaf in t.leaves()[-1:]]
        return self.measured(name, adds, samples, match=1.0)

    def rendered_anew(self, played: Sequence[Trajectory]) -> Rung:
        """What these episodes would be in a program that keeps messages and renders them."""
        samples: list[Sample] = []
        num_same = num_anew = 0
        for trajectory in played:
            turns = turns_of(trajectory, trajectory.leaves()[-1])
            task = next(t for t in self.tasks if t.id == trajectory.task_id)
            environment = self.config.task.environment(task, self.config.agent)
            assert isinstance(environment, Environment), "agents of their own are refused before"
            row, same = rendered_anew(
                turns, self.renderer, tools=environment.tools, id=trajectory.id
            )
            samples.append(row)
            num_same += sum(same[:-1])
            num_anew += sum(len(turn.token_ids) for turn in turns[:-1])
        return self.measured(
            "several turns, rendered anew",
            "rendering the history anew, where a program does",
            samples,
            match=num_same / num_anew if num_anew else float("nan"),
            is_what_if=True,
        )

    def training_path(self, played: Sequence[Trajectory]) -> Rung:
        """The rows that a step of this run would be trained on, its fault included."""
        from lockstep.objectives.config import GRPO
        from lockstep.training.rows import rows_for_training
        from lockstep.types import Group

        groups = [Group(task=t, trajectories=[]) for t in self.tasks]
        by_task = {group.task.id: group for group in groups}
        for trajectory in played:
            by_task[trajectory.task_id].trajectories.append(trajectory)
        sampled = rows_for_training(groups, GRPO(), control_ids=self.renderer.tokenizer.control_ids)
        log_probs = partial(self.parts.trainer.forward, column=None)
        rows = self.parts.hooks.change_rows(sampled, self.renderer, log_probs)
        return self.measured(
            "the training path",
            "what is made of the rows on their way to the loss",
            rows,
            match=token_match(sampled, rows),
        )

    def rung_of_dump(self, dump: Any) -> Rung:
        from lockstep.doctor.diagnose import diagnose

        found = diagnose(dump, tokenizer=self.setting.tokenizer, renderer=self.setting.renderer)
        return Rung(
            name=f"the dump {dump.path.name}",
            adds="what its program makes of the rows on their way to the loss",
            gap=found.examination.gap,
            alarm=self.alarm(found.examination.gap),
            match=float("nan"),
            num_rows=found.examination.num_rows,
            causes=tuple(cause.name for cause, _ in found.causes),
        )

    def measured(
        self,
        name: str,
        adds: str,
        samples: Sequence[Sample],
        *,
        match: float,
        is_what_if: bool = False,
    ) -> Rung:
        """The trainer's log-probs of these rows beside the recorded ones."""
        trainer = self.parts.trainer.forward(samples, column=None)
        rows = Rows.of(samples, trainer_logprobs=np.concatenate(trainer))
        has = frozenset({"rollout_logprobs", "trainer_logprobs", "is_sampled", "turn"})
        examined = examine(
            lambda: [rows],
            [Stage(checks=checks) for checks in STAGES],
            self.setting,
            has=has,
        )
        gap = gap_of_all(rows)
        shares = {share.cause: share.k2 for share in examined.shares}
        causes = [f.cause for f in examined.findings if f.verdict == "differs"]
        return Rung(
            name=name,
            adds=adds,
            gap=gap,
            alarm=self.alarm(gap),
            match=match,
            num_rows=len(samples),
            is_what_if=is_what_if,
            causes=tuple(sorted(causes, key=lambda cause: -shares.get(cause, 0.0))),
        )

    def alarm(self, gap: Gap) -> Alarm:
        parts = self.parts
        return mismatch_alarm(
            {f"mismatch/{name}": value for name, value in gap.means().items()},
            parts.model_files.model.family,
            is_one_process=self.config.is_in_step or parts.engine.capabilities.shares_weights,
        )


def _with_turns(played: Sequence[Trajectory], rung: str) -> list[Trajectory]:
    """Those in which something was sampled. Raises DataError if there is none."""
    kept = [t for t in played if t.num_sampled_tokens and t.status != "failed"]
    if not kept:
        errors = sorted({t.error for t in played if t.error})
        raise DataError(
            f"{rung}: none of {len(played)} episodes has a sampled token. {' '.join(errors[:1])}"
        )
    return kept


class _PlainText:
    """Text as it is: no template, no control token."""

    name = "plain"
    thinking_opening: tuple[int, ...] = ()

    def __init__(self, renderer: Any) -> None:
        self.tokenizer = renderer.tokenizer
        self.stop_ids: tuple[int, ...] = renderer.stop_ids

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        return self.tokenizer.encode("\n".join(m.content for m in messages))

    def extend(self, sampled_ids: Any, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode("\n".join(m.content for m in messages))

    def forgets(self, messages: Sequence[Message]) -> bool:
        return False

    def without_thinking(self, sampled_ids: Any) -> list[int]:
        return list(sampled_ids)

    def parse(self, sampled_ids: Any) -> Message:
        return Message(role="assistant", content=self.tokenizer.decode(sampled_ids))

    def render_reply(self, message: Message) -> list[int]:
        return [*self.tokenizer.encode(message.content), self.stop_ids[0]]


class _OneReply(Environment):
    """Says some words, and is done with the first reply."""

    def __init__(self, words: str) -> None:
        self._words = words

    async def reset(self) -> Sequence[Message]:
        return [Message(role="user", content=self._words)]

    async def step(self, message: Message) -> Observation:
        return Observation(done=True)

    async def score(self) -> Score:
        return Score(reward=0.0)


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
