"""Environments, matches, tools, rewards and task sources that return or do anything: each fails its
own episode with a reason, the others are trained, and the run is stored, loaded and reported."""

import asyncio
import contextlib
import json
import logging
import math
import os
import random
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections import UserDict, UserList
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

import numpy as np
import torch
from quickstarts import quickstart_with

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.task_config import TaskConfig
from lockstep.agent.tasks import ListSource
from lockstep.agent.tools import ToolEnvironment, ToolFailure, ToolOutput, tool
from lockstep.report.document import to_document, write_report
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.types import Message, Task, ToolCall, ToolSchema

SMALL = (
    "model=tiny-qwen3", "steps=1", "evaluation=none", "checkpoint.every=0", "group_size=2",
    "agent.max_turns=2", "agent.max_turn_tokens=4", "agent.max_seconds=300",
    "max_failed_share=0.999",
)  # fmt: skip


def user(text="go", **fields):
    return Message(role="user", content=text, **fields)


class Liar(str):
    """Equal to everything."""

    __hash__ = str.__hash__

    def __eq__(self, other):
        return True


class Unwritable:
    def __repr__(self):
        raise KeyboardInterrupt

    __str__ = __bool__ = __len__ = __iter__ = __repr__


def forced(noun, **fields):
    for name, value in fields.items():
        object.__setattr__(noun, name, value)
    return noun


def itself():
    found = []
    found.append(found)
    return found


def doubled(depth=60):
    found = ["x"]
    for _ in range(depth):
        found = [found, found]
    return found


def deep():
    found = []
    for _ in range(100_000):
        found = [found]
    return found


def raises(error):
    raise error


class Loud(BaseException):
    pass


async def forever():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


MESSAGES = {
    "name": lambda: [user(name=5)],
    "call_id": lambda: [user(tool_call_id=b"x")],
    "thinking": lambda: [user(thinking=["x"])],
    "parse_error": lambda: [user(parse_error=ValueError())],
    "content": lambda: [user(None)],
    "role": lambda: [forced(user(), role="critic")],
    "liar": lambda: [forced(user(), role=Liar("critic"))],
    "forced": lambda: [forced(user(), thinking=math.nan)],
    "call": lambda: [Message(role="assistant", tool_calls=[ToolCall(name=1, arguments="{}")])],
    "calls": lambda: [Message(role="assistant", tool_calls=[{"name": "x"}])],
    "forced_call": lambda: [
        Message(role="assistant", tool_calls=(forced(ToolCall(name="a", arguments=""), id=7),))
    ],
    "no_list": lambda: user(),
    "dicts": lambda: [{"role": "user", "content": "go"}],
    "text": lambda: "go",
    "generator": lambda: (user() for _ in range(2)),
    "unwritable": lambda: [Unwritable()],
    "not_iterable": lambda: UserDict(),
    "none": lambda: None,
}
METRICS = {
    "text": {"a": "1"}, "nan": {"a": math.nan}, "complex": {"a": 1j}, "key": {1: 1}, "list": [1],
    "numpy": {"a": np.array([1, 2])}, "decimal": {"a": Decimal(1)}, "huge": {"a": 10**400},
    "unwritable": {"a": Unwritable()}, "none": None, "bytes_key": {b"a": 1},
}  # fmt: skip
SCORES = {
    "none": lambda: None,
    "number": lambda: 1.0,
    "nan": lambda: Score(reward=math.nan),
    "text": lambda: Score(reward="1"),
    "tensor": lambda: Score(reward=torch.ones(2)),
    "unwritable": lambda: Score(reward=Unwritable()),
    "turns": lambda: Score(reward=1.0, turn_rewards={"0": 1.0}),
    "turn": lambda: Score(reward=1.0, turn_rewards={99: 1.0}),
    "forced": lambda: forced(Score(reward=1.0), parts=7),
    "coroutine": lambda: forever,
}
PAYLOADS = {
    "set": {"a": {1, 2}},
    "self": {"a": [itself()]},
    "object": {"a": object()},
    "nan": {"a": [{"b": math.nan}]},
    "infinite": {"a": -math.inf},
    "key": {1: 2},
    "bytes": {"a": b"x"},
    "numpy": {"a": np.int64(5)},
    "array": {"a": np.zeros(3)},
    "deep": {"a": deep()},
    "doubled": {"a": doubled()},
    "digits": {"a": 10**6000},
    "unwritable": {"a": Unwritable()},
    "list": [1],
    "none": None,
    "user_list": {"a": UserList([1])},
    "module": {"a": types},
    "nested": {"a": (1, {"b": (2, {3})})},
}
ERRORS = [
    KeyboardInterrupt(), SystemExit(3), SystemExit("x"), GeneratorExit(), asyncio.CancelledError(),
    StopIteration(1), StopAsyncIteration(), RecursionError(), MemoryError(), Loud("x"),
    BaseExceptionGroup("g", [KeyboardInterrupt()]), TimeoutError(), OSError(28, "full"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), Exception(Unwritable()), AssertionError(),
]  # fmt: skip


