"""Samples one turn of the model onto a trajectory, for environments' episodes and the gateway's
sessions alike.

The engine is sent exactly the ids of a path, and of the messages that are new behind it. The reply
is checked and parsed, and then recorded together with those messages, or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from lockstep.agent.config import AgentConfig
from lockstep.engines.base import Engine
from lockstep.errors import EngineError
from lockstep.launch.background import Background
from lockstep.renderers.base import Renderer, TypesArguments
from lockstep.renderers.large_texts import encoded
from lockstep.types import (
    Delta,
    FinishReason,
    Int32Array,
    Message,
    Ragged,
    Request,
    SamplingParams,
    ToolSchema,
    Trajectory,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one episode. They are checked before an observation is added, so that no row ends
    in a tool result that the model never answered."""

    max_tokens: int
    """Tokens of a whole path: prompt, sampled and observed. The engine's own limit holds as well.
    """
    max_turns: int = 8
    max_turn_tokens: int = 1024
    max_seconds: float = 600.0
    continue_cut_turns: bool = False
    """See `AgentConfig`."""
    abort_grace_seconds: float = 10.0
    """Seconds that the engine may take to return the tokens of an aborted request."""

    @classmethod
    def of(cls, config: AgentConfig, *, max_tokens: int) -> Budget:
        shared = ("max_turns", "max_turn_tokens", "max_seconds", "continue_cut_turns")
        return cls(max_tokens=max_tokens, **{name: getattr(config, name) for name in shared})


