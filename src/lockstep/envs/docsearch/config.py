"""The task kind `docsearch`: its settings and its episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, ClassVar

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.task_config import AskedTasks, Split
from lockstep.agent.tasks import GeneratedSource, ListSource, TaskSource
from lockstep.agent.tools import Tool, ToolLimits, ToolRunner, tool
from lockstep.config import Interval, at_least, require
from lockstep.envs.data_files import HeldOutTasks, split_tasks
from lockstep.envs.docsearch.folder import Library, Question, is_correct, read_documents
from lockstep.envs.docsearch.worlds import NO_RESULTS, World, world_of
from lockstep.types import Message, Task

TOOL_NAME = "get_document_chunks"
INSTRUCTIONS = "Search, then answer."
INVALID_CALL = "error: invalid call"
"""Result of a call that could not be run, in a generated world."""
OVERLAP_CHARS = 80
"""Characters that a chunk repeats from the end of the one before, in whole words; at most a quarter
of the largest chunk."""


@dataclass(frozen=True, kw_only=True)
class DocSearchConfig(AskedTasks, HeldOutTasks):
    """Find the passages that answer a question with get_document_chunks(keywords), then answer.

    reward = retrieval_weight * retrieval + correctness_weight * correctness
             - format_penalty_weight * format_penalty
    """

    TAG: ClassVar[str] = "docsearch"

    docs: str = ""
    """Folder of .txt, .md and .markdown documents, with its subfolders. Empty: generated worlds of
    30 facts, a new one for each task, which no model can memorize."""
    questions: str = ""
    """JSONL: {"id", "question", "answer" or "answers", "gold": ["FILE#CHUNK" or {"document",
    "quote"}]}. Required with docs."""
    eval_questions: str = ""
    """JSONL of the same form for evaluation. Empty: eval_share of `questions` is held out."""
    two_hop_share: Annotated[float, Interval("[0, 1]")] = 0.5
    """Share of questions about worlds with two hops: "the city of the friend of Bela"."""
    max_calls: Annotated[int, at_least(1)] = 4
    """Calls per episode. The last one ends it, with or without an answer."""
    num_results: Annotated[int, at_least(1)] = 2
    """Most chunks that one call returns."""
    chunk_chars: tuple[int, int] = (200, 600)
    """(smallest, largest) chunk of a document, in characters. Paragraphs are joined up to the
    largest; a heading starts a new chunk once the smallest is reached."""
    retrieval_weight: Annotated[float, at_least(0)] = 0.3
    """Weight of the share of gold passages that calls returned."""
    correctness_weight: Annotated[float, at_least(0)] = 0.7
    """Weight of a right answer (0 or 1)."""
    format_penalty_weight: Annotated[float, at_least(0)] = 0.3
    """Weight of the penalty: 0.5 per call that could not be run, 1 without an answer, at most 1."""
    turn_rewards: bool = False
    """Give a turn its own reward in addition to the episode's: retrieval_weight times the share of
    gold passages that its call was the first to return."""

    def __post_init__(self) -> None:
        super().__post_init__()
        smallest, largest = self.chunk_chars
        require(
            self,
            docs=(bool(self.docs) == bool(self.questions), "given with questions, or neither"),
            eval_questions=(bool(self.docs) or not self.eval_questions, "given with docs"),
            chunk_chars=(0 < smallest <= largest >= 32, "0 < smallest <= largest >= 32"),
        )

    def asked(self, question: str | Sequence[Message], *, own: str = INSTRUCTIONS) -> list[Message]:
        return super().asked(question, own=own)

    def check(self) -> None:
        if self.docs:
            _ = self._questions

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Worlds: endless, one stream per split and seed. Questions: training reshuffles in each
        epoch; evaluation goes once through them, in the file's order."""
        if not self.docs:
            return GeneratedSource(self._world_task, seed=seed, split=split)
        tasks = [
            Task(id=q.id, payload={"question": q.question, "answer": " | ".join(q.answers)})
            for q in self._questions[split]
        ]
        return ListSource.of_split(tasks, split=split, seed=seed, name=self.questions)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        if self.docs:
            problem = library_problem(self._library, self._by_id[task.id], self)
        else:
            problem = world_problem(world_of(task.payload["world_seed"], self.two_hop_share), self)
        return DocSearchEnvironment(problem, self, ToolLimits.of(agent))

    def label(self, task: Task) -> str:
        """Number of hops ("1-hop", "2-hop"); the `label` of a question of the user."""
        if self.docs:
            return self._by_id[task.id].label
        return f"{task.payload['hops']}-hop"

    def _world_task(self, seed: int, index: int) -> Task:
        world = world_of(seed, self.two_hop_share)
        payload = {"question": world.question, "answer": world.answer, "hops": world.hops}
        return Task(id=f"world-{seed:016x}", payload={"world_seed": seed, **payload})

    # `cached_property` keeps its value beside the fields: it is neither compared nor written.

    @cached_property
    def _library(self) -> Library:
        documents, overlap = read_documents(self.docs), min(OVERLAP_CHARS, self.chunk_chars[1] // 4)
        return Library(documents, chunk_chars=self.chunk_chars, overlap_chars=overlap)

    @cached_property
    def _questions(self) -> dict[str, list[Question]]:
        read = self._library.read_questions
        held_out = read(self.eval_questions) if self.eval_questions else None
        questions = read(self.questions)
        return split_tasks(questions, held_out, self.eval_share, name=self.questions)

    @cached_property
    def _by_id(self) -> dict[str, Question]:
        return {q.id: q for split in self._questions.values() for q in split}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """One question about one set of chunks."""

    question: str
    search: Callable[[Sequence[str]], Sequence[tuple[str, str]]]
    """keywords -> (chunk id, text for the model), best first."""
    gold: tuple[frozenset[str], ...]
    """Per gold passage, the ids of chunks that each contain it."""
    is_correct: Callable[[str], bool]
    separator: str
    """Text between the chunks of one result."""
    explains_errors: bool
    """True if the model reads why a call could not be run."""


def world_problem(world: World, config: DocSearchConfig) -> SearchProblem:
    """The question of a generated world. The id of a fact is its text; an answer must be exact."""
    find = partial(world.search, num_results=config.num_results)
    return SearchProblem(
        question=world.question,
        search=lambda keywords: [(fact.text, fact.text) for fact in find(keywords)],
        gold=tuple(frozenset((fact.text,)) for fact in world.path),
        is_correct=lambda answer: answer == world.answer,
        separator=" ",
        explains_errors=False,
    )


def library_problem(library: Library, question: Question, config: DocSearchConfig) -> SearchProblem:
    """A question about the user's documents."""
    find = partial(library.index.search, num_results=config.num_results)
    return SearchProblem(
        question=question.question,
        search=lambda words: [(each.id, f"[{each.id}]\n{each.text}") for each in find(words)],
        gold=question.gold,
        is_correct=lambda answer: is_correct(answer, question.answers),
        separator="\n\n",
        explains_errors=True,
    )


class DocSearchEnvironment(Environment):
    """Search with `get_document_chunks`, then answer without a call.

    A turn that is not an answer, or cannot be read, counts as a call; call number `max_calls` ends
    the episode. Score parts: `retrieval` (share of the gold passages that calls returned),
    `correctness` (0 or 1), `format_penalty` (0.5 per call that could not be run, 1 without an
    answer, at most 1).
    """

    def __init__(
        self, problem: SearchProblem, config: DocSearchConfig, limits: ToolLimits | None = None
    ) -> None:
        self._problem, self._config = problem, config
        self.tools: Sequence[Tool] = (tool(self._search, name=TOOL_NAME, is_instant=True),)
        self._runner = ToolRunner(self.tools, limits)
        self.found: set[str] = set()
        """Ids of the chunks that calls returned."""
        self.gains: list[float] = []
        """Per turn with calls, the share of gold passages that no call before it had returned."""
        self.num_calls = 0
        self.num_invalid_calls = 0
        self.answer: str | None = None

    async def reset(self) -> Sequence[Message]:
        return self._config.asked(self._problem.question)

    async def step(self, message: Message) -> Observation:
        if not message.parse_error and not message.tool_calls:
            self.answer = message.content.strip() or None
            return Observation(done=True)
        left, found_before = self._config.max_calls - self.num_calls, self._retrieval()
        replies: list[Message] = []
        counters: Counter[str] = Counter()
        if message.parse_error:
            replies.append(self._reply(f"error: {message.parse_error}", is_invalid=True))
        for call in () if message.parse_error else message.tool_calls[:left]:
            (reply,), counted = await self._runner.run((call,))
            counters.update(counted)
            is_invalid = "tool/invalid_arguments" in counted or "tool/unknown" in counted
            replies.append(self._reply(reply.content, call.id, is_invalid=is_invalid))
        self.num_calls += len(replies)
        self.gains.append(self._retrieval() - found_before)
        is_last = self.num_calls >= self._config.max_calls
        return Observation(messages=replies, done=is_last, metrics=counters)

    def _reply(self, text: str, call_id: str = "", *, is_invalid: bool) -> Message:
        self.num_invalid_calls += is_invalid
        if is_invalid and not self._problem.explains_errors:
            text = INVALID_CALL
        return Message(role="tool", name=TOOL_NAME, content=text, tool_call_id=call_id)

    def _search(
        self, keywords: Annotated[list[str], "Words that the chunks should contain."]
    ) -> str:
        """Finds the chunks of the documents that match the keywords best."""
        chunks = self._problem.search(keywords)
        self.found.update(chunk_id for chunk_id, _ in chunks)
        return self._problem.separator.join(text for _, text in chunks) or NO_RESULTS

    def _retrieval(self) -> float:
        """Share of the gold passages that calls have returned."""
        gold = self._problem.gold
        return sum(not self.found.isdisjoint(ids) for ids in gold) / len(gold)

    async def score(self) -> Score:
        config, retrieval = self._config, self._retrieval()
        correctness = float(self.answer is not None and self._problem.is_correct(self.answer))
        penalty = min(1.0, 0.5 * self.num_invalid_calls + (self.answer is None))
        reward = (
            config.retrieval_weight * retrieval
            + config.correctness_weight * correctness
            - config.format_penalty_weight * penalty
        )
        parts = {"retrieval": retrieval, "correctness": correctness, "format_penalty": penalty}
        own = [config.retrieval_weight * gain for gain in self.gains if config.turn_rewards]
        return Score(reward=reward, parts=parts, turn_rewards=dict(enumerate(own)))
