"""The task kinds `math` and `retool`: their settings and their episodes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score, first_messages
from lockstep.agent.sandbox.base import Sandbox, SandboxConfig
from lockstep.agent.sandbox.monty import MontyConfig
from lockstep.agent.sandbox.tool import python_tool
from lockstep.agent.task_config import AskedTasks, Split
from lockstep.agent.tasks import GeneratedSource, ListSource, TaskSource
from lockstep.agent.tools import ToolEnvironment, ToolLimits
from lockstep.children import Child
from lockstep.config import at_least, require
from lockstep.envs.data_files import HeldOutTasks, split_tasks
from lockstep.envs.math.grading import Form, grade_reply, math_verify_child
from lockstep.envs.math.problem_sets import PUBLIC, Problem, read_problems
from lockstep.envs.math.problems import Kind, make_problem
from lockstep.errors import DataError
from lockstep.tables import tables_beside
from lockstep.types import Message, Task

Source = Literal["arithmetic", "chain", "gsm8k", "dapo", "aime", "file"]
_GENERATED: dict[str, Kind] = {"arithmetic": "word", "chain": "chain"}
"""Sources whose problems a program makes."""

FORM_INSTRUCTIONS: dict[Form, str] = tables_beside(__file__)["form_instructions"]
TOOL_INSTRUCTIONS = " You can run Python code with the tool python before you answer."
FAILED = "error"
"""Result of a call whose code failed, if errors are not explained."""


@dataclass(frozen=True, kw_only=True)
class MathConfig(AskedTasks, HeldOutTasks):
    """A problem and one reply, whose final answer is graded.

    reward = correctness_weight * correctness + format_weight * format
    """

    source: Source = "arithmetic"
    """arithmetic: endless generated word problems of two or three steps. chain: endless generated
    products of larger numbers with a second step. gsm8k, dapo, aime: the published data sets.
    file: your own problems, with the columns question and answer."""
    path: str = ""
    """Data set: a .parquet or .jsonl file, a folder, or ORGANISATION/NAME of the Hugging Face hub.
    Empty: the repository that the source was published in."""
    eval_source: Source | None = None
    """Source of held-out problems. none: the test split of `source` or, if it has none, eval_share
    of its problems."""
    eval_path: str = ""
    """Data set to evaluate on, as `path`. Of a folder the test files are taken, or the training
    files if it has no test files."""
    eval_share: float = 0.02
    bad_rows: Literal["error", "drop"] = "error"
    """error: refuse data with a question whose answer cannot be graded, that has two different
    answers, or that is in both splits. drop: leave such questions out."""
    form: Form | None = None
    """Place of the final answer: boxed, hashes (####), tag (<answer>), answer_line (Answer: ...) or
    last_number. none: the source's own."""
    lenient: bool = False
    """Grade the last number of a reply that has no answer in that form; its format scores 0."""
    correctness_weight: Annotated[float, at_least(0)] = 0.9
    """Weight of a right answer (0 or 1)."""
    format_weight: Annotated[float, at_least(0)] = 0.1
    """Weight of an answer in the right form (0 or 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_generated = self.source in _GENERATED, self._source_of("eval") in _GENERATED
        expected = "empty: the problems are generated. Use a source of gsm8k, dapo, aime or file"
        require(
            self,
            path=(not self.path or not is_generated[0], expected),
            eval_path=(not self.eval_path or not is_generated[1], expected),
        )

    def check(self) -> None:
        _ = self._problems

    def tasks(self, *, split: Split, seed: int) -> TaskSource:
        """Generated problems: endless, one stream per split and seed. Data sets: reshuffled in each
        epoch of training; once and in order for evaluation."""
        source = self._source_of(split)
        if source in _GENERATED:
            make = partial(_generated_task, _GENERATED[source])
            return GeneratedSource(make, seed=seed, split=split)
        tasks = [
            Task(id=p.id, payload={"question": p.question, "answer": p.answer})
            for p in self._problems[split]
        ]
        return ListSource.of_split(tasks, split=split, seed=seed, name=source)

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return MathEnvironment(self, task)

    def label(self, task: Task) -> str:
        """Kind of a generated problem: "2-step", "3-step", "chain" or "choice"."""
        return task.payload.get("label", "")

    async def close(self) -> None:
        self._comparer.close()

    async def grade(self, task: Task, reply: str) -> Score:
        """The reward of a reply, with the parts `correctness` and `format`, each 0 or 1."""
        how: dict[str, Any] = {"form": self._form_of(task), "lenient": self.lenient}
        expected = task.payload["answer"]
        verdict = await grade_reply(reply, expected, **how, comparer=self._comparer)
        correctness, has_form = float(verdict.is_correct), float(verdict.has_form)
        reward = self.correctness_weight * correctness + self.format_weight * has_form
        return Score(reward=reward, parts={"correctness": correctness, "format": has_form})

    def opening(self, task: Task) -> list[Message]:
        """The messages before the first reply."""
        own = self._own_instructions(task, self._form_of(task))
        return self.asked(task.payload["question"], own=own)

    def _source_of(self, split: Split) -> Source:
        return (self.eval_source or self.source) if split == "eval" else self.source

    def _form_of(self, task: Task) -> Form:
        source = task.id.partition("-")[0]
        return self.form or (PUBLIC[source].form if source in PUBLIC else "hashes")

    def _own_instructions(self, task: Task, form: Form) -> str:
        """States the form, unless the source's questions do."""
        source = task.id.partition("-")[0]
        if source in PUBLIC and PUBLIC[source].is_prompt_whole and self.form is None:
            return ""
        return FORM_INSTRUCTIONS[form]

    # `cached_property` keeps its value beside the fields: it is neither compared nor written.

    @cached_property
    def _comparer(self) -> Child:
        """Compares answers that are not numbers, for all episodes."""
        return math_verify_child()

    @cached_property
    def _problems(self) -> dict[str, list[Problem]]:
        """Problems of both splits, [] for a generated one."""
        train = self._read(self.source, self.path, "train")
        source, path = self._source_of("eval"), self.eval_path
        if path or source != self.source:
            held_out = self._read(source, path, "eval") or self._read(source, path, "train")
            return {"train": self._without(train, held_out), "eval": held_out}
        held_out = self._read(source, self.path, "eval")
        if held_out or not train:
            return {"train": self._without(train, held_out), "eval": held_out}
        where = train[0].where
        return split_tasks(train, None, self.eval_share, name=where, key=lambda p: p.question)

    def _read(self, source: Source, path: str, split: Split) -> list[Problem]:
        if source in _GENERATED:
            return []
        return read_problems(source, path, split, bad_rows=self.bad_rows)

    def _without(self, train: list[Problem], held_out: list[Problem]) -> list[Problem]:
        held = {p.question: p for p in held_out}
        both = next((p for p in train if p.question in held), None)
        if both is not None and self.bad_rows == "error":
            raise DataError(
                f"{both.where}: the question is at {held[both.question].where} too, but a training "
                "question cannot be an evaluation question. Leave such questions out of training "
                "with task.bad_rows=drop."
            )
        return [p for p in train if p.question not in held]


@dataclass(frozen=True, kw_only=True)
class RetoolConfig(MathConfig):
    """A problem, calls of a Python tool over several turns, and a graded final answer (ReTool).

    The code runs in a sandbox. The model reads its output, errors included.
    """

    source: Source = "chain"
    """Source of the problems, as in `math`. chain: endless generated products of larger numbers
    with a second step, which no small model can compute without a tool."""
    tool: bool = True
    """Give the model the tool. false: the same problems without it, to measure its worth."""
    sandbox: SandboxConfig = field(default_factory=MontyConfig)
    """Sandbox that runs the code."""
    keeps_variables: bool = False
    """Let programs of one episode see each other's variables."""
    explains_errors: bool = True
    """Show the model the error of a program, and not only that it failed."""
    head_instructions: str | None = None
    """Developer message with tool=false. none: the message of `math`."""

    def check(self) -> None:
        super().check()
        if self.tool:
            self.sandbox.check()

    def environment(self, task: Task, agent: AgentConfig) -> Environment:
        return RetoolEnvironment(self, task, ToolLimits.of(agent))

    async def close(self) -> None:
        await super().close()
        if "_sandbox" in vars(self):
            await self._sandbox.close()

    def asked(self, question: str | Sequence[Message], *, own: str = "") -> list[Message]:
        if not self.tool and self.head_instructions is not None:
            return first_messages(question, instructions=self.head_instructions)
        return super().asked(question, own=(own + TOOL_INSTRUCTIONS).strip() if self.tool else own)

    @cached_property
    def _sandbox(self) -> Sandbox:
        return self.sandbox.open()


def _generated_task(kind: Kind, task_seed: int, index: int) -> Task:
    made = make_problem(task_seed, kind)
    payload = {"question": made.question, "answer": made.answer, "label": made.label}
    return Task(id=f"made-{task_seed:016x}", payload=payload)


class MathEnvironment(Environment):
    """One reply, which is graded."""

    def __init__(self, config: MathConfig, task: Task) -> None:
        self._config, self._task = config, task
        self.reply = ""

    async def reset(self) -> Sequence[Message]:
        return self._config.opening(self._task)

    async def step(self, message: Message) -> Observation:
        self.reply = "" if message.parse_error else message.content
        return Observation(done=True)

    async def score(self) -> Score:
        return await self._config.grade(self._task, self.reply)


class RetoolEnvironment(ToolEnvironment):
    """Calls of `python(code)` until a turn has no call; that turn's final answer is graded.

    A turn with a call is no answer, nor is a turn that was cut off. Output and errors of the code
    are observations, and its endings are the metrics `sandbox/...`.
    """

    def __init__(self, config: RetoolConfig, task: Task, limits: ToolLimits) -> None:
        self._config, self._task, self.limits = config, task, limits
        self._session = uuid.uuid4().hex if config.keeps_variables else ""
        if config.tool:
            self.tools = (python_tool(config._sandbox, session=self._session),)

    async def reset(self) -> Sequence[Message]:
        return self._config.opening(self._task)

    async def step(self, message: Message) -> Observation:
        seen = await super().step(message)
        if self._config.explains_errors or not _has_failed(seen):
            return seen
        return replace(seen, messages=[replace(m, content=FAILED) for m in seen.messages])

    async def score(self) -> Score:
        return await self._config.grade(self._task, self.answer or "")

    async def close(self) -> None:
        if self.tools and self._session:
            await self._config._sandbox.end_session(self._session)


def _has_failed(seen: Observation) -> bool:
    """True if a call could not be run, or its program did not end well."""
    good = {"tool/calls", "sandbox/programs", "sandbox/truncated"}
    return bool(seen.messages) and any(name not in good for name in seen.metrics)
