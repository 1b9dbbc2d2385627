"""The filter of system calls, decided as the kernel would, for both machines."""

import struct

import pytest

from lockstep.agent.sandbox.bubblewrap import CLONE3, CLONE_NAMESPACES, TABLES, filter_program

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
THREAD = 0x00010F00  # CLONE_THREAD and what goes with it
NAMES = {
    "x86_64": {"read": 0, "socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "execve": 59},
    "aarch64": {"read": 63, "socket": 198, "socketpair": 199, "clone": 220, "execve": 221},
}


def decision(program: bytes, *, arch: int, number: int, flags: int = 0) -> int:
    """What the program returns of a call: its number, machine, address and first argument."""
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    call = struct.pack("=IIQQ", number, arch, 0, flags)
    value, at = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", call, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand != 0}
            at += if_true if holds[code] else if_false


@pytest.mark.parametrize("machine", sorted(TABLES))
@pytest.mark.parametrize("allow", [False, True], ids=["alone", "processes"])
def test_calls_are_decided_by_their_number_and_flags(machine, allow):
    program = filter_program(allow_processes=allow, machine=machine)
    table, names = TABLES[machine], NAMES[machine]

    def decide(number: int, flags: int = 0) -> int:
        return decision(program, arch=table.audit_arch, number=number, flags=flags)

    assert decide(names["read"]) == decide(names["execve"]) == ALLOW
    assert decide(names["socketpair"]) == ALLOW  # asyncio has one
    assert decide(names["socket"]) == EPERM
    assert all(decide(number) == EPERM for number in table.denied)
    assert decide(CLONE3) == ENOSYS  # libc then calls clone, whose flags can be seen
    for flags in (0, THREAD):
        assert decide(table.clone, flags) == (ALLOW if allow else EPERM)
    for bit in range(32):
        if CLONE_NAMESPACES >> bit & 1:
            assert decide(table.clone, THREAD | 1 << bit) == EPERM
    assert all(decide(number) == (ALLOW if allow else EPERM) for number in table.forks)


def test_calls_of_another_machine_or_of_its_32_bits_end_the_process():
    program = filter_program(allow_processes=True, machine="x86_64")
    other = TABLES["aarch64"].audit_arch
    assert decision(program, arch=other, number=0) == KILL
    assert decision(program, arch=TABLES["x86_64"].audit_arch, number=0x40000000 + 41) == KILL
