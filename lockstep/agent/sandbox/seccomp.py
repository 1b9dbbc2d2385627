"""A kernel filter of the system calls that a program in bubblewrap must not make.

Namespaces hide files, network and processes. The filter removes the rest: memory that no limit
counts, keys that no namespace has, and calls through which kernels have been attacked. A refused
call fails with EPERM, which Python raises.
"""

from __future__ import annotations

import platform
import struct
from typing import Literal, NamedTuple

Machine = Literal["x86_64", "aarch64"]


class _Table(NamedTuple):
    audit_arch: int
    clone: int
    clone3: int
    max_number: int
    """First number of x86_64's calls with 32-bit pointers, which the numbers below do not cover."""
    denied: tuple[int, ...]
    forks: tuple[int, ...]


# Numbers from the kernel's arch/x86/entry/syscalls/syscall_64.tbl and
# include/uapi/asm-generic/unistd.h. From 424 on they are the same everywhere.
_COMMON = (
    425,
    426,
    427,  # io_uring_setup, _enter, _register
    428,
    429,
    430,
    431,
    432,
    433,
    442,  # open_tree, move_mount, fsopen/config/mount/pick, setattr
    438,
    440,  # pidfd_getfd, process_madvise
    443,  # quotactl_fd
    447,  # memfd_secret
)
_X86_64 = _Table(
    audit_arch=0xC000003E,
    clone=56,
    clone3=435,
    max_number=0x40000000,
    forks=(57, 58),  # fork, vfork
    denied=(
        41,  # socket
        319,  # memfd_create: memory in no one's address space
        29,
        30,
        31,
        64,
        65,
        66,
        68,
        69,
        70,
        71,
        220,
        240,  # shm, sem, msg, mq_open
        101,
        310,
        311,
        312,  # ptrace, process_vm_readv, process_vm_writev, kcmp
        248,
        249,
        250,  # add_key, request_key, keyctl
        298,
        321,
        323,  # perf_event_open, bpf, userfaultfd
        165,
        166,
        155,
        161,
        272,
        308,  # mount, umount2, pivot_root, chroot, unshare, setns
        303,
        304,
        300,  # name_to_handle_at, open_by_handle_at, fanotify_init
        175,
        313,
        176,
        246,
        320,
        169,
        167,
        168,
        103,
        163,
        179,  # modules, kexec, reboot, swap, ...
        253,
        294,
        135,
        216,  # inotify_init, inotify_init1, personality, remap_file_pages
        *_COMMON,
    ),
)
_AARCH64 = _Table(
    audit_arch=0xC00000B7,
    clone=220,
    clone3=435,
    max_number=0xFFFFFFFF,
    forks=(),
    denied=(
        198,
        279,  # socket, memfd_create
        194,
        195,
        196,
        197,
        190,
        191,
        192,
        193,
        186,
        187,
        188,
        189,
        180,  # shm, sem, msg, mq_open
        117,
        270,
        271,
        272,  # ptrace, process_vm_readv, process_vm_writev, kcmp
        217,
        218,
        219,  # add_key, request_key, keyctl
        241,
        280,
        282,  # perf_event_open, bpf, userfaultfd
        40,
        39,
        41,
        51,
        97,
        268,  # mount, umount2, pivot_root, chroot, unshare, setns
        264,
        265,
        262,  # name_to_handle_at, open_by_handle_at, fanotify_init
        105,
        273,
        106,
        104,
        294,
        142,
        224,
        225,
        116,
        89,
        60,  # modules, kexec, reboot, swap, ...
        26,
        92,
        234,  # inotify_init1, personality, remap_file_pages
        *_COMMON,
    ),
)
TABLES: dict[str, _Table] = {"x86_64": _X86_64, "aarch64": _AARCH64}

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _CLONE_FLAGS_AT = 0, 4, 16  # in struct seccomp_data; little-endian
CLONE_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""


def has_filter() -> bool:
    """Whether the system calls of this machine are known."""
    return platform.machine() in TABLES


def filter_program(*, allow_processes: bool, machine: str | None = None) -> bytes:
    """The filter as `bwrap --seccomp` reads it: an array of struct sock_filter. allow_processes:
    whether a program may start threads and processes."""
    table = TABLES[machine or platform.machine()]
    denied = set(table.denied)
    if not allow_processes:
        denied |= {table.clone, *table.forks}
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
        _step(_EQUAL, table.clone3, 0, 1),
        _step(_RETURN, _ERRNO | ENOSYS),
    ]
    for number in sorted(denied):
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | EPERM)]
    if allow_processes:
        code += [_step(_EQUAL, table.clone, 0, len(in_new_namespaces)), *in_new_namespaces]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
