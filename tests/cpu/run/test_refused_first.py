"""What a run needs is checked first: before tasks are tried and models read, in one sentence."""

import asyncio
import json
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from quickstarts import quickstart_with

import lockstep
from lockstep.agent.environment import Environment
from lockstep.agent.guard import described, guarded
from lockstep.agent.match import Match
from lockstep.agent.tools import tool
from lockstep.cli import main
from lockstep.config import from_dict, overlaid, resolve, to_dict
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.errors import ConfigError, LockstepError, is_full_disk
from lockstep.launch.gpu import shows_gpu
from lockstep.recipes import find_recipe, read_config
from lockstep.run.preflight import preflight
from lockstep.run.train import train
from lockstep.run_config import Config
from lockstep.store.run import RunDirectory

TASKS = [{"question": f"What is {n}?", "answer": str(n)} for n in range(12)]
TRIED = []
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def reward(episode):
    TRIED.append(episode.answer)
    return 0.0


def own_run(**settings):
    return lockstep.train(
        **{"model": "tiny-qwen3", "reward": reward, "tasks": TASKS, "steps": 1} | settings
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with RunDirectory.create("run", to_dict(find_recipe("quickstart"))):
        pass
    TRIED.clear()


@pytest.mark.parametrize("name", TABLES["places"])
def test_what_a_run_needs_is_refused_before_the_reward_is_tried(name, here):
    changed, message = TABLES["places"][name]
    if name == "a GPU" and shows_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(LockstepError, match=message) as caught:
        own_run(**changed)
    assert "\n" not in str(caught.value) and not TRIED


@pytest.mark.parametrize(("given", "missing"), [
    ({}, "model= and reward= and tasks= are missing"),
    ({"model": "tiny-qwen3"}, "reward= and tasks= are missing"),
    ({"model": "tiny-qwen3", "reward": reward}, "tasks= is missing"),
    ({"tasks": TASKS, "reward": reward}, "model= is missing"),
    ({"tasks": TASKS, "model": "tiny-qwen3"}, "reward= is missing"),
    ({"tasks": TASKS, "model": "tiny-qwen3", "reward": None}, "reward= is missing"),
    ({"steps": 3}, "model= and reward= and tasks= are missing"),
    ({"model": "", "reward": reward, "tasks": "t.jsonl"}, "model= is missing"),
])  # fmt: skip
def test_a_missing_argument_is_named_with_the_others(given, missing):
    with pytest.raises(ConfigError, match=f"{missing}. Or name a recipe"):
        lockstep.train(**given)


@pytest.mark.parametrize(("key", "meant"), TABLES["meant"].items())
def test_a_setting_of_another_section_is_answered_with_its_path(key, meant, tmp_path):
    recipe = find_recipe("quickstart")
    file = tmp_path / "settings.json"
    room, _, name = key.rpartition(".")
    tree = {room: {name: 3}} if room else {key: 3}
    file.write_text(json.dumps({"recipe": "quickstart"} | tree))
    for given in (
        lambda: overlaid(recipe, {key: 3}),
        lambda: from_dict(Config, tree),
        lambda: read_config(file),
        lambda: resolve(recipe, [f"{key}=3"]),
    ):
        with pytest.raises(ConfigError, match=rf"unknown setting '{key}'\. Did you mean '{meant}"):
            given()


@tool(name="add")
def plus(a: int) -> int:
    return a


def add(a: int) -> int:
    return -a


class Twice(Environment):
    tools = (plus, tool(add))

    async def reset(self):
        raise AssertionError("the tools are checked first")


@pytest.mark.parametrize("tools", [[add, plus], [add, add], [plus, add, plus]])
def test_two_tools_of_one_name_are_refused_before_the_run(tools):
    with pytest.raises(ConfigError, match=r"tools that share a name: add\. A call could mean any"):
        own_run(tools=tools)


def test_so_are_those_of_an_environment_and_of_a_seat():
    class Alone(DocSearchConfig):
        TAG = "twice-alone"

        def environment(self, task, agent):
            return Opened()

    class Opened(Twice):
        async def reset(self):
            return []

    class Seated(Match):
        def __init__(self):
            self.tools = {"first": Twice.tools}

    class Two(DocSearchConfig):
        TAG, SEATS = "twice-seated", ("first", "second")

        def match(self, task, agent):
            return Seated()

    for task, whose in ((Alone(), "world-"), (Two(), "seat first of task")):
        config = overlaid(find_recipe("quickstart"), {})
        with pytest.raises(ConfigError, match=rf"{whose}.*\badd\b"):
            preflight(Config(**{**vars(config), "task": task}))


# -- from=RUN@STEP ---------------------------------------------------------------------------


def small(*settings):
    changed = ["groups_per_step=2", "group_size=2", "evaluation=none", "checkpoint.every=1"]
    return quickstart_with(*changed, *settings)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "two"
    return train(small("steps=2"), out=path, view="json").path


@pytest.mark.parametrize(("steps", "at", "said"), [
    (2, 2, "Set steps=4 to train 2 more"),
    (1, 2, "Set steps=3 to train 1 more"),
    (2, None, "Set steps=4 to train 2 more"),
    (1, 1, "Set steps=2 to train 1 more"),
])  # fmt: skip
def test_a_checkpoint_at_or_behind_the_last_step_is_refused_with_the_number(
    two_steps, tmp_path, capsys, steps, at, said
):
    place = f"{two_steps}@{at}" if at else str(two_steps)
    with pytest.raises(ConfigError, match=said):
        train(small(f"steps={steps}"), out=tmp_path / "fork", start=(two_steps, at))
    for more in ([], ["--dry-run"]):
        words = ["train", f"from={place}", f"steps={steps}", f"out={tmp_path / 'fork'}", *more]
        assert main(words) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "fork").exists()


