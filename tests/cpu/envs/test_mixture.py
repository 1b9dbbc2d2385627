"""Several tasks in one run: drawn by weight, resumed exactly, reported apart."""

import asyncio
import json
from dataclasses import dataclass

import pytest
from quickstarts import quickstart_with

from lockstep import config as C
from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.task_config import TaskConfig
from lockstep.agent.tasks import GeneratedSource, TaskSource
from lockstep.envs.mixture import MixtureConfig
from lockstep.errors import ConfigError, DataError
from lockstep.run.preflight import preflight
from lockstep.run.step_metrics import step_metrics
from lockstep.types import Group, Message, Task, Trajectory

AGENT = AgentConfig()


@dataclass(eq=True)  # not hashable, as a user's environment may be
class Counting(Environment):
    base: int

    async def reset(self):
        return [Message(role="user", content="count")]

    async def step(self, message):
        return Observation(done=True)

    async def score(self):
        return Score(reward=float(self.base))


class Names(TaskSource):
    """A task per name, then the end."""

    def __init__(self, names):
        self.names, self.index = names, 0

    def __next__(self):
        if self.index == len(self.names):
            raise StopIteration
        self.index += 1
        return Task(id=self.names[self.index - 1])

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


@dataclass(frozen=True, kw_only=True)
class CountingConfig(TaskConfig):
    base: int = 10
    """What episodes are worth."""
    num_held_out: int = 3
    ranked: bool = False

    def check(self):
        if self.base == 13:
            raise DataError("words.txt:1: is missing.")

    def tasks(self, *, split, seed):
        if split == "eval":
            return Names([f"held-{i}" for i in range(self.num_held_out)])
        return GeneratedSource(lambda s, i: Task(id=f"{self.base}-{s:x}"), seed=seed)

    def environment(self, task, agent):
        return Counting(self.base)

    def group_scorer(self, task):
        if not self.ranked:
            return None
        return lambda environments: [Score(reward=float(i)) for i, _ in enumerate(environments)]

    def label(self, task):
        return "hard" if self.base > 10 else ""


def mixture(*overrides):
    return quickstart_with("task=mixture", *overrides).task


def test_parts_and_weights_are_given_on_the_command_line():
    task = mixture(
        "task.parts.easy=counting",
        "task.parts.hard=counting",
        "task.parts.hard.base=20",
        "task.weights.hard=3",
    )
    assert task == MixtureConfig(
        parts={"easy": CountingConfig(), "hard": CountingConfig(base=20)}, weights={"hard": 3.0}
    )
    drawn = task.tasks(split="train", seed=4).take(400)
    share = sum(t.source == "hard" for t in drawn) / len(drawn)
    assert share == pytest.approx(0.75, abs=0.09)  # 4 standard errors of 400 draws
    assert all(t.id.startswith("20-" if t.source == "hard" else "10-") for t in drawn)
    assert [task.environment(t, AGENT).base for t in drawn[:9]] == [
        20 if t.source == "hard" else 10 for t in drawn[:9]
    ]