def in_task(error):
    async def fails():
        raise error

    async def hook():
        await asyncio.create_task(fails())

    return hook()


def in_callback(error):
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: raises(error))
    return asyncio.sleep(0.01)


def cancel_all():
    for task in asyncio.all_tasks():
        task.cancel()


def cancel_all_later():
    asyncio.get_running_loop().call_soon(cancel_all)
    return asyncio.sleep(5)


async def cancels_itself_later():
    asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)
    await asyncio.sleep(5)


async def stops_from_a_thread():
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: loop.call_soon_threadsafe(loop.stop)).start()
    await asyncio.sleep(0.05)


async def leaves_generators():
    async def numbers():
        try:
            while True:
                yield 1
        finally:
            await forever()

    kept = numbers()
    LEFT.append(kept)
    await anext(kept)
    LEFT.append(asyncio.create_task(forever()))


LEFT = []
TASKS_OF_THE_LOOP = {
    "cancel_all": cancel_all,
    "cancel_all_later": cancel_all_later,
    "cancels_itself_later": cancels_itself_later,
    "stop": lambda: asyncio.get_running_loop().stop(),
    "stop_later": lambda: asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop),
    "stop_from_a_thread": stops_from_a_thread,
    "close": lambda: asyncio.get_running_loop().close(),
    "executor": lambda: asyncio.get_running_loop().shutdown_default_executor(),
    "factory": lambda: asyncio.get_running_loop().set_task_factory(lambda *_, **__: 1 / 0),
    "task_exits": lambda: in_task(SystemExit(3)),
    "task_interrupts": lambda: in_task(KeyboardInterrupt()),
    "callback_exits": lambda: in_callback(SystemExit(3)),
    "callback_interrupts": lambda: in_callback(KeyboardInterrupt()),
    "leaves_generators": leaves_generators,
    "run": lambda: asyncio.run(asyncio.sleep(0)),
}
STATE = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "no_grad": lambda: torch.no_grad().__enter__(),
    "inference": lambda: LEFT.append(torch.inference_mode()) or LEFT[-1].__enter__(),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(3),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "seed": lambda: torch.manual_seed(0),
    "cwd": lambda: os.chdir("/"),
    "environ": lambda: os.environ.clear(),
    "variable": lambda: os.environ.update(PATH="nowhere"),
    "path": lambda: sys.path.clear(),
    "sigint": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    "sigterm": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "warnings": lambda: warnings.simplefilter("error"),
    "logging": lambda: logging.disable(logging.CRITICAL),
    "log_level": lambda: logging.root.setLevel(1),
    "recursion": lambda: sys.setrecursionlimit(200),
    "switching": lambda: sys.setswitchinterval(1.0),
    "socket": lambda: socket.setdefaulttimeout(0.001),
    "stdout": lambda: setattr(sys, "stdout", None),
    "stderr": lambda: setattr(sys, "stderr", None),
    "numpy": lambda: np.seterr(all="raise"),
    "random": lambda: random.seed(1),
}  # fmt: skip


class Plain(Environment):
    """Ends after one turn."""

    def __init__(self, place="", act=None):
        self._place, self._act = place, act

    def _visit(self, place, usual):
        return self._act() if place == self._place else usual

    async def _awaited(self, place, usual):
        found = self._visit(place, usual)
        return await found if asyncio.iscoroutine(found) else found

    async def reset(self):
        return await self._awaited("reset", [user()])

    async def step(self, message):
        return await self._awaited("step", Observation(done=True))

    async def score(self):
        return await self._awaited("score", Score(reward=random.random()))

    async def close(self):
        return await self._awaited("close", None)


def fails_at(place, act):
    return lambda: Plain(place, act)


