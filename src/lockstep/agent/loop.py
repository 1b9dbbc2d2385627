"""Plays episodes: token in, token out.

The first prompt is rendered once. After that, the engine is sent exactly the ids of the trajectory,
and only the environment's messages are encoded: the work of tokenisation is linear in the length of
an episode, and no sampled id is decoded and encoded again.

An environment, a tool, a renderer or an engine that fails does not end the run. It ends one
episode, whose trajectory is then "failed", says why, and is never trained.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lockstep.agent.config import AgentConfig, SamplingConfig
from lockstep.agent.environment import Environment, GroupScorer, Score
from lockstep.agent.gateway.session import GatewaySession
from lockstep.agent.guard import (
    CLOSE_SECONDS,
    checked_messages,
    checked_numbers,
    checked_observation,
    checked_score,
    checked_tools,
    described,
    guarded,
    settle,
)
from lockstep.agent.harness import Endpoint, EnvironmentFactory, Harness
from lockstep.agent.rescoring import Rescorer
from lockstep.agent.tasks import derive_seed
from lockstep.agent.turns import (
    Budget,
    Observed,
    OutOfTime,
    Policy,
    Prompt,
    Turn,
    TurnSampler,
    count,
    fork_without_thinking,
    offer,
)
from lockstep.engines.base import Capabilities, Engine
from lockstep.errors import ConfigError, DataError
from lockstep.renderers.base import Renderer
from lockstep.renderers.large_texts import TextTooLargeError
from lockstep.types import Group, Message, SamplingParams, Task, ToolSchema, Trajectory

if TYPE_CHECKING:
    from lockstep.agent.gateway.server import GatewayServer

OpenGateway = Callable[[], Awaitable["GatewayServer"]]
"""Starts the gateway if it does not run yet."""


def sampling_of(config: AgentConfig | SamplingConfig) -> SamplingParams:
    """The template of every turn's sampling parameters, from the settings; see
    `training_sampling` for tokens that will be trained."""
    return SamplingParams(
        max_tokens=config.max_turn_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def training_sampling(
    config: AgentConfig, capabilities: Capabilities, *, record_routes: bool = False
) -> SamplingParams:
    """Returns `sampling_of`, with the records that a trainer needs when top-p or top-k are set:
    log-probs under the truncated distribution, and its support if the engine and the settings
    allow. record_routes: record the experts of each token for replay."""
    sampling = replace(sampling_of(config), record_routes=record_routes)
    if not sampling.is_truncated:
        return sampling
    has_support = config.record_support and capabilities.has_support
    return replace(sampling, distribution="sampled", record_support=has_support)


def truncation_notice(config: AgentConfig, *, has_support: bool) -> str:
    """Explains in one line what top-p or top-k mean for training; "" if both are off. has_support:
    the engine returns the ids that they kept."""
    if not config.is_truncated:
        return ""
    filters = f"top_p={config.top_p:g}, top_k={config.top_k}"
    if config.record_support and has_support:
        return f"{filters}: the trainer renormalises over the tokens that they kept"
    why = "the engine does not record" if config.record_support else "record_support=false drops"
    return (
        f"{filters}: {why} the ids they kept, so the gradient is biased towards making them more "
        "probable; mismatch/support_bias says by how much"
    )


# ---------------------------------------------------------------------------------------------
# One episode
# ---------------------------------------------------------------------------------------------


async def run_episode(
    engine: Engine,
    renderer: Renderer,
    environment: Environment,
    task: Task,
    *,
    trajectory_id: str,
    seed: int,
    sampling: SamplingParams,
    budget: Budget,
) -> Trajectory:
    """Plays one episode to its end, scores it and closes the environment.

    seed: turn t draws with `derive_seed(seed, t)`. sampling: a template, see `TurnSampler`. If the
    environment, the renderer or the engine raises, `status` is "failed" and `error` says what
    happened. Cancelling closes the environment and aborts the request.
    """
    trajectory = Trajectory(id=trajectory_id, task_id=task.id)
    sampler = TurnSampler(engine, renderer, trajectory, sampling=sampling, budget=budget)
    return await play_episode(sampler, environment, task, seed=seed)


async def play_episode(
    sampler: TurnSampler,
    environment: Environment,
    task: Task,
    *,
    seed: int,
    rescorer: Rescorer | None = None,
) -> Trajectory:
    """See `run_episode`. rescorer: scores each finished turn again; the caller waits for it."""
    episode = _Episode(sampler, seed=seed, rescorer=rescorer)
    try:
        await episode.play(lambda task: environment, task)
        await episode.score()
    finally:
        await episode.close()
    return sampler.trajectory


@dataclass(slots=True, eq=False)
class _Episode:
    """One episode in the making: `play`, then `score` (or `set_score`), then `close`."""

    sampler: TurnSampler
    _: KW_ONLY
    seed: int
    rescorer: Rescorer | None = None
    gateway: OpenGateway | None = None
    environment: Environment | Harness | None = None
    session: GatewaySession | None = None
    """Session of an agent that asks over HTTP."""
    given_score: Score | None = None
    """Score that the harness returned."""
    stage: str = ""
    """The operation under way, for the reason of a failure."""
    reason: str = ""
    """Reason of the branch that the next turn begins; see `Segment.reason`."""
    leaf: int | None = None
    """The segment that ends the path."""
    pending: list[Observed] = field(default_factory=list[Observed])
    """Ids after `leaf`, which are recorded with the next turn."""
    turn_ends: list[int] = field(default_factory=list[int])
    """The segment that ends each turn."""
    has_ended: bool = False
    num_hooks: int = 0
    """Calls of the environment's hooks."""

    @property
    def trajectory(self) -> Trajectory:
        return self.sampler.trajectory

    @property
    def budget(self) -> Budget:
        return self.sampler.budget

    async def play(self, make_environment: EnvironmentFactory, task: Task) -> None:
        """Turns, until the environment or a budget ends them. Leaves the status at "finished",
        "truncated" or "failed"."""
        self.stage = "the environment could not be made"
        started = time.monotonic()
        try:
            if task.problem:
                raise DataError(f"task {task.id}: {task.problem}")
            own = replace(task)  # with a payload of its own, which may be changed
            environment = self.environment = await self._call(partial(make_environment, own))
            started = time.monotonic()
            if isinstance(environment, Harness):
                await self._play_over_http(environment, task)
            else:
                await self._play(environment, started)
        except Exception as error:
            self.fail(self.stage, error)
        except asyncio.CancelledError as error:
            if cast("asyncio.Task[Any]", asyncio.current_task()).cancelling():
                raise
            # Nobody cancelled the episode: something in it was, and it must not vanish.
            self.fail(self.stage, error)
        self.trajectory.metrics["seconds"] = time.monotonic() - started
        self.has_ended = True

    async def _play(self, environment: Environment, started: float) -> None:
        trajectory, deadline = self.trajectory, started + self.budget.max_seconds
        tools = await self._begin(environment)
        if trajectory.status == "failed":
            return
        for turn in range(self.budget.max_turns):
            try:
                reply = await self._sample(turn, deadline, tools)
            except OutOfTime:
                if turn == 0:
                    raise
                trajectory.status, trajectory.error = "truncated", self._out_of_time
                return
            self.stage = "environment.step"
            step = methodcaller("step", reply.message)
            observation = await self._call(partial(step, environment), checked_observation)
            self._count(observation.metrics)
            if observation.done:
                trajectory.status = "finished"
                return
            trajectory.error = self._exhausted(reply, turn, deadline)
            trajectory.error = trajectory.error or await self._observe(reply, observation.messages)
            if trajectory.error:
                trajectory.status = "truncated"
                return

    async def _begin(self, environment: Environment) -> Sequence[ToolSchema]:
        """Records the first prompt. Returns the tools that it declares."""
        trajectory, renderer = self.trajectory, self.sampler.renderer
        self.stage = "environment.reset"
        messages = await self._call(lambda: environment.reset(), checked_messages)
        self.stage = "environment.tools"
        tools = await self._call(lambda: environment.tools, checked_tools)
        self.stage = "renderer.render"
        try:
            ids = await self.sampler.encoded(partial(renderer.render, messages, tools))
            offer(trajectory, tools)
        except TextTooLargeError as error:
            self._fail_for_room(f"at least {error.num_tokens}")
            return tools
        count(trajectory, "tokens/encoded", len(ids))
        if len(ids) >= self.sampler.max_tokens:
            self._fail_for_room(str(len(ids)))
        else:
            self.leaf = trajectory.observe(np.asarray(ids, np.int32), messages=messages)
        return tools

    def _fail_for_room(self, num_tokens: str) -> None:
        self.fail(
            f"the prompt has {num_tokens} tokens and the episode may have "
            f"{self.sampler.max_tokens}: no room for a reply. Raise max_tokens"
        )

    async def _observe(self, reply: Turn, messages: Sequence[Message]) -> str:
        """Encodes the environment's answer. Returns the budget that it exceeds, or ""."""
        self.stage = "renderer.extend"
        trajectory, renderer, turn_ids = self.trajectory, self.sampler.renderer, reply.ids
        self.pending, self.reason = [], ""
        if renderer.forgets(messages):
            fork = fork_without_thinking(trajectory, self.leaf, renderer)
            if fork is not None:
                self.leaf, self.pending = fork
                turn_ids = self.pending[-1].ids
                self.reason = "dropped_thinking"
                count(trajectory, "branches/dropped_thinking")
        limit, bound = self.sampler.max_tokens, ""
        needed = len(trajectory.path_ids(self.leaf)) + sum(len(part.ids) for part in self.pending)
        try:
            ids = await self.sampler.encoded(partial(renderer.extend, turn_ids.tolist(), messages))
            count(trajectory, "tokens/encoded", len(ids))
            self.pending.append(Observed(np.asarray(ids, np.int32), messages))
            needed += len(ids)
        except TextTooLargeError as error:
            needed, bound = needed + error.num_tokens, " or later"
        if needed < limit:
            return ""
        return f"max_tokens: the next turn would begin at token {needed}{bound} of {limit}"

    async def _play_over_http(self, harness: Harness, task: Task) -> None:
        trajectory, budget = self.trajectory, self.budget
        self.stage = "harness.run"
        if self.gateway is None:
            raise ConfigError("nothing here starts a gateway for the agent: give `collect` one")
        gateway = await self.gateway()
        limit = harness.wait_seconds + budget.max_seconds
        session = self.session = GatewaySession(
            self.sampler, seed=self.seed, deadline=time.monotonic() + limit, on_turn=self._rescore
        )
        gateway.sessions.add(session)
        endpoint = Endpoint(
            base_url=f"{gateway.url}/s/{session.id}",
            session_url=f"{gateway.url}/sessions/{session.id}",
            api_key=session.key,
            model=gateway.model,
            session_id=session.id,
            offer=lambda: gateway.sessions.offer(
                session, task, wait_seconds=harness.wait_seconds, max_seconds=budget.max_seconds
            ),
        )
        problem: Exception | None = None
        was_asking: list[bool] = []
        # At the limit, before the guard cuts the agent off and it asks for nothing any more.
        loop = asyncio.get_running_loop()
        watch = loop.call_later(limit, lambda: was_asking.append(session.is_busy))
        try:
            self.given_score = await guarded(
                partial(harness.run, task, endpoint), seconds=limit, setting="agent.max_seconds"
            )
        except Exception as error:
            problem = error
        finally:
            watch.cancel()
            await session.finish()  # its agent may have ended it, or be ending it
            await gateway.sessions.remove(session.id)
            self._count(await self._call(lambda: checked_numbers(harness.metrics, "metrics")))
        if problem is not None and not (trajectory.status == "failed" and session.turn_ends):
            self._end_early(session, harness, problem, was_asking=any(was_asking))

    def _end_early(
        self, session: GatewaySession, harness: Harness, problem: Exception, *, was_asking: bool
    ) -> None:
        """Decides on an agent that did not come to its end: a budget of the run ended it, or the
        episode has failed. was_asking: its time was over while a turn was sampled."""
        is_late = isinstance(problem, TimeoutError)
        text = str(problem) if is_late else described(problem)
        text = f"harness.run: {text}{_shown_output(harness) if is_late else ''}"
        is_cut = (bool(session.limit) or was_asking) and not harness.has_ended
        if not session.turn_ends or not (is_cut or (is_late and session.has_reward)):
            self.fail(text)
            return
        self.trajectory.status = "truncated"
        self.trajectory.error = f"{session.limit}; then {text}" if session.limit else text

    async def _call(
        self, hook: Callable[[], Any], check: Callable[[Any], Any] = lambda found: found
    ) -> Any:
        """Calls a hook of the environment, whose draws from global generators depend on the episode
        and on nothing else. Returns `check` of its result."""
        self.num_hooks += 1
        seed = derive_seed(self.seed, "hook", self.num_hooks)
        return await guarded(hook, check=check, seconds=self.budget.max_seconds, seed=seed)

    def _count(self, metrics: Mapping[str, float]) -> None:
        """Adds an environment's counters to the trajectory's."""
        for name, value in metrics.items():
            count(self.trajectory, name, value)

    def _rescore(self, leaf: int) -> None:
        if self.rescorer is not None:
            self.rescorer.add(self.trajectory, leaf)

    @property
    def _out_of_time(self) -> str:
        return f"max_seconds: {self.budget.max_seconds:g} s are over"

    def _exhausted(self, reply: Turn, turn: int, deadline: float) -> str:
        """Names the budget that ends the episode after `reply`, or returns ""."""
        if reply.finish_reason == "abort" or time.monotonic() >= deadline:
            return self._out_of_time
        if len(self.trajectory.path_ids(self.leaf)) >= self.sampler.max_tokens:
            return f"max_tokens: all {self.sampler.max_tokens} are used"
        if reply.finish_reason == "length" and not self.budget.continue_cut_turns:
            return f"max_turn_tokens: turn {turn} was cut at {len(reply.ids)} tokens"
        if turn + 1 >= self.budget.max_turns:
            return f"max_turns: {self.budget.max_turns} turns are over"
        return ""

    async def _sample(self, turn: int, deadline: float, tools: Sequence[ToolSchema]) -> Turn:
        path_ids = self.trajectory.path_ids(self.leaf)
        ids = np.concatenate([path_ids, *(part.ids for part in self.pending)])
        record = partial(self.sampler.observe, self.leaf, self.pending, reason=self.reason)
        try:
            reply = await self.sampler.sample(
                Prompt(ids, self.leaf, lambda: (record(), "")),
                name=f"{turn}-{self.seed:x}",
                seed=derive_seed(self.seed, turn),
                deadline=deadline,
                tools=tools,
                on_stage=partial(setattr, self, "stage"),
            )
        except Exception as error:
            if self.stage == "engine.generate" and not isinstance(error, OutOfTime):
                record()  # shows the prompt that the engine failed on
            raise
        self.leaf = reply.leaf
        self.turn_ends.append(reply.leaf)
        self._rescore(reply.leaf)
        return reply

    # -- the end ------------------------------------------------------------------------------

    async def score(self) -> None:
        """Scores the episode by its environment, unless it failed."""
        environment = self.environment
        if self.trajectory.status == "failed" or environment is None:
            return
        if isinstance(environment, Harness):
            await self._score_harness(environment)
            return
        try:
            score = await self._call(lambda: environment.score())
        except Exception as error:
            self.fail("environment.score", error)
        else:
            self.set_score(score)

    async def _score_harness(self, harness: Harness) -> None:
        session, trajectory, score = self.session, self.trajectory, self.given_score
        if score is None and session is not None and session.has_reward:
            return
        if score is None and session is not None and session.limit:
            trajectory.status, trajectory.error = "truncated", trajectory.error or session.limit
        if score is None and trajectory.status == "truncated":
            try:
                before = harness.metrics
                score = await self._call(lambda: harness.score_cut())
                if harness.metrics is not before:
                    self._count(checked_numbers(harness.metrics, "metrics"))
            except Exception as error:
                self.fail("harness.score_cut", error)
                return
            score = score or Score(reward=0.0)
        if score is None:
            text = f"no reward: {harness.lacks_reward}, and none was posted to the session"
            self.fail(f"{text} (POST /sessions/SESSION/reward){_shown_output(harness)}")
        else:
            self.set_score(score)

    def set_score(self, found: Any) -> None:
        """Puts rewards on the leaves and on turns. All leaves get the reward: a path that was left
        because thinking was forgotten led to the same end. A score that cannot be trained on fails
        the episode.

        The score is the only reward: rewards that the agent posted to its session are dropped, and
        counted as gateway/ignored_rewards.
        """
        trajectory = self.trajectory
        leaves, turn_ends = trajectory.leaves(), self.turn_ends
        if self.session is not None:
            self.session.drop_rewards()
            leaves, turn_ends = self.session.rewarded_ends(), self.session.turn_ends
        score, error = settle(lambda: checked_score(found, num_turns=len(turn_ends)))
        stage = "harness.run" if self.session else "environment.score"
        if not leaves:
            self.fail(f"{stage}: the agent left before it received a reply: no turn to reward")
            return
        if error is not None:
            self.fail(stage, error)
            return
        for leaf in leaves:
            trajectory.rewards[leaf] = score.reward
        trajectory.reward_parts.update(score.parts)
        for turn, reward in score.turn_rewards.items():
            trajectory.set_segment_reward(turn_ends[turn], reward)

    async def close(self) -> None:
        """Closes the environment, once. An error is only counted, because the episode is over."""
        environment, self.environment = self.environment, None
        if environment is None:
            return
        try:
            await guarded(lambda: environment.close(), seconds=CLOSE_SECONDS)
        except Exception as error:
            count(self.trajectory, "close_errors", 1)
            if not self.trajectory.error:
                kind = "harness" if isinstance(environment, Harness) else "environment"
                self.trajectory.error = f"{kind}.close: {described(error)}"

    # -- notes --------------------------------------------------------------------------------

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Marks the episode as failed: stored, reported, never trained."""
        if error is not None:
            reason = f"{reason}: {described(error)}"
        self.trajectory.status, self.trajectory.error = "failed", reason
        self.trajectory.rewards.clear()
        self.trajectory.reward_parts.clear()
        if self.rescorer is not None:
            self.rescorer.drop(self.trajectory)


def _shown_output(harness: Harness) -> str:
    return f". It printed: {harness.output}" if harness.output else ""


# ---------------------------------------------------------------------------------------------
# Many episodes
# ---------------------------------------------------------------------------------------------


class EpisodeSlots(asyncio.Semaphore):
    """At most `size` episodes at the same time, of one batch or of several; 0 has no limit."""

    def __init__(self, size: int = 0) -> None:
        super().__init__(size or sys.maxsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """How `collect` and `collect_matches` play a batch."""

    step: int = 0
    split: str = "train"
    slots: EpisodeSlots = field(default_factory=EpisodeSlots)
    """Limits concurrent episodes or matches."""
    order: Callable[[], int] = lambda: 0
    """Priority of these episodes in the engine, evaluated for each turn; lower comes first."""
    rescorer: Rescorer | None = None
    """Scores each finished turn again while others are sampled; awaited and closed at the end."""
    gateway: OpenGateway | None = None
    """Opens the gateway for agents that are not environments."""
    group_scorer: Callable[[Task], GroupScorer | None] = lambda task: None
    """Returns the scorer of a task's group; None scores each episode alone."""
    on_progress: Callable[[Trajectory], None] = lambda trajectory: None
    """Called with each complete trajectory, in order of completion; once for each match."""

    def numbered(
        self, tasks: Sequence[Task], group_size: int, *, run_seed: int
    ) -> list[tuple[Task, list[tuple[str, int]]]]:
        """(task, id and seed of each episode). A task that occurs twice has its samples numbered
        through."""
        seen: Counter[str] = Counter()
        groups: list[tuple[Task, list[tuple[str, int]]]] = []
        for task in tasks:
            first = seen[task.id]
            seen[task.id] += group_size
            place = (self.split, self.step, task.id)
            episodes = [
                ("/".join(map(str, (*place, at))), derive_seed(run_seed, *place, at))
                for at in range(first, first + group_size)
            ]
            groups.append((task, episodes))
        return groups

    @asynccontextmanager
    async def workers(
        self, played: Callable[[], Iterable[Trajectory]]
    ) -> AsyncIterator[asyncio.TaskGroup]:
        """Runs the tasks that are started inside the block to their end, and the scorings of the
        trajectories that they played. Raises the first error: episodes do not raise, so it is a
        bug, or a callback's."""
        try:
            async with asyncio.TaskGroup() as workers:
                yield workers
            if self.rescorer is not None:
                await self.rescorer.wait(played())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if self.rescorer is not None:
                await self.rescorer.close()


