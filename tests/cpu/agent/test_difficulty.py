"""Tasks drawn by how often their groups teach."""

from collections import Counter

import pytest

from lockstep.agent.tasks import DifficultySource, GeneratedSource, ListSource
from lockstep.types import Group, Task, Trajectory

TASKS = [Task(id=name) for name in "abcdefghijklmnopqrst"]


def group(task, rewards):
    episodes = []
    for reward in rewards:
        trajectory = Trajectory(id=task.id, status="finished")
        leaf = trajectory.record(
            [7], logprobs=[-1.0], parent=trajectory.observe([1]), prompt_ids=[1]
        )
        trajectory.rewards[leaf] = reward
        episodes.append(trajectory)
    return Group(task=task, trajectories=episodes)


def source_of(*, label=lambda task: "", candidates=4, tasks=TASKS):
    return DifficultySource(
        ListSource(tasks, shuffle=False), candidates=candidates, label=label, seed=3
    )


def test_a_tasks_expected_signal_is_the_share_of_its_groups_that_taught_with_one_added():
    source, (task, other) = source_of(), TASKS[:2]
    assert source.expected_signal(task) == 1.0
    source.observe([group(task, [0.0, 0.0])])
    assert source.expected_signal(task) == pytest.approx(1 / 2)
    source.observe([group(task, [1.0, 1.0]), group(task, [0.0, 1.0])])
    assert source.expected_signal(task) == pytest.approx((3 * 1 / 3 + 1) / 4)
    assert source.figures[task.id] == pytest.approx([3, 0.5, 1 / 3])
    assert source.expected_signal(other) == 1.0


def test_figures_follow_the_policy():
    """After eight groups the first ones are forgotten."""
    source, task = source_of(), TASKS[0]
    for _ in range(40):
        source.observe([group(task, [0.0, 0.0])])
    before = source.expected_signal(task)
    for _ in range(16):
        found = source.observe([group(task, [0.0, 1.0])])
    assert before < 0.15 and source.expected_signal(task) > 0.85
    assert found == {"signal/known_tasks": 1.0, "signal/known_share": pytest.approx(0.88, abs=0.01)}


def test_tasks_that_teach_are_drawn_more_often_and_none_is_drawn_never():
    source = source_of()
    for task in TASKS:
        rewards = [0.0, 1.0] if task.id < "f" else [1.0, 1.0]  # 5 of 20 teach
        for _ in range(8):
            source.observe([group(task, rewards)])
    drawn = Counter(task.id for _ in range(400) for task in source.take(5))
    teach = sum(count for name, count in drawn.items() if name < "f")
    # weights 1 and 1/9: a stream of 20 offers all of them, so 5 * 9 / (5 * 9 + 15) at the first
    # draw of each five; fewer later, as those that teach are used up
    assert 0.55 < teach / 2000 < 0.75
    assert set(drawn) == {task.id for task in TASKS}


def test_a_new_task_has_the_figures_of_its_label():
    source = DifficultySource(
        GeneratedSource(lambda seed, index: Task(id=f"{seed}", payload={"hops": index % 2})),
        candidates=2, label=lambda task: f"{task.payload['hops']}-hop", seed=0,
    )  # fmt: skip
    easy, hard = Task(id="x", payload={"hops": 0}), Task(id="y", payload={"hops": 1})
    for _ in range(8):
        source.observe([group(easy, [1.0, 1.0]), group(hard, [0.0, 1.0])])
    drawn = Counter(task.payload["hops"] for _ in range(100) for task in source.take(4))
    assert drawn[1] > 2 * drawn[0] > 0


def test_a_state_goes_on_with_the_same_tasks_and_figures():
    source = source_of()
    for task in source.take(6):
        source.observe([group(task, [0.0, float(task.id > "c")])])
    state = source.state_dict()
    again = source_of()
    again.load_state_dict(state)
    assert [t.id for t in again.take(5)] == [t.id for t in source.take(5)]
    assert again.figures == source.figures
    source.observe([group(TASKS[0], [0.0, 1.0])])
    assert state["figures"] != source.figures, "a state does not change afterwards"


def test_an_episode_that_failed_is_no_figure():
    source = source_of()
    failed = group(TASKS[0], [1.0])
    failed.trajectories[0].status = "failed"
    source.observe([failed])
    assert source.figures == {}


def test_a_stream_that_ends_gives_what_is_left():
    source = DifficultySource(
        ListSource(TASKS[:3], shuffle=False, epochs=1), candidates=2, label=lambda t: "", seed=0
    )
    assert len(source.take(2)) == 2 and source.take(2) == []
    with pytest.raises(StopIteration):
        next(source)
