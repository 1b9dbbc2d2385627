"""`lockstep.children`: what a parent learns of a child that answers, dies, hangs or lies."""

import asyncio
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from running import is_running

from lockstep.children import OWN_KEYS, Child, own_variables
from lockstep.errors import ChildError, ChildRefusal, ChildTimeoutError

SERVED = """
import os, subprocess, sys, time
from lockstep.children import serve

def opened(**opening):
    if opening.get("fails"):
        raise ValueError("no such thing")
    return {"opening": opening, "pid": os.getpid()}

def answer(do, **arguments):
    if do == "hang":
        time.sleep(600)
    if do == "die":
        print("the last words", file=sys.stderr)
        os._exit(3)
    if do == "refuse":
        raise KeyError("text")
    if do == "print":
        print("not a reply")
    if do == "grandchild":
        return {"pid": subprocess.Popen(["sleep", "600"]).pid}
    return {"pid": os.getpid(), **arguments}

serve(answer, opened=opened)
"""
BESIDE = """
import json, sys, threading, time
lock = threading.Lock()

def write(**reply):
    with lock:
        print(json.dumps(reply), flush=True)

def answer(request):
    time.sleep(request.get("wait", 0))
    write(id=request["id"], wait=request.get("wait"))

for line in sys.stdin:
    request = json.loads(line)
    if "cancel" in request:
        print("cancelled", request["cancel"], file=sys.stderr, flush=True)
        sys.exit(7)
    threading.Thread(target=answer, args=(request,), daemon=True).start()
"""


@pytest.fixture
def child(tmp_path: Path):
    made = child_of(SERVED, tmp_path)
    yield made
    made.close()


def child_of(source: str, folder: Path, **options) -> Child:
    script = folder / "program.py"
    script.write_text(textwrap.dedent(source))
    environment = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, str(script)]
    return Child(command, name="the child", environment=environment, **options)


def wait_until(holds, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_answers_and_what_it_prints_is_no_reply(child):
    assert child.ask({"do": "print", "n": 1}, seconds=60)["n"] == 1
    long_text = "x" * 1_000_000
    assert child.ask({"do": "echo", "text": long_text}, seconds=60)["text"] == long_text


def test_a_child_starts_with_its_opening_and_keeps_its_process(tmp_path):
    child = child_of(SERVED, tmp_path, opening={"level": 3})
    opened = child.open()
    assert opened["opening"] == {"level": 3}
    assert child.ask({"do": "echo"}, seconds=60)["pid"] == opened["pid"] == child.open()["pid"]
    child.close()


def test_an_opening_that_fails_is_a_refusal_each_time(tmp_path):
    child = child_of(SERVED, tmp_path, opening={"fails": True})
    for _ in range(2):
        with pytest.raises(ChildRefusal, match="no such thing") as caught:
            child.open()
        assert caught.value.kind == "ValueError"


def test_an_exception_in_the_child_is_a_refusal_and_the_child_lives(child):
    pid = child.ask({"do": "echo"}, seconds=60)["pid"]
    with pytest.raises(ChildRefusal, match="'text'") as caught:
        child.ask({"do": "refuse"}, seconds=60)
    assert caught.value.kind == "KeyError"
    assert child.ask({"do": "echo"}, seconds=60)["pid"] == pid


def test_a_child_that_died_says_how_with_its_last_lines_and_is_started_again(child):
    with pytest.raises(ChildError, match=r"\d+.*\b3\b") as caught:
        child.ask({"do": "die"}, seconds=60)
    assert "| the last words" in str(caught.value)
    pid = child.ask({"do": "echo"}, seconds=60)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    assert child.ask({"do": "echo"}, seconds=60)["pid"] != pid


def test_a_child_that_hangs_is_killed_with_all_that_it_started(child):
    mine = child.ask({"do": "echo"}, seconds=60)["pid"]
    grandchild = child.ask({"do": "grandchild"}, seconds=60)["pid"]
    with pytest.raises(ChildTimeoutError, match=r"0.5"):
        child.ask({"do": "hang"}, seconds=0.5)
    wait_until(lambda: not is_running(mine) and not is_running(grandchild))
    assert child.ask({"do": "echo"}, seconds=60)["pid"] != mine


def test_a_child_that_does_not_read_its_input_is_a_timeout_too(tmp_path):
    opened = "sys.stdin.readline(); print('{\"id\": 0}', flush=True)"
    source = f"import sys, time; {opened}; time.sleep(600)"
    child = child_of(source, tmp_path)
    with pytest.raises(ChildTimeoutError):
        child.ask({"text": "x" * 5_000_000}, seconds=0.5)


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"id": 99}', "{}", "[" * 100_000])
def test_a_child_that_writes_nonsense_is_ended_with_the_text_in_the_error(tmp_path, line):
    child = child_of(f"print({line!r}, flush=True); import time; time.sleep(600)", tmp_path)
    with pytest.raises(ChildError, match="no reply"):
        child.open()