def acts_at(place, act, then):
    """Does something to the process or the loop, and goes on as usual."""

    def both():
        found = act()
        if not asyncio.iscoroutine(found):
            return then()

        async def after():
            await found
            return then()

        return after()

    return lambda: Plain(place, both)


USUAL = {
    "reset": lambda: [user()],
    "step": lambda: Observation(messages=[user()]),
    "score": lambda: Score(reward=0.5),
}


class Tools(ToolEnvironment):
    def __init__(self, found):
        @tool
        def act() -> str:
            "Acts."
            return found()

        self.tools = [act]

    async def reset(self):
        return [user()]

    async def step(self, message):
        observation = await super().step(
            Message(role="assistant", tool_calls=[ToolCall(name="act", arguments="{}")] * 2)
        )
        (first, second) = observation.messages
        assert type(first.content) is type(second.content) is str
        return observation

    async def score(self):
        return Score(reward=0.5)


class Offers(Plain):
    @property
    def tools(self):
        return self._visit("tools", ())


OUTPUTS = {
    "set": lambda: {1}, "nan": lambda: math.nan, "self": itself, "object": object,
    "bytes": lambda: b"\xff",
    "unwritable": Unwritable, "half": lambda: "\ud800", "deep": deep, "none": lambda: None,
    "array": lambda: np.zeros(3), "class": lambda: Plain, "generator": lambda: iter([1]),
    "output_text": lambda: ToolOutput(text=5),
    "output_metrics": lambda: ToolOutput(text="", metrics=[1]),
    "output_nan": lambda: ToolOutput(text="", metrics={"a": math.nan}),
    "forced": lambda: forced(ToolOutput(text=""), text=None),
    "failure": lambda: raises(ToolFailure(Unwritable(), outcome=[], metrics={1: 1})),
    **{f"{type(e).__name__}{i}": lambda e=e: raises(e) for i, e in enumerate(ERRORS)},
}  # fmt: skip

FAILING = {
    **{f"reset-{k}": fails_at("reset", f) for k, f in MESSAGES.items()},
    **{
        f"step-{k}": fails_at("step", lambda f=f: Observation(messages=f()))
        for k, f in MESSAGES.items()
    },
    **{
        f"metrics-{k}": fails_at("step", lambda m=m: Observation(metrics=m))
        for k, m in METRICS.items()
    },
    **{
        f"parts-{k}": fails_at("score", lambda m=m: Score(reward=1.0, parts=m))
        for k, m in METRICS.items()
    },
    **{f"score-{k}": fails_at("score", f) for k, f in SCORES.items()},
    **{
        f"{place}-{type(error).__name__}-{i}": fails_at(place, lambda e=error: raises(e))
        for i, error in enumerate(ERRORS)
        for place in ("reset", "step", "score")
    },
    "observation-none": fails_at("step", lambda: None),
    "observation-done": fails_at("step", lambda: Observation(done=Unwritable())),
    "factory-none": lambda: None,
    "factory-exits": lambda: raises(SystemExit()),
    "tools-dicts": lambda: Offers("tools", lambda: [{"name": "a"}]),
    "tools-set": lambda: Offers(
        "tools", lambda: [ToolSchema(name="a", description="", parameters={"a": {1}})]
    ),
    "tools-name": lambda: Offers(
        "tools", lambda: [ToolSchema(name=1, description="", parameters={})]
    ),
    "tools-exits": lambda: Offers("tools", lambda: raises(KeyboardInterrupt())),
}  # fmt: skip
PASSING = {
    **{
        f"close-{type(e).__name__}-{i}": fails_at("close", lambda e=e: raises(e))
        for i, e in enumerate(ERRORS)
    },
    **{
        f"{place}-{k}": acts_at(place, act, USUAL[place])
        for k, act in STATE.items()
        for place in USUAL
    },
    **{f"tool-{k}": lambda f=f: Tools(f) for k, f in OUTPUTS.items()},
    **{f"tool-does-{k}": lambda f=f: Tools(f) for k, f in STATE.items() if "sig" not in k},
    **{f"close-{k}": fails_at("close", act) for k, act in STATE.items()},
}  # fmt: skip
EITHER = {
    f"{place}-{k}": acts_at(place, act, USUAL[place])
    for k, act in TASKS_OF_THE_LOOP.items()
    for place in USUAL
}


