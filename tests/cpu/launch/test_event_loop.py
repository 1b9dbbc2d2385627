"""Coroutines run to their end from plain code, also where an event loop runs already."""

import asyncio
import os
import signal

import pytest
from quickstarts import quickstart_with

import lockstep
from lockstep.launch.event_loop import run_to_end
from lockstep.run.train import train


def in_a_cell(call):
    """What a notebook does: the loop of the kernel calls plain code."""

    async def cell():
        task = asyncio.current_task()
        result = call()
        assert asyncio.current_task() is task and asyncio.get_running_loop() is task.get_loop()
        async with asyncio.timeout(10):  # the outer loop goes on as before
            await asyncio.to_thread(lambda: None)
        return result

    return asyncio.run(cell())


async def answer():
    await asyncio.sleep(0)
    return asyncio.get_running_loop()


def test_a_coroutine_runs_inside_a_running_loop_in_a_loop_of_its_own():
    loop = in_a_cell(lambda: run_to_end(answer()))
    assert loop.is_closed()


async def test_it_runs_where_the_loop_calls_without_a_task():
    got = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: got.set_result(run_to_end(answer())))
    assert (await got).is_closed()


async def test_it_runs_in_a_loop_of_another_thread():
    assert (await asyncio.to_thread(in_a_cell, lambda: run_to_end(answer()))).is_closed()


def test_an_error_inside_a_running_loop_comes_out_as_it_is():
    async def fails():
        raise ValueError("four")

    with pytest.raises(ValueError, match="four"):
        in_a_cell(lambda: run_to_end(fails()))


def test_an_interrupt_inside_a_running_loop_ends_the_coroutine_and_not_the_loop(plain_interrupts):
    cleaned = []

    async def waits():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    def call():
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            run_to_end(waits())
        assert signal.getsignal(signal.SIGINT) is before
        return "went on"

    assert in_a_cell(call) == "went on" and cleaned == [True]


def interrupting_monitor(run):
    """Interrupts step 1 between its update and its row."""

    def look(step, rows, sampled_rows, groups, *, version):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    return look


def test_a_run_interrupted_in_mid_step_in_a_notebook_has_its_checkpoint_and_resumes(
    tmp_path, plain_interrupts
):
    settings = ["steps=3", "groups_per_step=1", "group_size=2", "evaluation.num_tasks=1"]
    config = quickstart_with(*settings)
    out = tmp_path / "run"
    outcome = in_a_cell(lambda: train(config, out=out, monitor=interrupting_monitor))
    assert outcome.status == "interrupted"
    run = lockstep.load(out)
    assert list(run.checkpoints()) == [2] and run.column("reward/mean")[0] == [0, 1]
    outcome = in_a_cell(lambda: train(config, out=out, resume=True))
    assert outcome.status == "done"
    assert lockstep.load(out).column("reward/mean")[0] == [0, 1, 2]