def test_a_child_that_cannot_be_started_or_starts_too_slowly_is_an_error(tmp_path):
    with pytest.raises(ChildError, match="/no/such"):
        Child(["/no/such"], name="the child").open()
    child = child_of("import time; time.sleep(600)", tmp_path, start_seconds=0.5)
    with pytest.raises(ChildTimeoutError, match=r"0\.5"):
        child.ask({}, seconds=60)


def test_threads_wait_for_their_turn_which_their_limit_leaves_out(child):
    replies: list[int] = []

    def ask(n: int) -> None:
        replies.append(child.ask({"do": "echo", "n": n}, seconds=60)["n"])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(replies) == list(range(8))


async def test_requests_beside_each_other_end_in_the_order_of_their_work(tmp_path):
    child = child_of(BESIDE, tmp_path)

    ended: list[float] = []

    async def ask(wait: float) -> None:
        ended.append((await child.ask_concurrently({"wait": wait}))["wait"])

    await asyncio.gather(ask(1.0), ask(0.5), ask(0.0))
    assert ended == [0.0, 0.5, 1.0]
    child.close(seconds=5)


async def test_a_cancelled_request_is_told_to_the_child_and_its_end_to_the_others(tmp_path):
    child = child_of(BESIDE, tmp_path)
    await child.ask_concurrently({"wait": 0})
    first, second = (asyncio.create_task(child.ask_concurrently({"wait": 600})) for _ in range(2))
    await asyncio.sleep(0.3)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ChildError, match=r"7(.|\n)*cancelled 2\b"):
        await second


def test_a_child_ends_with_the_object_that_holds_it(tmp_path):
    child = child_of(SERVED, tmp_path)
    pid = child.open()["pid"]
    del child
    wait_until(lambda: not is_running(pid))


def test_a_fork_starts_a_child_of_its_own(child):
    pid = child.ask({"do": "echo"}, seconds=60)["pid"]
    reading, writing = os.pipe()
    if not (fork := os.fork()):
        try:
            own = child.ask({"do": "echo"}, seconds=60)["pid"]
            child.close()
            os.write(writing, b"other" if own != pid else b"same")
        finally:
            os._exit(0)
    os.waitpid(fork, 0)
    assert os.read(reading, 10) == b"other"
    assert child.ask({"do": "echo"}, seconds=60)["pid"] == pid


@pytest.mark.parametrize("has_variables", [False, True])
def test_no_child_gets_the_keys_of_our_own_servers(has_variables, monkeypatch):
    for name in OWN_KEYS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    program = "import os, sys; from lockstep.children import serve; serve(lambda: dict(os.environ))"
    child = Child(
        [sys.executable, "-c", program],
        name="all",
        environment={"MORE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        has_variables=has_variables,
    )
    found = child.ask({}, seconds=60)
    child.close()
    assert found["PATH"] and (found["LC_ALL"], found["MORE"]) == ("C.UTF-8", "1")
    assert ("OPENAI_API_KEY" in found) is has_variables
    assert not found.keys() & set(OWN_KEYS)
    assert own_variables(["LOCKSTEP_KEY"])["LOCKSTEP_KEY"] == "secret", "where the user names it"
