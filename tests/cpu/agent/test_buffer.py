"""Batches ahead of the trainer: when they begin, what a failure or an end leaves of them."""

import asyncio
import json
import threading

import pytest
import torch

from lockstep.agent.buffer import Buffer
from lockstep.agent.loop import EpisodeSlots
from lockstep.agent.tasks import DifficultySource, ListSource
from lockstep.launch.threads import in_thread
from lockstep.types import Group, Task, Trajectory

TASKS = [Task(id=name) for name in "abcdefghijkl"]
CPU = torch.device("cpu")


class Plays:
    """Batches that end when the test says so."""

    def __init__(self, *, is_held=False, broken=()):
        self.is_held, self.broken = is_held, broken
        self.begun: list[tuple[int, str]] = []
        self.cancelled: list[int] = []
        self.may_end: dict[int, asyncio.Event] = {}

    async def __call__(self, step, tasks, on_episode):
        self.begun.append((step, "".join(task.id for task in tasks)))
        self.may_end[step] = asyncio.Event()
        try:
            if self.is_held:
                await self.may_end[step].wait()
            if step in self.broken:
                raise RuntimeError(f"batch {step}")
        except asyncio.CancelledError:
            self.cancelled.append(step)
            raise
        for _ in tasks:
            on_episode()
        return [Group(task=task, trajectories=[]) for task in tasks]


def buffer_of(max_staleness, *, num_steps=5, num_tasks=2, epochs=None, **options):
    tasks = ListSource(TASKS, shuffle=False, epochs=epochs)
    return Buffer(
        tasks=tasks, num_tasks=num_tasks, num_steps=num_steps, max_staleness=max_staleness,
        device=CPU, **options,
    )  # fmt: skip


def ids(batch):
    return "".join(group.task.id for group in batch.groups)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 7])
async def test_a_batch_begins_max_staleness_steps_before_it_is_trained_and_no_later(max_staleness):
    buffer, play, taken = buffer_of(max_staleness), Plays(), []
    for step in range(5):
        taken.append(ids(await buffer.take(step, play)))
        assert [s for s, _ in play.begun] == list(range(min(step + max_staleness + 1, 5)))
    assert taken == ["ab", "cd", "ef", "gh", "ij"]
    assert [names for _, names in play.begun] == taken, "each batch once, in order"


async def test_later_batches_are_under_way_while_the_first_is_awaited_and_while_it_is_trained():
    shown = []
    buffer = buffer_of(1, on_progress=lambda done, total: shown.append((done, total)))
    play = Plays(is_held=True)
    first = asyncio.create_task(buffer.take(0, play))
    while len(play.may_end) < 2:
        await asyncio.sleep(0)
    play.may_end[1].set()  # the later one ends first, and waits for its turn
    await asyncio.sleep(0)
    assert not first.done() and shown == [(0, 2)], "only what is awaited is shown"
    play.may_end[0].set()
    assert ids(await first) == "ab" and shown == [(0, 2), (1, 2), (2, 2)]
    assert ids(await buffer.take(1, play)) == "cd" and shown[3:] == [(2, 2)]


async def test_a_batch_that_breaks_shows_at_its_own_turn():
    buffer, play = buffer_of(2), Plays(broken=[1])
    assert ids(await buffer.take(0, play)) == "ab"
    with pytest.raises(RuntimeError, match="batch 1"):
        await buffer.take(1, play)
    await buffer.close()


async def test_the_state_before_a_batch_samples_it_and_all_later_ones_again():
    buffer, play = buffer_of(2), Plays()
    for step in range(2):
        await buffer.take(step, play)
        for resumed_at in (step, step + 1):  # broken off before its update, and after it
            again = buffer_of(2)
            state = buffer.state_before(resumed_at)
            again.restore(resumed_at, state)
            assert again.state_before(resumed_at) == state, "broken off before it goes on"
            names = [ids(await again.take(at, play)) for at in range(resumed_at, 5)]
            assert names == ["ab", "cd", "ef", "gh", "ij"][resumed_at:]


async def test_a_stream_that_ends_gives_what_is_left_and_then_nothing():
    buffer, play = buffer_of(2, num_tasks=7, epochs=1), Plays()
    taken = [await buffer.take(step, play) for step in range(3)]
    assert [ids(batch) for batch in taken] == ["abcdefg", "hijkl", ""]


async def test_closing_ends_every_batch_that_is_under_way():
    buffer, play = buffer_of(2), Plays(is_held=True)
    first = asyncio.create_task(buffer.take(0, play))
    while len(play.may_end) < 3:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await buffer.close()
    await buffer.close()
    assert sorted(play.cancelled) == [0, 1, 2]


async def test_idle_is_the_time_in_which_nothing_is_sampled():
    buffer, play = buffer_of(1), Plays(is_held=True)
    first = asyncio.create_task(buffer.take(0, play))
    while len(play.may_end) < 2:
        await asyncio.sleep(0)
    play.may_end[0].set()
    await first
    assert buffer.take_idle_seconds() == 0, "batch 1 is under way"
    play.may_end[1].set()
    await asyncio.sleep(0.02)
    assert buffer.take_idle_seconds() > 0.01
    await buffer.close()


# -- episodes at the same time --------------------------------------------------------------------


async def test_a_slot_is_not_lost_with_an_episode_that_is_cancelled():
    slots, never = EpisodeSlots(1), asyncio.Event()

    async def hold():
        async with slots:
            await never.wait()

    jobs = [asyncio.create_task(hold()) for _ in range(3)]
    await asyncio.sleep(0)
    jobs[0].cancel()  # hands its slot to the second, which is cancelled before it wakes
    await asyncio.sleep(0)
    jobs[1].cancel()
    await asyncio.sleep(0)
    jobs[2].cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    async with slots:
        pass