def test_a_run_goes_on_from_the_step_before_and_a_finished_one_says_so(two_steps, tmp_path, capsys):
    forked = train(small("steps=2"), out=tmp_path / "fork", start=(two_steps, 1), view="json")
    assert [row["step"] for row in forked.run.metrics if "train/loss" in row] == [1]
    assert train(small("steps=2"), out=two_steps, resume=True).status == "done"
    said = capsys.readouterr().out
    assert f"{two_steps} is already finished: all 2 steps are made." in said
    assert f"lockstep train from={two_steps} steps=4" in said


# -- what is said of strangers' code and disks -------------------------------------------------


@pytest.mark.parametrize("name", TABLES["raising"])
def test_an_error_of_foreign_code_names_the_users_file_and_line(name, tmp_path):
    source, expected = TABLES["raising"][name]
    space = {}
    exec(compile(source, str(tmp_path / "mine.py"), "exec"), space)
    with pytest.raises(Exception) as caught:
        asyncio.run(guarded(space["hook"]))
    assert described(caught.value).endswith(expected)


def test_a_reward_and_a_file_that_raise_are_refused_with_file_and_line(here, tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\ndef reward(e):\n    return json.loads('')\n")
    (tmp_path / "torn.py").write_text("import json\n\nnumber = 1 / 0\n")
    with pytest.raises(ConfigError, match=r"JSONDecodeError.*\(mine.py:4\)"):
        own_run(reward="mine.py:reward")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError.*\(torn.py:3\)"):
        own_run(reward="torn.py:reward")


@pytest.mark.parametrize(("error", "is_one"), [
    (OSError(28, "No space left on device", "x"), True),
    (OSError(122, "Disk quota exceeded"), True),
    (RuntimeError("IoError(Os { code: 28, message: No space left on device })"), True),
    (OSError("[Errno 28] Error writing bytes to file. Detail: No space left on device"), True),
    (OSError(13, "Permission denied"), False),
    (ValueError("disk"), False),
])  # fmt: skip
def test_a_full_disk_is_known_by_the_systems_words(error, is_one):
    assert is_full_disk(error) == is_one


@pytest.mark.parametrize("call", [
    'lockstep.train("quickstart", steps=0)',
    'lockstep.train("quikstart")',
    'lockstep.train(model="tiny-qwen3")',
    'lockstep.train("quickstart", out="script.py")',
    'lockstep.train_supervised("sft")',
])  # fmt: skip
def test_a_script_reads_one_sentence_before_the_traceback(call, tmp_path):
    (tmp_path / "script.py").write_text(f"import lockstep\n{call}\n")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    first, _, rest = done.stderr.partition("Traceback (most recent call last):\n")
    kind, _, sentence = " ".join(first.split()).partition(": ")
    assert kind in ("ConfigError", "DataError", "RunError") and sentence.endswith((".", "?"))
    assert " ".join(rest.split()).endswith(textwrap.shorten(sentence, 10**4))
    assert " ".join(done.stderr.split()).count(sentence[:40]) == 2 and done.returncode == 1
