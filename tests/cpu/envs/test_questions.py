"""The user's tasks from a file: alone, and with the tools of an MCP server."""

import asyncio
import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from playing import all_groups, play_turns
from quickstarts import quickstart_with

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Score
from lockstep.agent.scoring import ExactScorer, ScorerConfig
from lockstep.envs.questions import MCPConfig, QuestionsConfig
from lockstep.errors import ConfigError, DataError, ToolServerError
from lockstep.models.locate import locate_model
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.testing.engines import FakeEngine
from lockstep.types import Message, Task, ToolCall

AGENT = AgentConfig()
SERVERS = Path(__file__).parents[1] / "agent" / "mcp_servers.py"
COMMAND = f"{sys.executable} {SERVERS}"
needs_mcp = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed (extra mcp)")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        "".join(
            json.dumps({"id": f"q{i}", "question": f"What is {i} + 1?", "answer": i + 1}) + "\n"
            for i in range(30)
        )
    )
    return str(file)


@dataclass(frozen=True, kw_only=True)
class LengthScorer(ScorerConfig):
    """One of a user's."""

    most: int = 10

    async def score(self, task, answer, dialogue):
        if answer == "boom":
            raise RuntimeError("boom")
        return Score(reward=min(len(answer or ""), self.most) / self.most), {"scorer/calls": 1.0}


def play(environment, *turns):
    """(score, all counters, all messages) of an episode with these turns of the model."""
    found = play_turns(environment, turns)
    counters = {name: x for each in found.observations for name, x in each.metrics.items()}
    return found.score, counters, found.messages


def said(text):
    return Message(role="assistant", content=text)


def called(name, **arguments):
    call = ToolCall(name=name, arguments=json.dumps(arguments), id="1")
    return Message(role="assistant", tool_calls=(call,))


def test_a_question_is_scored_by_its_answer(path):
    config = QuestionsConfig(path=path, instructions="Be brief.")
    config.check()
    task = Task(id="q1", payload={"question": "Capital?", "answers": ["Paris", "Lutetia"]})
    score, _, messages = play(config.environment(task, AGENT), said(" paris\n"))
    assert (score.reward, dict(score.parts)) == (1.0, {"correctness": 1.0, "answered": 1.0})
    assert [m.role for m in messages] == ["developer", "user"]
    assert play(config.environment(task, AGENT), said("Rome"))[0].reward == 0.0
    assert play(config.environment(task, AGENT))[0].parts == {"correctness": 0.0, "answered": 0.0}


def test_splits_of_a_file_share_no_task(path):
    config = QuestionsConfig(path=path, eval_share=0.3)
    train = {t.id for t in config.tasks(split="train", seed=0).take(100)}
    held_out = {t.id for t in config.tasks(split="eval", seed=0).take(100)}
    assert len(train | held_out) == 30
    assert not train & held_out


def test_a_scorer_of_ones_own_is_a_kind(path):
    task = quickstart_with(
        "task=questions", f"task.path={path}", "task.scorer=length_scorer", "task.scorer.most=4"
    ).task
    assert task.scorer == LengthScorer(most=4)
    score, counters, _ = play(
        task.environment(Task(id="q", payload={"question": "?"}), AGENT), said("ab")
    )
    assert (score.reward, counters) == (0.5, {"scorer/calls": 1.0})


def test_a_file_that_cannot_be_scored_is_refused_at_start(tmp_path, path):
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"id": "a", "question": "?"}\n{"id": "b", "question": "?"}\n' * 1)
    with pytest.raises(DataError, match="`answer`"):
        QuestionsConfig(path=str(bare), eval_path=path).check()
    with pytest.raises(ConfigError, match=r"task\.path=FILE"):
        QuestionsConfig().check()
    with pytest.raises(DataError, match="'q0'"):
        QuestionsConfig(path=path, eval_path=path).check()
    with pytest.raises(DataError, match=r"\b0\b"):
        QuestionsConfig(path=str(bare), eval_share=1e-9, scorer=LengthScorer()).check()


@needs_mcp
@pytest.mark.parametrize("server", ["shared", "episode"])
def test_an_episode_calls_tools_of_a_server_and_answers(path, server):
    config = MCPConfig(path=path, command=f"{COMMAND} plain", tools=("add", "pid"), server=server)
    config.check()
    task = next(config.tasks(split="train", seed=0))
    answer = str(task.payload["answer"])
    pids = set()
    for _ in range(2):
        environment = config.environment(task, AGENT)
        score, counters, messages = play(
            environment, called("pid"), called("add", a=int(answer) - 1, b=1), said(answer)
        )
        assert [t.name for t in environment.tools] == ["add", "pid"]
        assert messages[-1].content == answer
        assert (score.reward, counters) == (1.0, {"tool/calls": 1.0})
        pids.add(messages[-2].content)
    assert len(pids) == (1 if server == "shared" else 2)


@needs_mcp
def test_a_server_that_dies_in_every_episode_ends_none_of_them(path):
    """Eight episodes at once on one server, which each of them kills in its first turn."""
    tokenizer = Tokenizer.from_file(locate_model("tiny-qwen3"))
    renderer = make_renderer(ChatMLConfig(), tokenizer)
    begin, close = (tokenizer.control_id(name) for name in ("<tool_call>", "</tool_call>"))
    call = [begin, *tokenizer.encode('\n{"name": "die", "arguments": {}}\n'), close]
    turns = [[*ids, renderer.stop_ids[0]] for ids in (call, tokenizer.encode("It is gone."))]

    def reply(request):
        return turns[" server went away" in tokenizer.decode(request.prompt_ids.tolist())]

    config = MCPConfig(path=path, command=f"{COMMAND} plain", tools=("die",))
    agent = AgentConfig(max_turns=3, max_turn_tokens=64)
    tasks = config.tasks(split="train", seed=0).take(2)
    groups = asyncio.run(
        all_groups(
            FakeEngine(reply), renderer, lambda task: config.environment(task, agent), tasks,
            group_size=4, config=agent, max_tokens=4096,
        )
    )  # fmt: skip
    asyncio.run(config.close())
    episodes = [t for group in groups for t in group.trajectories]
    assert [(t.status, t.reward) for t in episodes] == [("finished", 0.0)] * 8
    assert all(t.metrics["tool/errors"] == 1 for t in episodes)


@needs_mcp
def test_a_server_is_tried_before_a_model_is_loaded(path):
    with pytest.raises(ToolServerError, match="cannot find its key"):
        MCPConfig(path=path, command=f"{COMMAND} broken").check()


def test_white_space_and_case_do_not_matter_to_the_exact_scorer():
    task = Task(id="t", payload={"answer": 7.5})
    assert asyncio.run(ExactScorer().score(task, "7.5 ", ()))[0].reward == 1.0
    named = Task(id="t", payload={"answer": "New  York"})
    assert asyncio.run(ExactScorer().score(named, "new york", ()))[0].reward == 1.0