@dataclass(frozen=True, slots=True)
class Policy:
    """Engine, renderer and sampling parameters that play an episode or a seat."""

    engine: Engine
    renderer: Renderer
    sampling: SamplingParams
    """A template, see `TurnSampler`."""
    name: str = ""
    """Name of a policy that is not the run's own."""

    def sampler(
        self, trajectory: Trajectory, budget: Budget, *, priority: Callable[[], int]
    ) -> TurnSampler:
        return TurnSampler(
            self.engine,
            self.renderer,
            trajectory,
            sampling=self.sampling,
            budget=budget,
            priority=priority,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Ids that the model has not read yet, and reads before its next turn."""

    ids: Int32Array
    messages: Sequence[Message] = ()
    """Messages of the ids: one assistant's message for the copy of a turn, else the messages
    between two turns."""

    @property
    def is_turn(self) -> bool:
        return len(self.messages) == 1 and self.messages[0].role == "assistant"


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Ids that a turn is sampled after."""

    ids: Int32Array
    parent: int | None
    """Last recorded segment of the prompt; None if there is none."""
    record: Callable[[], tuple[int, str]]
    """Records the rest of the prompt when the reply has come, so that no path ends in an
    observation that was never answered. Returns the segment that ends it, and the reason of the
    turn (`Segment.reason`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of the model, as recorded in the trajectory."""

    leaf: int
    """The segment that ends it."""
    ids: Int32Array
    """All ids of the turn, over all its segments."""
    message: Message
    finish_reason: FinishReason
    stop: int | str | None


class OutOfTime(EngineError):
    """The deadline came before the first token."""


class TurnSampler:
    """Draws turns onto one trajectory. Several may be sampled at the same time; each is recorded
    when it is complete, without a lock."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        trajectory: Trajectory,
        *,
        sampling: SamplingParams,
        budget: Budget,
        priority: Callable[[], int] = lambda: 0,
    ) -> None:
        """sampling: a template; the budget lowers its `max_tokens`, and the renderer's `stop_ids`
        come before its own."""
        self.engine, self.renderer, self.trajectory = engine, renderer, trajectory
        self.budget, self.priority = budget, priority
        stop_ids = tuple(dict.fromkeys((*renderer.stop_ids, *sampling.stop_ids)))
        self.sampling = replace(sampling, stop_ids=stop_ids)
        self.max_tokens = min(budget.max_tokens, engine.capabilities.max_tokens)
        """Tokens that a path may have."""

    async def encoded(self, make: Callable[[], T]) -> T:
        """See `large_texts.encoded`."""
        return await encoded(make, max_tokens=self.max_tokens)

    async def sample(
        self,
        prompt: Prompt,
        *,
        name: str,
        seed: int,
        deadline: float,
        tools: Sequence[ToolSchema] = (),
        sampling: SamplingParams | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> Turn:
        """Samples one turn of the model and records it.

        name: names the request within the trajectory. deadline: by `time.monotonic`. tools:
        declared in this dialogue. sampling: replaces the template. on_stage: called with the name
        of each stage, for the reason of a failure.

        The turn is one segment, or one per policy version that drew it. Raises OutOfTime if the
        deadline came before the first token, EngineError for an impossible reply, and whatever the
        trajectory's invariants raise.
        """
        on_stage("engine.generate")
        request = self._request(prompt, sampling or self.sampling, name=name, seed=seed)
        pieces, finish_reason = await self._generate(request, deadline)
        if not pieces:
            kind = OutOfTime if finish_reason == "abort" else EngineError
            raise kind(f"request {request.id}: no token was sampled ({finish_reason}).")
        ids = np.concatenate([piece.token_ids for piece in pieces])
        on_stage("renderer.parse")
        renderer = self.renderer
        if isinstance(renderer, TypesArguments):
            renderer = renderer.with_tools(tools)
        message = renderer.parse(ids.tolist())
        on_stage("the sampled reply")
        leaf = self._record(request, pieces, prompt, message)
        count(self.trajectory, "turns")
        count(self.trajectory, "parse_errors", bool(message.parse_error))
        return Turn(leaf, ids, message, finish_reason, pieces[-1].stop)

    def _request(
        self, prompt: Prompt, sampling: SamplingParams, *, name: str, seed: int
    ) -> Request:
        limit = min(self.budget.max_turn_tokens, self.max_tokens - len(prompt.ids))
        if limit < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=limit)
        routes_from = 0
        if sampling.record_routes and prompt.parent is not None:
            routes_from = self.trajectory.num_routed(prompt.parent)
        return Request(
            # The version is part of it: the same episode under other weights is another request.
            id=f"{self.trajectory.id}/{name}-v{self.engine.version}",
            prompt_ids=prompt.ids,
            sampling=sampling,
            seed=seed,
            priority=self.priority(),
            affinity=self.trajectory.id,
            routes_from=routes_from,
        )

    def _record(
        self, request: Request, pieces: Sequence[Delta], prompt: Prompt, message: Message
    ) -> int:
        """Records the rest of the prompt, and a segment for each piece. Returns the last one."""
        leaf, reason = prompt.record()
        context_ids, routes_from = request.prompt_ids, request.routes_from
        for piece in pieces:
            leaf = self.trajectory.record(
                piece.token_ids,
                logprobs=piece.logprobs,
                support=piece.support,
                routed_experts=piece.routed_experts,
                routes_from=routes_from,
                parent=leaf,
                prompt_ids=context_ids,
                policy_version=piece.policy_version,
                finish_reason=piece.finish_reason or "stop",
                stop=piece.stop,
                sampling=request.sampling,
                messages=(message,) if piece is pieces[-1] else (),
                reason=reason if piece is pieces[0] else "",
                fingerprint=piece.fingerprint,
            )
            context_ids = np.concatenate([context_ids, piece.token_ids])
            routes_from = len(context_ids) - 1
        return leaf

    def observe(self, parent: int | None, observed: Sequence[Observed], *, reason: str = "") -> int:
        """Records a segment for each part that has ids. Returns the last one."""
        leaf = parent
        for part in observed:
            if len(part.ids):
                leaf = self.trajectory.observe(
                    part.ids, parent=leaf, messages=part.messages, reason=reason
                )
                reason = ""
        assert leaf is not None, "a first prompt has ids"
        return leaf

    async def _generate(
        self, request: Request, deadline: float
    ) -> tuple[list[Delta], FinishReason]:
        """Returns the engine's reply: a piece per policy version, and the finish reason. It is
        aborted at the deadline, and the iterator is always closed.

        Raises EngineError for an impossible reply, or if even the abort is not answered.
        """
        deltas, aborts = self.engine.generate(request), Background()
        remaining = max(0.0, deadline - time.monotonic())
        timer = asyncio.get_running_loop().call_later(
            remaining, lambda: aborts.start(self._abort(request.id))
        )
        pieces: list[Delta] = []
        part: list[Delta] = []
        last: Delta | None = None
        num_tokens = 0
        clock = asyncio.timeout(remaining + self.budget.abort_grace_seconds)
        try:
            async with clock:
                async for delta in deltas:
                    _check_delta(last, delta, request, num_tokens)
                    num_tokens += len(delta.token_ids)
                    count(self.trajectory, "tokens/cached", delta.num_cached_tokens)
                    count(self.trajectory, "tokens/prefilled", delta.num_prefilled_tokens)
                    last = delta
                    part.append(delta)
                    if delta.finish_reason is not None:
                        pieces.append(_joined(part))
                        part = []
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise EngineError(
                f"request {request.id}: no end {self.budget.abort_grace_seconds:g} s after it was "
                "aborted at max_seconds."
            ) from error
        finally:
            timer.cancel()
            if (close := getattr(deltas, "aclose", None)) is not None:
                await close()
        if last is None or last.finish_reason is None or last.finish_reason == "weight_update":
            raise EngineError(f"request {request.id}: the reply ended without a finish reason.")
        if last.finish_reason == "abort" and time.monotonic() < deadline:
            raise EngineError(f"request {request.id}: the engine aborted it.")
        # A version may have sampled nothing: the weights changed right before the first token, or
        # after the last one, and then the last piece gets the finish reason.
        sampled = [piece for piece in pieces if len(piece.token_ids)]
        if sampled:
            sampled[-1] = replace(sampled[-1], finish_reason=last.finish_reason, stop=last.stop)
        return sampled, last.finish_reason

    async def _abort(self, request_id: str) -> None:
        # A failing abort shows as a request that does not end, which fails the episode by the
        # timeout above; raising here, in a task of its own, would show nowhere.
        try:
            await self.engine.abort(request_id)
        except Exception:
            count(self.trajectory, "abort_errors", 1)


def fork_without_thinking(
    trajectory: Trajectory, leaf: int | None, renderer: Renderer, *, behind: Sequence[Observed] = ()
) -> tuple[int | None, list[Observed]] | None:
    """Finds where a path must fork because its thinking is forgotten.

    The new branch has the same turns without their thinking, and the messages between them, all as
    observed ids. behind: observations that follow the path and are not recorded yet. Returns
    (segment to go on from, parts of the branch), with None for a new root; the last part is the
    turn that `Renderer.extend` goes on from. Returns None if there is no thinking to cut. Ids are
    encoded again only behind a turn that was cut off while it thought, because they began with the
    close of the thinking.
    """
    runs = [] if leaf is None else trajectory.runs(leaf)
    path = [Observed(trajectory.ids_of(r), trajectory.segments[r[-1]].messages) for r in runs]
    path += behind
    opening, parts = list(renderer.thinking_opening), [run.ids.tolist() for run in path]
    for at, run in enumerate(path):
        if not run.is_turn:
            continue
        if opening and (not at or parts[at - 1][-len(opening) :] != opening):
            continue  # a copy that lost its thinking already, with the opening
        whole, kept = parts[at], renderer.without_thinking(parts[at])
        if opening:
            parts[at - 1] = parts[at - 1][: -len(opening)]
        if kept != whole and at + 1 < len(path) and whole[-1] not in renderer.stop_ids:
            parts[at + 1] = renderer.extend(kept, path[at + 1].messages)
        parts[at] = kept
    if not (changed := [at for at, run in enumerate(path) if parts[at] != run.ids.tolist()]):
        return None
    first = min(changed[0], len(runs))  # everything that is not recorded yet
    begin = leaf if first == len(runs) else trajectory.segments[runs[first][0]].parent
    return begin, [
        Observed(
            np.asarray(ids, np.int32),
            [replace(m, thinking="") for m in run.messages] if run.is_turn else run.messages,
        )
        for run, ids in zip(path[first:], parts[first:], strict=True)
    ]


def count(trajectory: Trajectory, name: str, amount: float = 1) -> None:
    """Adds to one of its counters."""
    trajectory.metrics[name] = trajectory.metrics.get(name, 0.0) + float(amount)


OFFERED = "tool/offered/"


def offer(trajectory: Trajectory, tools: Sequence[ToolSchema]) -> None:
    """Notes which tools the model may call in an episode: tools that it never calls leave no other
    trace."""
    trajectory.metrics.update({f"{OFFERED}{tool.name}": 1.0 for tool in tools})


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Returns the part of a turn that one policy version sampled, as one delta."""
    supports = [delta.support for delta in deltas if delta.support is not None]
    routes = [delta.routed_experts for delta in deltas if delta.routed_experts is not None]
    return replace(
        deltas[-1],
        token_ids=np.concatenate([delta.token_ids for delta in deltas]).astype(np.int32),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        support=Ragged.concatenate(supports) if supports else None,
        routed_experts=np.concatenate(routes) if routes else None,
        first=deltas[0].first,
    )


def _check_delta(before: Delta | None, delta: Delta, request: Request, num_tokens: int) -> None:
    """Raises EngineError for an impossible delta. num_tokens: tokens of the deltas before it."""
    sampling, num_new = request.sampling, len(delta.token_ids)
    problem = ""
    for found, is_asked, name in (
        (delta.support, sampling.record_support and sampling.is_truncated, "support"),
        (delta.routed_experts, sampling.record_routes, "experts"),
    ):
        if num_new and (found is not None) != is_asked:
            expected, came = ("expected", "none") if is_asked else ("did not ask for", "some")
            problem = f"{expected} the {name} of its {num_new} tokens, and found {came}"
    if num_new and delta.first not in (None, num_tokens):
        problem = f"a delta begins at sampled token {delta.first}, and {num_tokens} came before "
        problem += "it: one was lost, came twice or out of order"
    if before is not None and before.finish_reason != "weight_update":
        versions = f"{before.policy_version} to {delta.policy_version}"
        if before.finish_reason is not None:
            problem = "a delta came after the last one"
        elif before.policy_version != delta.policy_version:
            problem = f"the policy went from version {versions} without a weight_update"
    if problem:
        raise EngineError(f"request {request.id}: {problem}.")
