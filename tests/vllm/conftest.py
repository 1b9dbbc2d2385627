"""A real vLLM on this machine's CPU: `make test-vllm`. Everywhere else these tests are left out."""

import contextlib
import importlib.util
import sys

import pytest
from engine_contexts import context_of
from vllm_models import run

from lockstep.engines.config import VllmConfig
from lockstep.engines.registry import make_engine
from lockstep.models.config import ModelConfig

FOUND = importlib.util.find_spec("vllm")
HAS_VLLM = FOUND is not None and FOUND.origin is not None  # without: this very folder, by its name
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]


def pytest_report_header():
    return [] if HAS_VLLM else ["tests/vllm: left out, there is no vLLM here (make test-vllm)"]


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where checkpoints and logs of all tests lie."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def started(place):
    """started(directory, told=[], **settings): a context in which a server of it runs."""

    @contextlib.contextmanager
    def start(directory, *, told=None, **settings):
        context = context_of(
            directory, vocab_size=ModelConfig.from_directory(directory).vocab_size, run="tests",
            scratch=place / f"server-{directory.name}",
            on_wait=lambda text: None if told is None else told.append(text),
        )  # fmt: skip
        settings = {"python": sys.executable, "kv_cache_gib": 0.125} | settings
        engine = make_engine(VllmConfig(**settings), context)
        try:
            yield engine
        finally:
            run(engine.close())

    return start
