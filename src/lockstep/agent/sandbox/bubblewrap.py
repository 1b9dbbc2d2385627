"""The sandbox `bwrap`: CPython, isolated by bubblewrap without root.

Inside are Python's own files, read only, and a small /tmp in memory. There is no network, no /proc,
no environment and no other process. All is one process namespace: killing its first process kills
the rest.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from lockstep.agent.sandbox.process import Launch, _ProcessConfig, inside_arguments, said_by
from lockstep.errors import ConfigError
from lockstep.tables import tables_beside

MIN_VERSION = (0, 7)
"""First version with `--size`."""
NOBODY = 65534
_TABLES = tables_beside(__file__)


@dataclass(frozen=True, kw_only=True)
class BubblewrapConfig(_ProcessConfig):
    """CPython in bubblewrap: the whole language and standard library, without this machine's files,
    network and processes. Linux; needs no root."""

    TAG: ClassVar[str] = "bwrap"

    packages: tuple[str, ...] = ()
    """Folders that programs can read and import from, such as a site-packages with numpy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limits.processes > 1 and os.geteuid() == 0:
            raise ConfigError(
                f"sandbox.limits.processes={self.limits.processes}: the kernel does not count the "
                "processes of root. Run as another user, or leave it at 1."
            )

    @property
    def dialect(self) -> str:
        no_more = "" if self.limits.processes > 1 else "Threads and subprocesses are not allowed. "
        return f"CPython with its standard library. {no_more}No network; files only in /tmp."

    def prepare(self) -> Callable[[], Launch]:
        bwrap = require_bwrap()
        for folder in self.packages:
            if not os.path.isdir(folder):
                raise ConfigError(f"sandbox.packages: {folder!r} is not a folder.")
        return partial(self._launch, bwrap, python_binds(self.packages))

    def _launch(self, bwrap: str, binds: Sequence[str]) -> Launch:
        reading, writing = os.pipe()  # holds a whole filter
        os.write(writing, filter_program(allow_processes=self.limits.processes > 1))
        os.close(writing)
        isolation = (
            "--unshare-all --unshare-user --die-with-parent --new-session --cap-drop ALL "
            f"--clearenv --hostname sandbox --uid {NOBODY} --gid {NOBODY}"
        )
        argv = [bwrap, *isolation.split(), *binds]
        for device in ("null", "zero", "urandom", "random"):
            # One by one: the /dev that bwrap makes has an unlimited /dev/shm.
            argv += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        argv += ["--size", str(self.disk_mib << 20), "--tmpfs", "/tmp", "--remount-ro", "/"]
        folders = ":".join(f"/packages/{index}" for index in range(len(self.packages)))
        for name, value in {**_TABLES["variables"], "PYTHONPATH": folders}.items():
            argv += ["--setenv", name, value]
        argv += ["--seccomp", str(reading), "--chdir", "/tmp", "--", "/python/bin/python"]
        argv += ["-S", "-s", *inside_arguments(self, has_group=False)]
        return Launch(argv=argv, pass_fds=(reading,))


def require_bwrap() -> str:
    """The path of bubblewrap. Raises ConfigError if it is missing or cannot work here."""
    if (found := shutil.which("bwrap")) is None:
        raise ConfigError(
            "sandbox=bwrap: no folder of PATH has `bwrap`. Install bubblewrap (`apt install "
            "bubblewrap`, `dnf install bubblewrap`), or use sandbox=monty."
        )
    if not sys.platform.startswith("linux") or platform.machine() not in TABLES:
        known = " or ".join(sorted(TABLES))
        raise ConfigError(f"sandbox=bwrap needs Linux on {known}. Use monty or container.")
    said = said_by(found, "--version").stdout
    version = tuple(int(part) for part in re.findall(r"\d+", said)[:2])
    if version < MIN_VERSION:
        needed = "bubblewrap 0.7 or newer is needed, to bound written files"
        raise ConfigError(f"sandbox=bwrap: {found} says {said.strip()!r}; {needed}.")
    done = said_by(found, "--unshare-all", "--ro-bind", "/", "/", "--", "/bin/true")
    if done.returncode != 0:
        raise ConfigError(
            f"sandbox=bwrap: {found} cannot isolate a process here: {done.stderr.strip()[:500]} "
            "Most likely the host forbids namespaces to users (sysctl "
            "kernel.unprivileged_userns_clone). Allow them, or use sandbox=monty."
        )
    return found


