"""A kernel filter of the system calls that a program in bubblewrap must not make.

Namespaces hide files, network and processes. The filter removes the rest: memory that no limit
counts, keys that no namespace has, and calls through which kernels have been attacked. A refused
call fails with EPERM, which Python raises.
"""

from __future__ import annotations

import platform
import struct
import tomllib
from pathlib import Path
from typing import NamedTuple

_DENIED: dict[str, tuple[list[int], list[int]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)


class _Table(NamedTuple):
    audit_arch: int
    denied: frozenset[int]
    clone: int
    forks: tuple[int, ...]
    max_number: int = 0xFFFFFFFF
    """First number of x86_64's calls with 32-bit pointers, which `_DENIED` does not cover."""


_X86_64, _AARCH64 = (
    frozenset(number for by_machine in _DENIED.values() for number in by_machine[at])
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
    """The filter as `bwrap --seccomp` reads it: an array of struct sock_filter. allow_processes:
    whether a program may start threads and processes."""
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
