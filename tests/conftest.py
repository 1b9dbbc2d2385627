"""Shared by all tests: what is set before torch starts."""

import asyncio
import inspect
import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What a run asks for at its start (`ops.invariant.ask_for_reproducible_gemm`) must stand before the
# first GEMM of the process, and here other tests come first.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import torch
from full_counts import LEFT_OUT, LONG_TOO

from lockstep.models import families as families_of_ours  # noqa: F401  they register themselves
from lockstep.models.reading import FAMILIES
from lockstep.ops.invariant import ask_for_reproducible_gemm

ask_for_reproducible_gemm()  # read at the first GEMM of the process, whichever test that is in


@pytest.fixture(autouse=True)
def families():
    """A family of models that a test adds is gone behind it."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def process_settings():
    """The thread count belongs to the process: a test leaves it as it was."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain_interrupts():
    """SIGINT raises KeyboardInterrupt, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test may be a coroutine: it runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)  # before -k takes tests away
def pytest_collection_modifyitems(config, items):
    """Skips the tests that are left to `make test-long`. Raises UsageError for one that does not
    exist."""
    found = {}
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        found.setdefault(file, set()).add(item.name)
        if not LONG_TOO and item.name in LEFT_OUT.get(file, ()):
            item.add_marker(pytest.mark.skip(reason="a long test, of `make test-long`"))
    for file in found.keys() & LEFT_OUT.keys():
        gone = set(LEFT_OUT[file]) - found[file]
        if gone and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"full_counts.py: {file} has no {', '.join(sorted(gone))}")
