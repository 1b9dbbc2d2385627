"""The sandbox `container`: CPython in containers, through the command of docker or podman.

A container shares this machine's kernel. If that is too little, set `runtime` to gVisor's `runsc`
or Kata's, which have their own kernel.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from lockstep.agent.sandbox.process import Launch, _ProcessConfig, inside_arguments, said_by
from lockstep.children import own_variables
from lockstep.config import ABOVE_0, Form
from lockstep.errors import ConfigError

NOBODY = 65534
RUNTIME_PROCESSES = 16
"""Processes that starting a container takes, on top of the program's."""

_NAME = Form("[^-].*", "a name, and no option")


@dataclass(frozen=True, kw_only=True)
class ContainerConfig(_ProcessConfig):
    """CPython in a container of docker or podman, for images with your own packages: no network, no
    capabilities, user nobody, only /tmp is writable."""

    command: Annotated[str, _NAME] = "docker"
    """Path or name of docker or podman."""
    image: Annotated[str, _NAME] = "python:3.12-slim"
    """Image with a `python3`. It must be on this machine: a run downloads nothing."""
    cpus: Annotated[float, ABOVE_0] = 1.0
    """Processors that one program may use."""
    runtime: Annotated[str, Form("([^-].*)?", "a name, and no option")] = ""
    """Runtime of the engine, e.g. "runsc" (gVisor), which has a kernel of its own. Empty: the
    engine's default."""

    def prepare(self) -> Callable[[], Launch]:
        require_image(self.command, self.image)
        arguments = ["-s", "-B", *inside_arguments(self, has_group=True)]

        def launch() -> Launch:
            name = f"lockstep-{secrets.token_hex(8)}"
            return Launch(
                argv=[*container_argv(self, name), *arguments],
                # Killing the command leaves the container running.
                kill_argv=[self.command, "rm", "--force", name],
                env=own_variables(has_others=True),  # of the command; the container's is in argv
            )

        return launch


def require_image(command: str, image: str) -> None:
    """Raises ConfigError if `command` is missing, its server is down, or it lacks `image`."""
    if (found := shutil.which(command)) is None:
        text = f"sandbox.command={command!r} is not found. Install docker or podman"
        raise ConfigError(f"{text}, or give its path.")
    done = said_by(found, "image", "inspect", image)
    if done.returncode != 0:
        text = f"sandbox=container: `{command} image inspect {image}` fails: "
        text += done.stderr.strip()[:500]
        raise ConfigError(f"{text} If the image is missing: {command} pull {image}")


def container_argv(config: ContainerConfig, name: str) -> list[str]:
    """Command that precedes the arguments of the Python inside."""
    limits = config.limits
    options = (
        f"--rm --interactive --pull never --name {name} --network none --read-only --cap-drop ALL "
        "--security-opt no-new-privileges --ipc none --log-driver none "
        f"--user {NOBODY}:{NOBODY} --cpus {config.cpus:g} "
        f"--memory {limits.memory_mib}m --memory-swap {limits.memory_mib}m "
        f"--pids-limit {limits.processes + RUNTIME_PROCESSES} "
        f"--tmpfs /tmp:rw,noexec,nosuid,nodev,size={config.disk_mib}m --workdir /tmp "
        "--env HOME=/tmp --env LANG=C.UTF-8 --env PYTHONHASHSEED=0 --env TZ=UTC"
    )
    argv = [config.command, "run", *options.split(), "--entrypoint", "python3"]
    if config.runtime:
        argv += ["--runtime", config.runtime]
    return [*argv, config.image]