# -- beside the event loop ------------------------------------------------------------------------


async def test_work_in_a_thread_leaves_the_event_loop_running_and_gives_its_result():
    may_end = threading.Event()

    async def end():
        may_end.set()

    job = asyncio.create_task(end())
    assert await in_thread(lambda: may_end.wait(10) and 7, device=CPU) == 7
    await job
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, device=CPU)


async def test_an_interrupt_waits_for_the_work_and_comes_at_the_next_await():
    began, may_end, steps = threading.Event(), threading.Event(), []

    def update():
        began.set()
        may_end.wait(10)
        return "updated"

    async def step():
        steps.append(await in_thread(update, device=CPU))
        steps.append("logged")  # what belongs to the update is not lost
        await asyncio.sleep(0)
        steps.append("never")

    job = asyncio.create_task(step())
    while not began.is_set():
        await asyncio.sleep(0.001)
    job.cancel()
    await asyncio.sleep(0)
    assert not job.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert steps == ["updated", "logged"]
    assert job.cancelling() == 1, "one interrupt: what asyncio takes for Ctrl-C"


class Teaches(Plays):
    """Groups of two episodes, whose rewards are equal for the tasks that are named."""

    def __init__(self, silent):
        super().__init__()
        self.silent = silent

    async def __call__(self, step, tasks, on_episode):
        groups = await super().__call__(step, tasks, on_episode)
        for group in groups:
            second = 0.0 if group.task.id in self.silent else 1.0
            group.trajectories = [episode(0.0), episode(second)]
        return groups


def episode(reward):
    trajectory = Trajectory(id="t", status="finished")
    leaf = trajectory.record([7], logprobs=[-1.0], parent=trajectory.observe([1]), prompt_ids=[1])
    trajectory.rewards[leaf] = reward
    return trajectory


async def taken(buffer, play, steps=range(5)):
    """(groups, replaced ones) of each step."""
    batches = [await buffer.take(step, play) for step in steps]
    return [(ids(b), "".join(group.task.id for group in b.replaced)) for b in batches]


@pytest.mark.parametrize(("silent", "most", "expected"), [
    ("", 2, [("ab", ""), ("cd", ""), ("ef", "")]),
    ("b", 2, [("ac", "b"), ("de", ""), ("fg", "")]),
    ("abc", 4, [("de", "abc"), ("fg", ""), ("hi", "")]),
    ("abcd", 2, [("ab", "cd"), ("ef", ""), ("gh", "")]),   # as many as may be drawn, in vain
    ("bcd", 2, [("ab", "cd"), ("ef", ""), ("gh", "")]),
    ("abcdefghijkl", 0, [("ab", ""), ("cd", ""), ("ef", "")]),
])  # fmt: skip
def test_groups_without_a_signal_are_replaced_while_tasks_may_be_drawn(silent, most, expected):
    buffer = buffer_of(0, max_extra_tasks=most)
    assert asyncio.run(taken(buffer, Teaches(silent), range(3))) == expected


def test_a_task_that_the_batch_has_is_not_played_again():
    """A stream of two tasks comes round: every extra task is one that was played."""
    buffer = Buffer(
        tasks=ListSource(TASKS[:2], shuffle=False), num_tasks=2, num_steps=5, max_staleness=0,
        max_extra_tasks=6, device=CPU,
    )  # fmt: skip
    play = Teaches("a")
    assert asyncio.run(taken(buffer, play, [0])) == [("ba", "")]
    assert [names for _, names in play.begun if names] == ["ab"]


def test_a_stream_that_ends_leaves_the_groups_as_they_are():
    buffer = buffer_of(0, max_extra_tasks=6, epochs=1, num_tasks=5)
    found = asyncio.run(taken(buffer, Teaches("bij"), range(3)))
    assert found == [("acdef", "b"), ("ghkli", "j"), ("", "")]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("order", ["stream", "expected"])
async def test_a_run_that_goes_on_anywhere_replaces_the_same_groups(max_staleness, order):
    def fresh():
        buffer = buffer_of(max_staleness, max_extra_tasks=3)
        if order == "expected":
            buffer.tasks = DifficultySource(
                buffer.tasks, candidates=2, label=lambda task: "", seed=1
            )
        return buffer

    async def play_from(buffer, steps, *, stop=None):
        out = []
        for step in steps:
            batch = await buffer.take(step, Teaches("bdfghk"))
            out.append((ids(batch), "".join(group.task.id for group in batch.replaced)))
            if step == stop:
                return out, buffer.state_before(step)
            if order == "expected":
                buffer.tasks.observe([*batch.groups, *batch.replaced])
        return out, buffer.state_before(steps[-1] + 1)

    whole, _ = await play_from(fresh(), range(5))
    assert any(replaced for _, replaced in whole)
    for at in range(1, 5):
        _, state = await play_from(fresh(), range(at))
        again = fresh()
        again.restore(at, json.loads(json.dumps(state)))
        assert again.state_before(at) == json.loads(json.dumps(state))
        assert (await play_from(again, range(at, 5)))[0] == whole[at:]
        # within a step, after its groups were replaced
        _, state = await play_from(fresh(), range(at + 1), stop=at)
        again = fresh()
        again.restore(at, json.loads(json.dumps(state)))
        assert again.state_before(at) == json.loads(json.dumps(state))
        assert (await play_from(again, range(at, 5)))[0] == whole[at:]