@dataclass(frozen=True, kw_only=True)
class StrangerConfig(TaskConfig):
    TAG: ClassVar[str] = "stranger"

    def tasks(self, *, split, seed):
        return ListSource([Task(id="plain"), *TASKS_TO_PLAY], shuffle=False)

    def environment(self, task, agent):
        if task.payload.get("spoil"):
            task.payload["seen"] = {1}
        return (FAILING | PASSING | EITHER).get(task.id, Plain)()

    async def close(self):
        raise KeyboardInterrupt


TASKS_TO_PLAY = []


def run_of(tmp_path, tasks, *settings):
    TASKS_TO_PLAY[:] = tasks
    width = f"groups_per_step={len(tasks) + 1}"
    config = quickstart_with("task=stranger", *SMALL, width, *settings)
    before = torch.is_grad_enabled(), os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGINT)
    outcome = train(config, out=tmp_path / "run", view="json")
    assert outcome.status == "done"
    after = torch.is_grad_enabled(), os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGINT)
    assert after == before
    run = load_run(tmp_path / "run")
    (row,) = run.metrics
    records = list(run.trajectories(0))
    for record in records:
        json.dumps(to_document(record, run=0, split="train", why=[]), allow_nan=False)
    write_report([run], tmp_path / "report.html")
    assert {r.trajectory.status for r in records if r.task.id == "plain"} == {"finished"}
    return row, {record.task.id: record.trajectory for record in records}


def test_a_hostile_value_fails_its_episode_with_its_place_and_the_run_goes_on(tmp_path):
    _, found = run_of(tmp_path, [Task(id=name) for name in FAILING])
    assert len(FAILING) > 100
    assert {name: found[name].status for name in FAILING} == dict.fromkeys(FAILING, "failed")
    for name, trajectory in found.items():
        place = name.partition("-")[0]
        stage = {"metrics": "step", "parts": "score", "observation": "step"}.get(place, place)
        assert trajectory.error.startswith(f"environment.{stage}: ") or place in (
            "factory",
            "plain",
        )


def test_a_payload_that_is_not_json_fails_its_tasks_episodes(tmp_path):
    tasks = [Task(id=name, payload=payload) for name, payload in PAYLOADS.items()]
    tasks += [Task(id=5), Task(id=None, payload={}), "no task", None]
    tasks += [
        forced(Task(id="forced"), payload={"a": {1}}),
        Task(id="spoilt", payload={"spoil": 1}),
    ]
    _, found = run_of(tmp_path, tasks)
    assert found.pop("spoilt").status == found.pop("plain").status == "finished"
    assert {t.status for t in found.values()} == {"failed"} and len(found) == len(tasks) - 2
    assert "payload.a[0] is nested" not in found["self"].error
    assert "payload.a[0].b is nan; expected JSON" in found["nan"].error
    assert "payload.a[1].b[1] is {3}; expected JSON" in found["nested"].error
    assert "does it contain itself?" in found["self"].error
    assert "expected a Task" in found["'no task'"].error


def test_what_a_stranger_does_to_the_process_and_its_tools_return_is_its_own(tmp_path):
    _, found = run_of(tmp_path, [Task(id=name) for name in PASSING])
    failed = {name: t.error for name, t in found.items() if t.status == "failed"}
    assert not failed


def test_a_stranger_that_cancels_everything_or_stops_the_loop_ends_its_own_episode(tmp_path, capfd):
    began = time.monotonic()
    _, found = run_of(tmp_path, [Task(id=name) for name in EITHER])
    assert {t.status for t in found.values()} <= {"finished", "failed", "truncated"}
    assert time.monotonic() - began < 60
    assert "still busy 1 s later: asynchronous generators" in capfd.readouterr().err


def test_ctrl_c_ends_a_run_that_a_stranger_keeps_from_its_event_loop(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    FAILING["step-blocks"] = fails_at("step", lambda: press() or time.sleep(120))

    timers = [
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (0.2, 0.6)
    ]

    def press():
        while timers:
            timers.pop().start()

    TASKS_TO_PLAY[:] = [Task(id="reset-sigint"), Task(id="step-blocks")]
    settings = ["task=stranger", *SMALL, "groups_per_step=3", "group_size=2"]
    began = time.monotonic()
    try:
        outcome = train(quickstart_with(*settings), out=tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
        del FAILING["step-blocks"]
    assert outcome.status == "interrupted" and time.monotonic() - began < 60