def test_the_file_form_of_a_mixture_reads_back_equal():
    config = quickstart_with(
        "task=mixture", "task.parts.docs=docsearch", "task.parts.docs.max_calls=2"
    )
    tree = C.to_dict(config)
    assert tree["task"]["parts"]["docs"]["type"] == "docsearch"
    assert C.from_dict(type(config), tree) == config
    assert ("task.parts.docs.max_calls", "int", "2") in [row[:3] for row in C.describe(config)]
    one_more = C.resolve(config, ["task.parts.words=counting", "task.parts.docs=none"])
    assert list(one_more.task.parts) == ["words"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "it has no part. Name one or more"),
        (["task.parts.easy.base=3"], "task.parts.easy="),
        (["task.parts.easy=countin"], "task.parts.easy=countin.*'count"),
        (
            ["task.parts.easy=counting", "task.parts.easy.bse=1"],
            "'task.parts.easy.bse'.*'task.parts.easy.base=",
        ),
        (["task.parts.easy=counting", "task.weights.eazy=1"], "eazy belongs to no part. Did"),
        (["task.parts.easy=counting", "task.weights.easy=0"], r"weights.easy=0.0.*\b0\b"),
        (["task.parts.easy=counting", "task.weights.easy=lots"], "'lots'"),
        (["task.parts.a b=counting"], "'a b'"),
        (["task.parts.a=mixture", "task.parts.a.parts.b=counting"], "'a'"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        mixture(*overrides)


def test_what_is_wrong_with_a_part_names_it():
    parts = {"good": CountingConfig(), "bad": CountingConfig(base=13)}
    with pytest.raises(DataError, match=r"^task.parts.bad: words.txt:1"):
        MixtureConfig(parts=parts).check()


def test_a_mixture_goes_on_where_it_was_stopped():
    task = MixtureConfig(parts={"a": CountingConfig(), "b": CountingConfig(base=20)})
    source = task.tasks(split="train", seed=1)
    source.take(17)
    again = task.tasks(split="train", seed=1)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert again.take(20) == source.take(20)
    assert len(task.tasks(split="eval", seed=1).take(100)) == 6


def test_a_group_is_scored_by_its_own_part():
    mixed = MixtureConfig(parts={"ranked": CountingConfig(ranked=True), "alone": CountingConfig()})
    ranked = Task(id="t", source="ranked")
    score = mixed.group_scorer(ranked)
    group = [mixed.environment(ranked, AGENT) for _ in range(2)]
    assert [s.reward for s in score(group)] == [0.0, 1.0]
    assert mixed.group_scorer(Task(id="t", source="alone")) is None


def test_the_first_task_of_each_part_is_tried_before_a_model_is_loaded():
    task = MixtureConfig(
        parts={"a": CountingConfig(), "b": CountingConfig(base=20)}, weights={"b": 1e-9}
    )
    assert [t.source for t in task.first_tasks(split="train", seed=0)] == ["a", "b"]
    none = MixtureConfig(parts={"a": CountingConfig(num_held_out=0)})
    with pytest.raises(ConfigError, match=r"task\.parts\.a.*'eval'"):
        none.first_tasks(split="eval", seed=0)
    long = f"task.parts.many.instructions={'Search well. ' * 200}"
    parts = ("task.parts.docs=docsearch", "task.parts.many=docsearch", "task.weights.many=1e-9")
    config = quickstart_with("task=mixture", *parts, long)
    with pytest.raises(ConfigError, match="no row fits"):
        preflight(config)


def test_labels_carry_the_part():
    task = MixtureConfig(parts={"a": CountingConfig(), "b": CountingConfig(base=20)})
    assert task.label(Task(id="t", source="a")) == ""
    assert task.label(Task(id="t", source="b")) == "b/hard"


def test_rewards_of_a_step_are_given_by_part():
    def episode(status, reward):
        made = Trajectory(id="t", task_id="t", status=status)
        made.observe([1])
        if status != "failed":
            made.rewards[0] = reward
        return made

    groups = [
        Group(task=Task(id="1", source="a"), trajectories=[episode("finished", 1.0)]),
        Group(
            task=Task(id="2", source="b"),
            trajectories=[episode("finished", 3.0), episode("failed", 0.0)],
        ),
    ]
    row = step_metrics(0, groups, [], {})
    assert (row["reward/source/a"], row["reward/source/b"]) == (1.0, 3.0)
    assert (row["episodes/source/a"], row["episodes/source/b"]) == (1, 2)


def test_what_the_parts_share_is_ended_with_the_mixture():
    closed = []

    class Closing(CountingConfig):
        TAG = "closing"

        async def close(self):
            closed.append(self.base)

    parts = {"a": Closing(base=1), "b": CountingConfig(), "c": Closing(base=2)}
    asyncio.run(MixtureConfig(parts=parts).close())
    assert sorted(closed) == [1, 2]


def test_a_part_with_a_weight_is_taken_out_with_it():
    config = quickstart_with(
        "task=mixture", "task.parts.a=docsearch", "task.parts.b=docsearch", "task.weights.a=3"
    )
    with pytest.raises(ConfigError, match=r"weights\.a=none"):
        C.resolve(config, ["task.parts.a=none"])
    left = C.resolve(config, ["task.parts.a=none", "task.weights.a=none"]).task
    assert isinstance(left, MixtureConfig)
    assert list(left.parts) == ["b"] and not left.weights
