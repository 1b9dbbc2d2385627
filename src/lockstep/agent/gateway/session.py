"""One session of the gateway: an episode of an agent that speaks HTTP, as one trajectory.

Every request contains a whole dialogue. The part that is already recorded is found by its words
(`tree`), and the engine is sent the recorded ids; only new messages are encoded. Whatever an agent
does to its history (it retries, edits, compacts, alters a reply, starts sub-agents) becomes a
branch: nothing that the model saw or sampled is rewritten.

A turn is recorded before it is returned. A request that comes again with the same key gets the same
turn, also while that is still being sampled. Nothing is locked while the engine works, so
concurrent requests become siblings.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from lockstep.agent.gateway.drafts import Draft, Drafts
from lockstep.agent.gateway.exchange import Refusal, TurnReply, TurnRequest, client_message
from lockstep.agent.gateway.reading import Dialogues
from lockstep.agent.gateway.tree import Answer, History, Tree
from lockstep.agent.guard import checked_number, checked_parts, described
from lockstep.agent.tasks import derive_seed
from lockstep.agent.turns import OutOfTime, Prompt, Turn, TurnSampler, count, offer
from lockstep.engines.grammar import grammar_problem
from lockstep.errors import ConfigError, EngineDownError, EngineError, MissingExtraError
from lockstep.launch.background import Background
from lockstep.renderers.base import Constraining, Constraint
from lockstep.renderers.large_texts import TextTooLargeError
from lockstep.types import SamplingParams

SamplingRule = Literal["run", "client"]
"""Source of temperature, top-p, top-k and seed: the run's settings, for tokens that are trained, or
the client's request. A request's `max_tokens` and stop strings hold in either case."""


class GatewaySession:
    """An episode in the making: `reply` for each turn, `set_reward`, then `finish`.

    >>> sampler = TurnSampler(engine, renderer, Trajectory(id="s1"),                # doctest: +SKIP
    ...     sampling=SamplingParams(max_tokens=512), budget=Budget(max_tokens=8192))
    >>> session = GatewaySession(sampler, seed=1)                                   # doctest: +SKIP
    >>> user = Message(role="user", content="What is 2 + 3?")                       # doctest: +SKIP
    >>> reply = await session.reply(TurnRequest(messages=(user,)))                  # doctest: +SKIP
    >>> await session.set_reward(1.0, parts={})                                     # doctest: +SKIP
    >>> await session.finish()                                                      # doctest: +SKIP
    """

    def __init__(
        self,
        sampler: TurnSampler,
        *,
        seed: int,
        rule: SamplingRule = "run",
        id: str = "",
        deadline: float = math.inf,
        on_turn: Callable[[int], None] = lambda leaf: None,
    ) -> None:
        """sampler: its budget's `max_seconds` applies to one turn. deadline: of the whole session,
        by `time.monotonic`. id: drawn if empty. on_turn: called with the last segment of each
        recorded turn."""
        self._sampler, self.trajectory = sampler, sampler.trajectory
        self._engine, self._renderer = sampler.engine, sampler.renderer
        self._seed, self._rule, self._deadline = seed, rule, deadline
        self._on_turn = on_turn
        self.id = id or secrets.token_hex(8)
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self._tree = Tree()
        self._drafts = Drafts(self._tree, sampler)
        self._running = Background()
        self._by_key: dict[str, asyncio.Task[Answer]] = {}
        """Requests in progress, and answered requests."""
        self._asked: Counter[str] = Counter()
        """Number of requests to the engine, by a digest of the prompt."""
        self._rewards: dict[int | None, float] = {}
        """Leaf -> reward. None -> the reward of every leaf without its own."""
        self._finishing: asyncio.Task[None] | None = None
        self._exhausted = ""
        """The budget that refused the last request; "" after a turn."""
        self._cut = ""
        """The budget that cut the last turn."""
        self.dialogues: Dialogues = {}
        """Dialogues that a later request may name; empty after the end."""
        self.last_used = time.monotonic()
        self.ended = asyncio.Event()
        """Set when the trajectory is complete."""
        self.on_finish: Callable[[GatewaySession], None] = lambda session: None
        """Called once, when the trajectory is complete."""

    # -- for the server -----------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        return self._finishing is not None

    @property
    def is_busy(self) -> bool:
        """True while a turn is being sampled."""
        return bool(self._running)

    @property
    def limit(self) -> str:
        """The budget that refused the agent's last request or cut its last turn; "" if none did. An
        agent that fails then was ended by it."""
        return self._exhausted or self._cut

    @property
    def has_reward(self) -> bool:
        """True if a reward was posted."""
        return bool(self._rewards)

    @property
    def rewards(self) -> dict[int, float]:
        return self.trajectory.rewards if self.ended.is_set() else self._due_rewards()

    def _due_rewards(self) -> dict[int, float]:
        leaves, common = self.trajectory.leaves(), self._rewards.get(None)
        out = {} if common is None else dict.fromkeys(self.rewarded_ends(), common)
        return out | {at: r for at, r in self._rewards.items() if at is not None and at in leaves}

    @property
    def turn_ends(self) -> list[int]:
        """The segment that ends each turn, in order of recording."""
        return [a.segment for a in self._tree.answers if a.segment is not None]

    def rewarded_ends(self) -> list[int]:
        """The turns that get the session's reward: the last turn of each path, without turns that a
        retry replaced or that no client received. Where the last turn of a path was not received,
        the path ends at the one before."""
        leaves, sampled = set(self.trajectory.leaves()), set(self.turn_ends)
        ends: list[int] = []
        climbed: list[int] = []
        for answer in self._tree.answers:
            if answer.segment in leaves and not answer.is_abandoned:
                ends.append(answer.segment)
            elif answer.segment in leaves and not answer.is_retried:
                at = answer.place.above
                while at is not None and at.segment not in sampled:
                    at = at.place.above
                if at is not None and at.segment is not None:
                    climbed.append(at.segment)
        inside = {i for end in ends for i in self.trajectory.path(end)}
        return sorted({*ends, *(i for i in climbed if i not in inside)})

    async def reply(self, request: TurnRequest) -> TurnReply:
        """Returns the next turn of the request's dialogue. Raises Refusal."""
        self._check_open()
        self.last_used = time.monotonic()
        count(self.trajectory, "gateway/requests")
        job = self._by_key.get(request.key)
        is_repeated = job is not None
        if job is None:
            job = self._running.start(self._answer(request))
            if request.key:
                self._by_key[request.key] = job
            job.add_done_callback(partial(self._ended, request.key))
        try:
            answer = await asyncio.shield(job)
        except asyncio.CancelledError:
            if job.cancelled():
                raise self._closed() from None
            if not request.key:  # the client is gone and has no key to retry with
                job.cancel()
            raise
        finally:
            self.last_used = time.monotonic()
        return self._reply_of(answer, is_repeated=is_repeated)

    async def count_tokens(self, request: TurnRequest) -> int:
        """Ids of the prompt that `reply` would send. Nothing of the session changes."""
        self._check_open()
        drafted = await self._draft(History.of(request, self._tree))
        return len(self._drafts.prompt_ids(drafted.place))

    async def set_reward(
        self, reward: float, *, parts: Mapping[str, float], leaf: int | None = None
    ) -> None:
        """Rewards the path that ends with segment `leaf`, or with None the end of every path. A
        second reward for the same leaf replaces the first. If the turn is no leaf in the end, the
        reward is for that turn alone. All numbers must be finite.

        Raises Refusal."""
        self._check_open()
        try:
            number, numbers = checked_number(reward, "reward"), checked_parts(parts)
        except TypeError as problem:
            raise Refusal(400, "invalid_reward", str(problem)) from None
        if leaf is not None and leaf not in self.turn_ends:
            text = f"no turn ends with segment {leaf}; the session's turns end with "
            text += f"{self.turn_ends}. Take `leaf` from the reply."
            raise Refusal(400, "unknown_leaf", text, parameter="leaf")
        self.last_used = time.monotonic()
        self._rewards[leaf] = number
        self.trajectory.reward_parts.update(numbers)

    def lost(self, leaf: int, *, key: str = "") -> None:
        """Records that the client did not receive the turn that ends with `leaf`. A turn that no
        client received is not rewarded, unless a request continues from it. key: of a request that
        is answered anew if it comes again."""
        self._by_key.pop(key, None)
        for answer in self._tree.answers:
            if answer.segment == leaf:
                answer.num_receivers -= 1

    def drop_rewards(self) -> None:
        """Forgets the rewards that were posted, because a score replaces them."""
        trajectory = self.trajectory
        if self._rewards:
            count(trajectory, "gateway/ignored_rewards", len(self._rewards))
        for leaf in self._rewards:
            if leaf is not None:
                trajectory.segments[leaf] = replace(trajectory.segments[leaf], reward=None)
        self._rewards.clear()
        trajectory.rewards.clear()
        trajectory.reward_parts.clear()

    async def finish(self, *, error: str = "") -> None:
        """Ends the session and cancels turns in progress. The trajectory is "failed" with an error,
        "truncated" if a budget refused the last request, else "finished".

        The end is completed even if this call is cancelled.
        """
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._finish(error))
        elif error and error != self.trajectory.error:
            raise self._closed()
        await asyncio.shield(self._finishing)

    async def _finish(self, error: str) -> None:
        trajectory = self.trajectory
        await self._running.cancel()
        if not self._tree.answers:
            error = error or self._exhausted or "the agent asked for no turn"
        if error:
            trajectory.status, trajectory.error = "failed", error
            trajectory.reward_parts.clear()
        else:
            trajectory.status = "truncated" if self._exhausted else "finished"
            trajectory.error = self._exhausted
            trajectory.rewards.update(self._due_rewards())
            for leaf, reward in self._rewards.items():
                if leaf is not None and leaf not in trajectory.rewards:
                    trajectory.set_segment_reward(leaf, reward)
            num_abandoned = sum(a.is_abandoned for a in self._tree.answers)
            count(trajectory, "gateway/abandoned_turns", num_abandoned)
        self.dialogues.clear()
        self.ended.set()
        self.on_finish(self)

    # -- one turn -----------------------------------------------------------------------------

    async def _answer(self, request: TurnRequest) -> Answer:
        sampling = self._sampling_of(request)
        dialogue = History.of(request, self._tree)
        offer(self.trajectory, dialogue.tools)
        limit = self._sampler.budget.max_turns
        if time.monotonic() >= self._deadline:
            raise self._exhaust("max_seconds", "the session's time is over")
        if len(self._tree.answers) + len(self._running) > limit:
            raise self._exhaust("max_turns", f"{limit} turns are over")
        drafted = await self._draft(dialogue)
        # Without an await in between: the tree must not have changed.
        place, prompt_ids = drafted.place, self._drafts.prompt_ids(drafted.place)
        if len(prompt_ids) >= self._sampler.max_tokens:
            raise self._overflow(f"token {len(prompt_ids)}")
        self._drafts.insert(drafted)
        if place.why is None:
            place.why = drafted.reason
        replaced = [*place.all_answers()] if drafted.reason == "retry" else []
        # Not by time: concurrent requests do not change each other's draws.
        digest = hashlib.blake2b(prompt_ids.data, digest_size=6).hexdigest()
        self._asked[digest] += 1
        num_asked = self._asked[digest]
        seed = derive_seed(self._seed, digest, num_asked)
        if self._rule == "client" and request.seed is not None:
            seed = derive_seed("client", request.seed)
        place.num_running += 1
        record = partial(self._drafts.record_prompt, drafted)
        try:
            turn = await self._sampler.sample(
                Prompt(prompt_ids, self._drafts.recorded_part(place)[0], record),
                name=f"{digest}-{num_asked}-{self._seed:x}",
                seed=seed,
                deadline=min(self._deadline, time.monotonic() + self._sampler.budget.max_seconds),
                tools=dialogue.tools,
                sampling=sampling,
                on_stage=partial(setattr, drafted, "stage"),
            )
        except OutOfTime:
            raise self._exhaust("max_seconds", "the time was over before the first token") from None
        except Exception as error:
            # Nothing was recorded, so the agent gets no turn.
            count(self.trajectory, "gateway/engine_errors")
            status, code = 500, "not_recorded"
            if isinstance(error, EngineError):
                status, code = 502, "engine_error"
            if isinstance(error, EngineDownError):
                status, code = 503, "engine_down"
            raise Refusal(status, code, f"{drafted.stage}: {described(error)}") from error
        finally:
            place.num_running -= 1
        self._cut = self._budget_that_cut(turn, len(prompt_ids), request)
        num_reused_tokens = len(prompt_ids) - drafted.counts["tokens/encoded"]
        for before in replaced:
            before.is_retried = True
        return self._add(turn, drafted, num_reused_tokens=num_reused_tokens)

    def _budget_that_cut(self, turn: Turn, num_prompt_ids: int, request: TurnRequest) -> str:
        num_ids = len(turn.ids)
        if turn.finish_reason == "stop" or num_ids == request.max_tokens:  # as it was asked for
            return ""
        is_full = num_prompt_ids + num_ids >= self._sampler.max_tokens
        name = "max_tokens" if is_full else "max_turn_tokens"
        name = "max_seconds" if turn.finish_reason == "abort" else name
        return f"{name}: the last turn was cut at {num_ids} tokens"

    async def _draft(self, dialogue: History) -> Draft:
        try:
            return await self._sampler.encoded(partial(self._drafts.draft, dialogue))
        except TextTooLargeError as error:
            raise self._overflow(f"token {error.num_tokens} or later") from None

    def _overflow(self, where: str) -> Refusal:
        text = f"the next turn would begin at {where} of {self._sampler.max_tokens}"
        return self._exhaust("max_tokens", text, status=400, code="context_overflow")

    def _add(self, turn: Turn, drafted: Draft, *, num_reused_tokens: int) -> Answer:
        """Adds a turn that was just recorded to the tree, and counts it."""
        reason = drafted.reason
        answer = Answer(
            drafted.place,
            client_message(turn.message, leaf=turn.leaf, stop=turn.stop),
            turn.leaf,
            reason=reason,
            num_reused_tokens=num_reused_tokens,
        )
        self._tree.add(answer)
        self._exhausted = ""
        count(self.trajectory, "gateway/reused_tokens", num_reused_tokens)
        if reason:
            count(self.trajectory, f"branches/{reason}")
        self._on_turn(turn.leaf)
        return answer

    def _sampling_of(self, request: TurnRequest) -> SamplingParams:
        template, ignored = self._sampler.sampling, list(request.ignored)
        asked = {
            name: value
            for name in ("temperature", "top_p", "top_k")
            if (value := getattr(request, name)) not in (None, getattr(template, name))
        }
        if self._rule == "run":
            ignored += [*asked, *(["seed"] if request.seed is not None else [])]
            asked = {}
        for name in ignored:
            count(self.trajectory, f"gateway/ignored/{name}")
        capabilities = self._engine.capabilities
        if request.stop_strings and not capabilities.has_stop_strings:
            text = f"engine {capabilities.name} cannot stop at a text. Cut the reply yourself."
            raise Refusal(400, "unsupported_value", text, parameter="stop")
        limit = template.max_tokens if request.max_tokens is None else request.max_tokens
        try:
            sampling = replace(
                template,
                max_tokens=min(limit, template.max_tokens),
                stop_strings=tuple(dict.fromkeys((*template.stop_strings, *request.stop_strings))),
                record_support=template.record_support and not asked,
                **asked,
            )
        except ConfigError as error:
            raise Refusal(400, "invalid_value", str(error)) from None
        if asked and sampling.is_truncated and "sampled" in capabilities.distributions:
            sampling = replace(sampling, distribution="sampled")
        if request.constraint is None:
            return sampling
        return replace(
            sampling,
            grammar=self._grammar_of(request.constraint),
            distribution="sampled",
            record_support=capabilities.has_support and not asked,
        )

    def _grammar_of(self, constraint: Constraint) -> str:
        def refusal(text: str, code: str = "unsupported_value") -> Refusal:
            return Refusal(400, code, text, parameter=constraint.where)

        asks = f"{constraint.where} constrains the reply"
        hint = "Or ask for the format in a message."
        engine, renderer = self._engine.capabilities, self._renderer
        if not engine.has_grammar:
            text = f"engine {engine.name} does not: its log-probs would be of the free reply."
            raise refusal(f"{asks}, and {text} The embedded engines do. {hint}")
        if not isinstance(renderer, Constraining):
            text = f"renderer {renderer.name} writes no grammar. Chatml and harmony do."
            raise refusal(f"{asks}, and {text} {hint}")
        grammar = renderer.grammar(constraint)
        try:
            problem = grammar_problem(grammar)
        except MissingExtraError as error:
            raise refusal(str(error)) from error
        if problem:
            raise refusal(f"{asks}, and its schema cannot be read: {problem}", "invalid_value")
        return grammar

    def _reply_of(self, answer: Answer, *, is_repeated: bool = False) -> TurnReply:
        """Builds the reply from the trajectory, which holds the only copy."""
        assert answer.segment is not None, "only recorded turns are returned"
        answer.num_receivers += 1
        trajectory, leaf = self.trajectory, answer.segment
        last = trajectory.segments[leaf]
        if is_repeated:
            count(trajectory, "gateway/repeated_requests")
        turn = trajectory.turn_of(leaf)
        ids, logprobs = trajectory.ids_of(turn), [trajectory.segments[i].logprobs for i in turn]
        assert last.policy_version is not None and last.finish_reason is not None
        return TurnReply(
            message=answer.message,
            token_ids=ids,
            logprobs=np.concatenate([values for values in logprobs if values is not None]),
            finish_reason=last.finish_reason,
            stop=last.stop,
            leaf=leaf,
            prompt_ids=trajectory.path_ids(leaf)[: -len(ids)],
            num_reused_tokens=answer.num_reused_tokens,
            policy_version=last.policy_version,
            reason=answer.reason,
            is_repeated=is_repeated,
        )

    # -- refusals -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_finished:
            raise self._closed()

    def _closed(self) -> Refusal:
        trajectory = self.trajectory
        why = f" ({trajectory.error})" if trajectory.error else ""
        text = f"session {self.id} is {trajectory.status}{why}: no more turns, no more rewards."
        return Refusal(410, "session_finished", text)

    def _exhaust(self, budget: str, text: str, *, status: int = 403, code: str = "") -> Refusal:
        """Notes the budget that ends the session, unless another turn comes."""
        self._exhausted = f"{budget}: {text}"
        text += f". Raise {budget}, or let the agent end before."
        return Refusal(status, code or budget, text)

    def _ended(self, key: str, job: asyncio.Task[Answer]) -> None:
        if job.cancelled() or job.exception() is not None:
            self._by_key.pop(key, None)