def _linked_with(binaries: Sequence[str]) -> tuple[dict[str, str], str]:
    """(soname -> path, dynamic linker) of all `binaries`."""
    listed = said_by("ldd", *binaries)
    libraries: dict[str, str] = {}
    loader = ""
    for line in listed.stdout.splitlines():
        if match := re.match(r"\s+(\S+) => (/\S+) \(0x", line):
            libraries.setdefault(match[1], match[2])
        elif match := re.match(r"\s+(/\S*ld\S*) \(0x", line):
            loader = match[1]
    if not loader:
        said = listed.stderr.strip()[:300]
        raise ConfigError(f"sandbox=bwrap: `ldd {binaries[0]}` names no loader: {said}")
    return libraries, loader


def python_binds(packages: Sequence[str]) -> list[str]:
    """Options that bind the files of this Python, of the libraries that it and `packages` are
    linked with, and of `packages`. Packages installed beside this Python stay outside."""
    stdlib, dynload = sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED")
    inside = f"/python/{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
    binaries = [sys.executable]
    for folder in filter(None, (dynload, *packages)):
        binaries += sorted(str(path) for path in Path(folder).rglob("*.so"))
    libraries, loader = _linked_with(binaries)
    bound = {
        "/python/bin/python": os.path.realpath(sys.executable),
        inside: stdlib,
        loader: os.path.realpath(loader),
        **{f"/python/libraries/{k}": os.path.realpath(v) for k, v in sorted(libraries.items())},
        **{f"/packages/{index}": path for index, path in enumerate(packages)},
    }
    argv = [word for place, path in bound.items() for word in ("--ro-bind", path, place)]
    for name in ("site-packages", "dist-packages"):
        if os.path.isdir(f"{stdlib}/{name}"):
            hidden = f"{inside}/{name}"
            argv += ["--size", "4096", "--tmpfs", hidden, "--remount-ro", hidden]
    return argv


# -- the filter of system calls --------------------------------------------------------------------


class _Table(NamedTuple):
    audit_arch: int
    denied: frozenset[int]
    clone: int
    forks: tuple[int, ...]
    max_number: int = 0xFFFFFFFF
    """First number of x86_64's calls with 32-bit pointers, which the filter does not cover."""


_X86_64, _AARCH64 = (
    frozenset(number for by_machine in _TABLES["denied"].values() for number in by_machine[at])
    for at in range(2)
)
TABLES = {
    "x86_64": _Table(0xC000003E, _X86_64, 56, (57, 58), 0x40000000),  # fork, vfork
    "aarch64": _Table(0xC00000B7, _AARCH64, 220, ()),
}
CLONE3 = 435

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _CLONE_FLAGS_AT = 0, 4, 16  # in struct seccomp_data; little-endian
CLONE_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""


def filter_program(*, allow_processes: bool, machine: str | None = None) -> bytes:
    """A kernel filter of the system calls that a program must not make, as `bwrap --seccomp` reads
    it: an array of struct sock_filter. allow_processes: whether a program may start threads and
    processes.

    Namespaces hide files, network and processes. The filter removes the rest: memory that no limit
    counts, keys that no namespace has, and calls through which kernels have been attacked. A
    refused call fails with EPERM, which Python raises.
    """
    table = TABLES[machine or platform.machine()]
    denied = table.denied if allow_processes else {*table.denied, table.clone, *table.forks}
    in_new_namespaces = [
        _step(_LOAD, _CLONE_FLAGS_AT),
        _step(_ANY_BIT, CLONE_NAMESPACES, 0, 1),
        _step(_RETURN, _ERRNO | EPERM),
        _step(_RETURN, _ALLOW),
    ]
    code = [
        _step(_LOAD, _ARCH_AT),
        _step(_EQUAL, table.audit_arch, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_AT_LEAST, table.max_number, 0, 1),
        _step(_RETURN, _KILL),
        # Its flags are in memory, which no filter can read. libc then tries clone.
        _step(_EQUAL, CLONE3, 0, 1),
        _step(_RETURN, _ERRNO | ENOSYS),
    ]
    for number in sorted(denied):
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | EPERM)]
    if allow_processes:
        code += [_step(_EQUAL, table.clone, 0, len(in_new_namespaces)), *in_new_namespaces]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
