"""The suite of hostile programs, on each sandbox that is installed, and on sandboxes that fail."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import HOSTILE

from lockstep.agent.sandbox.base import ProgramResult, SandboxConfig, SandboxLimits
from lockstep.agent.sandbox.bubblewrap import BubblewrapConfig, require_bwrap
from lockstep.agent.sandbox.container import ContainerConfig
from lockstep.agent.sandbox.monty import MontyConfig
from lockstep.agent.sandbox.process import said_by
from lockstep.config import choices
from lockstep.errors import ConfigError, SandboxError
from lockstep.testing.check_sandbox import check_sandbox

LIMITS = SandboxLimits(seconds=1.0, memory_mib=64)
CALM = SandboxLimits(seconds=20.0, memory_mib=64)
"""Where the time is not what ends a program, however busy the machine is."""
monty = pytest.importorskip("pydantic_monty", reason="the extra `sandbox` is not installed")


def why_no_bwrap() -> str:
    try:
        require_bwrap()
    except ConfigError as error:
        return str(error)
    return ""


KINDS = {
    "monty": MontyConfig(limits=LIMITS, workers=4),
    "bwrap": BubblewrapConfig(limits=LIMITS, workers=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_hostile_program_gets_out_outlives_its_time_or_takes_the_host_down(kind):
    if kind == "bwrap" and (problem := why_no_bwrap()):
        pytest.skip(problem)
    report = asyncio.run(check_sandbox(KINDS[kind].open(), limits=LIMITS, programs=HOSTILE))
    assert list(report.endings) == list(HOSTILE)
    assert report.endings["loop"] == report.endings["loop that catches all"] == "timeout"
    endings = {
        "list of a billion": "memory",
        "read /etc/passwd": "refused",
        "connect": "refused",
        "one long line": "output",
    }
    programs = {name: HOSTILE[name] for name in endings}
    calm = replace(KINDS[kind], limits=CALM)
    report = asyncio.run(check_sandbox(calm.open(), limits=CALM, programs=programs))
    assert report.endings == endings


class Faulty:
    """A sandbox that works, but for what `broken` does to its results."""

    def __init__(self, broken):
        self.inner = MontyConfig(limits=LIMITS, workers=1).open()
        self.broken = broken
        self.dialect = ""

    async def run(self, code: str, *, session: str = "") -> ProgramResult:
        return await self.broken(self.inner, code, session)

    async def end_session(self, session: str) -> None:
        await self.inner.end_session(session)

    async def close(self) -> None:
        await self.inner.close()


def changed(**fields):
    async def run(inner, code, session):
        result = await inner.run(code, session=session)
        return dataclasses.replace(result, **fields) if code == "if 1: pass" else result

    return run


async def raises(inner, code, session):
    if code == "raise SystemExit":
        raise SystemError("out")
    return await inner.run(code, session=session)


async def reads(inner, code, session):
    if code.startswith("open("):
        text = Path(code.split("'")[1]).read_text()
        return ProgramResult(output=text, ending="ok")
    return await inner.run(code, session=session)


async def writes(inner, code, session):
    if code.startswith("write"):
        Path(code.split("'")[1]).write_text("x")
    return await inner.run(code, session=session)


async def connects(inner, code, session):
    if code.startswith("connect"):
        _, writer = await asyncio.open_connection("127.0.0.1", int(code.split()[1]))
        writer.close()
    return await inner.run(code, session=session)


async def forgets(inner, code, session):
    return await inner.run(code)


async def shares(inner, code, session):
    return await inner.run(code, session="all")


async def leaves(inner, code, session):
    if code == "'leave'":
        leaves.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    return await inner.run(code, session=session)


async def holds_up(inner, code, session):
    if code == "'hold'":
        time.sleep(0.6)
    return await inner.run(code, session=session)


@pytest.mark.parametrize(
    ("broken", "code", "words"),
    [
        (raises, "raise SystemExit", "run raised SystemError: out"),
        (reads, "open('SECRET_PATH')", "read a secret of this machine"),
        (writes, "write 'CANARY_PATH'", "wrote a file of this machine"),
        (connects, "connect PORT", "a program connected to this machine"),
        (leaves, "'leave'", "left the processes"),
        (holds_up, "'hold'", "event loop"),
        (forgets, "1", "45.*41"),
        (shares, "1", "saw a variable of another one|expected 45"),
        (changed(ending="dead"), "if 1: pass", "ending='dead'"),
        (changed(output="a" * 9000), "if 1: pass", "9000"),
        (changed(output="\ud800"), "if 1: pass", "tokenizers need text"),
        (changed(seconds=60.0), "if 1: pass", "60.0"),
    ],
    ids=[
        "raises", "reads", "writes", "connects", "leaves", "holds_up", "forgets", "shares",
        "ending", "output", "surrogate", "seconds",
    ],
)  # fmt: skip
def test_a_sandbox_that_breaks_a_promise_is_named(broken, code, words):
    sandbox = Faulty(broken)
    try:
        with pytest.raises(SandboxError, match=words):
            check = check_sandbox(
                sandbox, limits=LIMITS, programs={"one": code}, max_stall_seconds=0.5
            )
            asyncio.run(check)
    finally:
        if broken is leaves:
            leaves.process.kill()
            leaves.process.wait()


def test_nothing_runs_without_isolation_and_no_setting_makes_it_so():
    """A kind added here has to say how it isolates, in docs/sandbox.md."""
    kinds = {"monty": MontyConfig, "bwrap": BubblewrapConfig, "container": ContainerConfig}
    assert choices(SandboxConfig) == kinds
    with pytest.raises(NotImplementedError):
        SandboxConfig().open()


def test_a_host_that_forbids_namespaces_is_named(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo bubblewrap 0.9.0; exit 0; fi\n'
        'echo "bwrap: No permissions to create a new namespace" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match="sandbox=monty"):
        BubblewrapConfig().check()
    fake.write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    with pytest.raises(ConfigError, match=r"0\.7"):
        BubblewrapConfig().check()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        BubblewrapConfig().check()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="`sleep 60` does not answer"):
        said_by("sleep", "60", seconds=0.1)


@pytest.mark.skipif(bool(why_no_bwrap()), reason="bubblewrap is not installed")
def test_bubblewrap_gives_python_and_nothing_else():
    code = (
        "import os, sys, ssl, sqlite3, ctypes, asyncio\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "found = set()\n"
        "for folder, _, names in os.walk('/'): found |= {folder + '/' + n for n in names}\n"
        "known = ('/python/', '/dev/', '//lib', '/lib')\n"
        "print([path for path in found if not path.startswith(known)])\n"
        "print(sorted(os.environ), os.getuid(), sys.path)"
    )

    async def play():
        sandbox = KINDS["bwrap"].open()
        found = await sandbox.run(code)
        left = await sandbox.run("print('a')\nexit()\nprint('b')")
        assert (left.ending, left.output) == ("ok", "a")
        kept = [await sandbox.run(c, session="a") for c in ("x = 1", "x", "import os; os._exit(0)")]
        told = await sandbox.run("x", session="a")
        await sandbox.close()
        return found, kept, told

    found, kept, told = asyncio.run(play())
    assert found.ending == "ok", found.output
    assert found.output.splitlines()[0] == "[]"
    assert "LOCKSTEP" not in found.output and " 65534 " in found.output
    assert kept[1].output == "1"
    assert "variables of earlier programs are gone" in kept[2].output
    assert "NameError" in told.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's processes are not counted")
def test_root_cannot_allow_processes_that_nobody_counts():
    with pytest.raises(ConfigError, match="processes"):
        BubblewrapConfig(limits=SandboxLimits(processes=4))
