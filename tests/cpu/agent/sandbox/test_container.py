"""Containers: what the command is asked for, and what becomes of its processes, by a stand-in for
the command that runs Python here; and by docker itself where it has the image."""

import asyncio
import itertools
import sys
from pathlib import Path

import pytest
from hostile import HOSTILE

from lockstep.agent.sandbox.base import SandboxLimits
from lockstep.agent.sandbox.container import ContainerConfig, container_argv, require_image
from lockstep.errors import ConfigError, SandboxError
from lockstep.testing.check_sandbox import check_sandbox

LIMITS = SandboxLimits(seconds=0.7, memory_mib=128)

STAND_IN = """#!{python}
import os, sys
log = open({log!r}, "a")
print(*sys.argv[1:4], *filter(None, [os.environ.get("DOCKER_HOST")]), file=log, flush=True)
if sys.argv[1] == "image":
    sys.exit(0 if sys.argv[3] == "there" else "Error: No such image")
if sys.argv[1] == "run":
    if {broken!r}:
        sys.exit({broken!r})
    rest = sys.argv[sys.argv.index("there") + 1:]
    os.chdir("/tmp")
    os.execve({python!r}, [{python!r}, *rest], {{}})
"""


def stand_in(tmp_path: Path, broken: str = "") -> tuple[ContainerConfig, Path]:
    log, command = tmp_path / "log", tmp_path / "docker"
    command.write_text(STAND_IN.format(python=sys.executable, log=str(log), broken=broken))
    command.chmod(0o755)
    return ContainerConfig(command=str(command), image="there", limits=LIMITS, workers=1), log


def test_a_container_gets_no_network_no_privilege_and_nothing_writable_but_tmp():
    config = ContainerConfig(
        limits=SandboxLimits(memory_mib=300, processes=4), disk_mib=8, cpus=0.5, runtime="runsc"
    )
    argv = container_argv(config, "one")
    pairs = set(itertools.pairwise(argv))
    assert argv[:2] == ["docker", "run"] and argv[-1] == config.image
    assert {"--read-only", "--rm", "--interactive"} <= set(argv)
    assert {
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--ipc", "none"),
        ("--user", "65534:65534"),
        ("--memory", "300m"),
        ("--memory-swap", "300m"),
        ("--pids-limit", "20"),
        ("--cpus", "0.5"),
        ("--pull", "never"),
        ("--runtime", "runsc"),
        ("--tmpfs", "/tmp:rw,noexec,nosuid,nodev,size=8m"),
    } <= pairs
    assert not {"--volume", "-v", "--mount", "--privileged"} & set(argv)
    assert [b for a, b in pairs if a == "--env" and "SECRET" in b] == []


async def test_programs_run_end_and_leave_no_container(tmp_path):
    config, log = stand_in(tmp_path)
    sandbox = config.open()
    found = [await sandbox.run(code) for code in ("1 + 1", "while True: pass", "2")]
    found += [await sandbox.run(code, session="a") for code in ("x = 3", "x")]
    await sandbox.close()
    assert [r.ending for r in found] == ["ok", "timeout", "ok", "ok", "ok"]
    assert [r.output for r in found][::2] == ["2", "2", "3"]
    lines = log.read_text().splitlines()
    assert lines[0] == "image inspect there"
    started = sum(line.startswith("run ") for line in lines)
    assert (
        started >= 4 and sum(line.startswith("rm --force lockstep-") for line in lines) == started
    )


async def test_the_command_may_reach_the_engine_of_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "ssh://elsewhere")
    config, log = stand_in(tmp_path)

    sandbox = config.open()
    found = await sandbox.run("import os; os.environ.get('DOCKER_HOST')")
    await sandbox.close()
    assert found.output == ""
    assert {line.split()[-1] for line in log.read_text().splitlines()} == {"ssh://elsewhere"}


def test_a_command_that_fails_is_no_programs_fault(tmp_path):
    config, _ = stand_in(tmp_path, broken="docker: no space left on device")

    async def play() -> None:
        sandbox = config.open()
        try:
            await sandbox.run("1")
        finally:
            await sandbox.close()

    with pytest.raises(SandboxError, match="no space left on device"):
        asyncio.run(play())


def test_what_is_missing_is_named_before_a_run(tmp_path):
    config, _ = stand_in(tmp_path)
    config.check()
    with pytest.raises(ConfigError, match="pull absent"):
        require_image(config.command, "absent")
    with pytest.raises(ConfigError, match="docker"):
        ContainerConfig(command="no-such-command").check()
    with pytest.raises(ConfigError, match="no option"):
        ContainerConfig(image="--privileged")


def test_docker_itself():
    config = ContainerConfig(limits=SandboxLimits(seconds=2.0, memory_mib=128), workers=2)
    try:
        config.check()
    except ConfigError as error:
        pytest.skip(str(error))
    asyncio.run(check_sandbox(config.open(), limits=config.limits, programs=HOSTILE))