async def collect(
    policy: Policy,
    make_environment: EnvironmentFactory,
    tasks: Sequence[Task],
    *,
    group_size: int,
    budget: Budget,
    run_seed: int,
    options: RolloutOptions | None = None,
) -> list[Group]:
    """Plays `group_size` episodes of every task on one engine. Returns groups in task order.

    Ids are `split/step/task/sample`. The draws of an episode depend on (run_seed, split, step, task
    id, sample index) and on nothing else, so a step repeats alone or in company. A failed episode
    stays in its group with status "failed". Cancelling closes every environment.
    """
    options = options or RolloutOptions()

    def episode_of(task: Task, name: str, seed: int) -> _Episode:
        trajectory = Trajectory(id=name, task_id=task.id)
        sampler = policy.sampler(trajectory, budget, priority=options.order)
        return _Episode(sampler, seed=seed, rescorer=options.rescorer, gateway=options.gateway)

    groups = [
        (task, [episode_of(task, *each) for each in episodes])
        for task, episodes in options.numbered(tasks, group_size, run_seed=run_seed)
    ]
    all_episodes = [episode for _, episodes in groups for episode in episodes]

    async def work(
        task: Task, group: list[_Episode], episode: _Episode, score_group: GroupScorer | None
    ) -> None:
        async with options.slots:
            await episode.play(make_environment, task)
            finished = [episode]
            if score_group is None:
                await episode.score()
            elif all(each.has_ended for each in group):
                await _score_together(score_group, group)
                finished = group
            else:
                return
            for done in finished:
                await done.close()
                options.on_progress(done.trajectory)

    try:
        # They get slots in this order, so that the episodes of a group end together.
        async with options.workers(lambda: [e.trajectory for e in all_episodes]) as workers:
            for task, episodes in groups:
                score_group = await _scorer_of(options.group_scorer, task)
                for episode in episodes:
                    workers.create_task(work(task, episodes, episode, score_group))
    finally:
        await asyncio.gather(*(episode.close() for episode in all_episodes))
    return [Group(task=task, trajectories=[e.trajectory for e in group]) for task, group in groups]


async def _scorer_of(
    group_scorer: Callable[[Task], GroupScorer | None], task: Task
) -> GroupScorer | None:
    """The group scorer of a task; if it cannot be made, a scorer that fails with the reason."""
    try:
        return await guarded(partial(group_scorer, replace(task)))
    except Exception as error:
        reason = error

    def fails(environments: Sequence[Environment]) -> Any:
        raise reason

    return fails


async def _score_together(score_group: GroupScorer, episodes: Sequence[_Episode]) -> None:
    alive = [e for e in episodes if e.trajectory.status != "failed" and e.environment is not None]
    if not alive:
        return

    def check(found: Any) -> list[Any]:
        if len(scores := list(found)) != len(alive):
            raise ValueError(f"{len(scores)} scores for {len(alive)} environments")
        return scores

    try:
        scores = await guarded(
            lambda: score_group([cast("Environment", e.environment) for e in alive]),
            check=check,
            seconds=alive[0].budget.max_seconds,
        )
    except Exception as error:
        for episode in alive:
            episode.fail("score_group", error)
    else:
        for episode, score in zip(alive, scores, strict=True):
            episode.set_score(score)
