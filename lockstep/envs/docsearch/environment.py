"""The episode: a question, a search tool, an answer.

reward = 0.3 * retrieval + 0.7 * correctness - 0.3 * format_penalty, with the weights of the config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.tools import Tool, ToolLimits, ToolRunner
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.envs.docsearch.folder import Library, Question, is_correct
from lockstep.envs.docsearch.worlds import NO_RESULTS, World
from lockstep.types import Message, ToolCall

TOOL_NAME = "get_document_chunks"
INVALID_CALL = "error: invalid call"
"""All that a small model is told of a call that could not be run."""

_PARAMETERS = {
    "type": "object",
    "properties": {
        "keywords": {
            "type": "array",
            "items": {"type": "string"},
            "description": "Words that the chunks should contain.",
        }
    },
    "required": ["keywords"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question over one set of chunks, wherever they come from."""

    question: str
    search: Callable[[Sequence[str]], Sequence[tuple[str, str]]]
    """keywords -> (chunk id, text as the model reads it), best first."""
    gold: tuple[frozenset[str], ...]
    """Per gold passage, the chunk ids of which any one is enough."""
    is_correct: Callable[[str], bool]
    separator: str
    """Between the chunks of one result."""
    explains_errors: bool
    """Tell the model what was wrong with a call, and not only that it was."""


def world_problem(world: World, config: DocSearchConfig) -> Problem:
    """The question of a generated world. A fact's id is its text; an answer must be exact."""

    def search(keywords: Sequence[str]) -> list[tuple[str, str]]:
        facts = world.search(keywords, num_results=config.num_results)
        return [(fact.text, fact.text) for fact in facts]

    return Problem(
        question=world.question,
        search=search,
        gold=tuple(frozenset((fact.text,)) for fact in world.path),
        is_correct=lambda answer: answer == world.answer,
        separator=" ",
        explains_errors=False,
    )


def library_problem(library: Library, question: Question, config: DocSearchConfig) -> Problem:
    """A question of the user's about the user's documents."""

    def search(keywords: Sequence[str]) -> list[tuple[str, str]]:
        chunks = library.index.search(keywords, num_results=config.num_results)
        return [(chunk.id, f"[{chunk.id}]\n{chunk.text}") for chunk in chunks]

    return Problem(
        question=question.question,
        search=search,
        gold=question.gold,
        is_correct=lambda answer: is_correct(
            answer, question.answers, accept_contained=config.accept_contained
        ),
        separator="\n\n",
        explains_errors=True,
    )


class DocSearchEnvironment(Environment):
    """Search with `get_document_chunks`, then answer without a call.

    A turn that is no answer counts as a call, also one that cannot be read, and the episode is over
    with the last call that `max_calls` allows. Score parts: `retrieval` (share of the gold passages
    that came up), `correctness` (0 or 1), `format_penalty` (0.5 per call that could not be run, 1
    without an answer, at most 1).
    """

    def __init__(
        self, problem: Problem, config: DocSearchConfig, limits: ToolLimits | None = None
    ) -> None:
        self._problem, self._config = problem, config
        search = Tool(
            name=TOOL_NAME,
            description="Finds the chunks of the documents that match the keywords best.",
            parameters=_PARAMETERS,
            function=self._search,
            is_instant=True,
        )
        self.tools: Sequence[Tool] = (search,)
        self._runner = ToolRunner(self.tools, limits)
        self.found: set[str] = set()
        """Ids of the chunks that calls returned."""
        self.num_calls = 0
        self.num_invalid_calls = 0
        self.answer: str | None = None

    async def reset(self) -> Sequence[Message]:
        return (
            Message(role="developer", content=self._config.instructions),
            Message(role="user", content=self._problem.question),
        )

    async def step(self, message: Message) -> Observation:
        if not message.parse_error and not message.tool_calls:
            self.answer = message.content.strip() or None
            return Observation(done=True)
        calls = () if message.parse_error else message.tool_calls
        left = self._config.max_calls - self.num_calls
        replies: list[Message] = []
        counters: dict[str, float] = {}
        for call in calls[:left]:
            replies.append(await self._run(call, counters))
        if message.parse_error:
            self.num_invalid_calls += 1
            replies.append(_reply(self._error_text(f"error: {message.parse_error}")))
        self.num_calls += len(replies)
        return Observation(
            messages=replies, done=self.num_calls >= self._config.max_calls, metrics=counters
        )

    async def _run(self, call: ToolCall, counters: dict[str, float]) -> Message:
        (reply,), counted = await self._runner.run((call,))
        for name, value in counted.items():
            counters[name] = counters.get(name, 0.0) + value
        text = reply.content
        if "tool/invalid_arguments" in counted or "tool/unknown" in counted:
            self.num_invalid_calls += 1
            text = self._error_text(text)
        return _reply(text, call.id)

    def _error_text(self, explained: str) -> str:
        return explained if self._problem.explains_errors else INVALID_CALL

    def _search(self, keywords: list[str]) -> str:
        chunks = self._problem.search(keywords)
        self.found.update(chunk_id for chunk_id, _ in chunks)
        return self._problem.separator.join(text for _, text in chunks) or NO_RESULTS

    async def score(self) -> Score:
        config, gold = self._config, self._problem.gold
        retrieval = sum(not self.found.isdisjoint(ids) for ids in gold) / len(gold)
        correctness = float(self.answer is not None and self._problem.is_correct(self.answer))
        format_penalty = min(1.0, 0.5 * self.num_invalid_calls + (self.answer is None))
        return Score(
            reward=config.retrieval_weight * retrieval
            + config.correctness_weight * correctness
            - config.format_penalty_weight * format_penalty,
            parts={
                "retrieval": retrieval,
                "correctness": correctness,
                "format_penalty": format_penalty,
            },
        )


def _reply(text: str, call_id: str = "") -> Message:
    return Message(role="tool", name=TOOL_NAME, content=text, tool_call_id=call_id)
