"""Agents that exist already: programs that ask a model over HTTP and know nothing of Lockstep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from lockstep.agent.environment import Environment, Score
from lockstep.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address and key of one episode's model: a session of the gateway."""

    base_url: str
    """`http://HOST:PORT/s/SESSION`. An Anthropic client takes it as it is; an OpenAI client needs
    `/v1` after it."""
    api_key: str
    """Key of this session alone. A client that knows only the server's address finds the session by
    this key."""
    model: str
    """Name of the model at the endpoint."""
    session_id: str
    session_url: str
    """`http://HOST:PORT/sessions/SESSION`; rewards are posted to `/reward` below it."""
    offer: Callable[[], Awaitable[None]]
    """Hands the episode to an agent that claims one over HTTP (`POST /claim`), and returns when
    that has finished the session. TimeoutError if none does within `Harness.wait_seconds`."""


class Harness:
    """One episode of such an agent. Made by a factory from a `Task`, used once.

    An exception fails the trajectory (stored with its reason, never trained), and never the run. If
    a budget of the run had ended the agent (max_tokens, agent.max_turns, agent.max_turn_tokens,
    agent.max_seconds), the trajectory is truncated instead, and scored.
    """

    wait_seconds: float = 0.0
    """Seconds until an agent must begin; `agent.max_seconds` counts from then."""
    output: str = ""
    """End of the agent's output, shown with an episode that has no reward."""
    lacks_reward: str = "the harness returned None"
    """Explains to the author of the agent why `run` returned None."""
    has_ended: bool = False
    """The agent has ended well: an exception of `run` is not its own."""
    metrics: Mapping[str, float] = {}
    """Counters that are added to the trajectory's when `run` has ended."""

    async def run(self, task: Task, endpoint: Endpoint) -> Score | None:
        """Runs the agent to its end. None if it has posted its reward to the session itself."""
        raise NotImplementedError

    async def score_cut(self) -> Score | None:
        """Scores an episode that a budget ended before `run` returned. None: the reward is what the
        agent posted to the session, or 0."""

    async def close(self) -> None:
        """Frees the resources of `run`. Called once, also after a failure or at the time limit."""


EnvironmentFactory = Callable[[Task], Environment | Harness]
"""Makes the environment or harness that plays one episode of a task."""
