"""A server of three models, and the programs of tinker-cookbook as processes of their own.

`make test-tinker` installs them. The programs' code is as it was published. What they would
download is here instead: models and tokenizers under the names of the working directory
(Qwen/...), data sets likewise (data_for_programs.py). One document that a
program fetches by its address is given by `offline.py`.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STUDENT, TEACHER, READER = "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-4B-Instruct-2507"
PROGRAM_SECONDS = 240


def pytest_collection_modifyitems(items):
    """Skips the programs, among all tests, where they are not installed."""
    if importlib.util.find_spec("tinker_cookbook") is not None:
        return
    reason = "tinker-cookbook is not installed; make test-tinker installs and runs it"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """The working directory of the programs."""
    import data_for_programs
    import models_for_programs

    place = tmp_path_factory.mktemp("programs")
    data_for_programs.write_all(place)
    corpus = "\n".join(data_for_programs.corpus_lines())
    models_for_programs.write_all(place / STUDENT, place / TEACHER, place / READER, corpus)
    return place


@pytest.fixture(scope="session")
def server(place):
    """Address of `lockstep serve` with the three models."""
    models = ",".join(f"{name}={place / name}" for name in (STUDENT, TEACHER, READER))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "lockstep.cli", "serve", str(place / STUDENT), "--json"),
            *("--api", "tinker", "--out", str(place / "server"), f"tinker.models=[{models}]"),
            *("max_tokens=6144", "tinker.stable_reinforce=importance_sampling"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert line, "the server did not start; its message is above"
    yield json.loads(line)["url"]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) in (0, 130)


class Program:
    """One run of a program: its settings, and what it logged."""

    def __init__(self, place, server, log, arguments):
        self.log = log
        environment = {
            **os.environ,
            **{"TINKER_BASE_URL": server, "TINKER_API_KEY": "tml-none", "TINKER_TELEMETRY": "0"},
            **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"},
            **{"HF_HOME": str(place / "cache")},
        }
        self.output = place / f"{log.name}.txt"
        with open(self.output, "a") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=place, env=environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait(self, *codes):
        """Waits for its end; with 0 or one of `codes`."""
        code = self.process.wait(PROGRAM_SECONDS)
        assert code in (0, *codes), self.output.read_text()[-3000:]
        return self

    def kill_after(self, is_due):
        """Kills the program, by SIGKILL, as soon as `is_due(self)`."""
        deadline = time.monotonic() + PROGRAM_SECONDS
        while not is_due(self):
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.process.kill()
        self.process.wait()

    def rows(self, name):
        """Values of a metric, in the order of its steps."""
        found = self._json("metrics.jsonl")
        return [row[name] for row in found if name in row]

    def checkpoints(self):
        return self._json("checkpoints.jsonl")

    def _json(self, name):
        path = self.log / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


@pytest.fixture
def start(place, server):
    """Starts a program: a module of tinker_cookbook, or a file, and its settings."""

    def start(module, *settings, log=None, **named):
        log = log or place / f"log-{len(list(place.glob('*.txt')))}"
        settings = [*settings, *(f"{name}={value}" for name, value in named.items())]
        if module[0] == "-m":
            settings.append(f"log_path={log}")
        return Program(place, server, log, [*module, *settings])

    return start
