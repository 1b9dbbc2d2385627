"""The user's functions and rows as a task: from Python, a command or a file, and bad input."""

import asyncio
import json
import math
import os
import re
import sys
import time

import numpy as np
import pytest
from playing import play_turns

import lockstep
from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Score
from lockstep.agent.tools import ToolLimits
from lockstep.cli import main
from lockstep.config import file_form, overlaid, resolve, to_dict
from lockstep.envs.custom import CustomConfig, CustomEnvironment
from lockstep.errors import ConfigError, DataError
from lockstep.recipes import configure, custom_config, read_config, recipe
from lockstep.recipes.fitting import learning_rate
from lockstep.run.preflight import preflight, summary
from lockstep.run.prompts import FirstPrompts
from lockstep.types import Message, ToolCall

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]


LONG = ["short", "long " * 200]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def reward(episode):
    return episode.answer == episode.task["answer"]


def tasks():
    return ROWS


def unreachable(*names, **settings):
    raise OSError("no\nroute")


def config_of(tasks=ROWS, reward=reward, tools=(add,), **settings):
    return custom_config(model="tiny-math", tools=tools, reward=reward, tasks=tasks, **settings)


def refused(message, error=(ConfigError, DataError), **given):
    with pytest.raises(error, match=message) as caught:
        preflight(config_of(**given))
    assert "\n" not in str(caught.value)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "own_tools.py").write_text(
        "def add(a: int, b: int) -> int:\n    'Adds.'\n    return a + b\n\n\n"
        "def reward(episode):\n    return len(episode.calls)\n"
    )
    yield tmp_path
    sys.modules.pop("own_tools", None)


def play(config, *turns):
    task = config.task.splits["train"][0]
    return play_turns(CustomEnvironment(config.task, task, ToolLimits()), turns).score


# -- one config, three ways ---------------------------------------------------------------------


def test_python_the_command_line_and_a_file_give_one_config(here):
    names = {"tools": ["own_tools.py:add"], "reward": "own_tools.py:reward"}
    python = custom_config(model="tiny-math", tasks="tasks.jsonl", lora={"rank": 4}, **names)
    settings = ["model=tiny-math", "lora.rank=4", "task.tools=own_tools.py:add"]
    settings += ["task.reward=own_tools.py:reward", "task.path=tasks.jsonl"]
    assert configure("custom", overrides=settings) == python
    (here / "whole.yaml").write_text(file_form(python))
    assert read_config(here / "whole.yaml") == python
    (here / "short.yaml").write_text(
        "recipe: custom\nmodel: tiny-math\nlora.rank: 4\ntask:\n  tools: [own_tools.py:add]\n"
        "  reward: own_tools.py:reward\n  path: tasks.jsonl\n"
    )
    assert read_config(here / "short.yaml") == python
    (here / "short.toml").write_text(
        'recipe = "custom"\nmodel = "tiny-math"\nlora.rank = 4\n[task]\n'
        'tools = ["own_tools.py:add"]\nreward = "own_tools.py:reward"\npath = "tasks.jsonl"\n'
    )
    assert read_config(here / "short.toml") == python
    (here / "stored.json").write_text(json.dumps(to_dict(python)))
    assert read_config(here / "stored.json") == python


def test_a_dry_run_prints_the_file_that_it_would_run(here, capsys):
    words = ["model=tiny-math", "task.tools=own_tools.py:add", "task.reward=own_tools.py:reward"]
    assert main(["train", "custom", *words, "task.path=tasks.jsonl", "--dry-run"]) == 0
    (here / "run.yaml").write_text(capsys.readouterr().out)
    assert read_config(here / "run.yaml").task.tools == ("own_tools.py:add",)
    assert main(["train", "run.yaml", "trainer.lr=0.5", "--dry-run"]) == 0
    assert "lr: 0.5" in capsys.readouterr().out


def test_functions_of_an_importable_module_are_named_by_it():
    task = config_of(tasks=tasks).task
    assert task.tools == (f"{__name__}:add",)
    assert (task.reward, task.path) == (f"{__name__}:reward", f"{__name__}:tasks")


def test_a_kind_is_named_alone_and_a_small_number_is_a_number(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("recipe: quickstart\nengine: vllm\ncorrection: mis\ntrainer:\n  lr: 1e-6\n")
    config = read_config(path)
    assert type(config.engine).__name__ == "VllmConfig" and config.trainer.lr == 1e-6
    assert config.trainer.warmup_updates == 5, "the rest of the recipe stays"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "model: [", "is not YAML"),
        ("a.yaml", "- 1", "by name"),
        ("a.toml", "model = ", "is not TOML"),
        ("a.yaml", "recipe: quickstart\nstpes: 3", "'steps'"),
        ("a.yaml", "recipe: quickstrat", "'quickstart'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path / name)
    assert name in str(caught.value)


# -- a run --------------------------------------------------------------------------------------


def test_ten_lines_train(tmp_path):
    outcome = lockstep.train(
        model="tiny-math",
        tools=[add],
        reward=lambda episode: {"short": 0.1, "right": reward(episode)},
        tasks=iter(ROWS),
        steps=1,
        groups_per_step=2,
        group_size=2,
        evaluation={"at_start": False, "num_tasks": 1},
        agent={"max_turns": 2, "max_turn_tokens": 8},
        out=tmp_path / "run",
    )
    assert outcome.status == "done"
    assert lockstep.load(outcome.path).config["task"]["path"] == "live:tasks"
    assert "reward/short" in (outcome.path / "metrics.jsonl").read_text()


def test_a_live_function_is_gone_with_its_process(here):
    refused("ended with that process", reward="live:nothing")


def test_a_script_without_a_guard_does_not_train_again_when_it_is_imported(here):
    (here / "unguarded.py").write_text(
        "import lockstep\n\ndef reward(episode):\n    return 1.0\n\n"
        "lockstep.train(model='tiny-math', reward=reward, tasks=['a', 'b'])\n"
    )
    refused("below `if __name__", reward="unguarded.py:reward")
    (here / "exits.py").write_text("raise SystemExit(0)\n")
    refused("exits.py cannot be imported: SystemExit", reward="exits.py:reward")


def test_train_takes_a_config_or_settings():
    with pytest.raises(ConfigError, match="steps="):
        lockstep.train(config_of(), steps=3)


# -- the reward ---------------------------------------------------------------------------------


def test_the_reward_gets_the_finished_episode():
    seen = []

    async def look(episode):
        seen.append(episode)
        return Score(reward=0.5, parts={"half": 1.0})

    config = config_of(reward=look)
    call = ToolCall(name="add", arguments='{"a": 1, "b": 2}')
    turns = [
        Message(role="assistant", tool_calls=(call, ToolCall(name="add", arguments="{"))),
        Message(role="assistant", content="3"),
    ]
    assert play(config, *turns) == Score(reward=0.5, parts={"half": 1.0})
    (episode,) = seen
    assert episode.answer == "3" and episode.task["question"].startswith("What")
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [(u.name, u.arguments) for u in episode.calls] == [
        ("add", {"a": 1, "b": 2}),
        ("add", "{"),
    ]
    assert episode.calls[0].output == "3" and "not valid JSON" in episode.calls[1].output


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "is None; expected a finite number.*Is a `return` missing"),
        ("yes", "is 'yes'; expected a finite number"),
        (math.nan, "is nan; expected a finite number"),
        ({"right": None}, "'right' is None; expected a finite number"),
    ],
)
def test_a_reward_that_is_no_number_is_refused_before_the_run(returned, message):
    refused(message, reward=lambda episode: returned)


def test_a_reward_that_raises_is_refused_before_the_run_with_the_columns():
    def anser(episode):
        return episode.task["anser"]

    refused("KeyError: 'anser'.*columns question, answer", reward=anser)


# -- tools and tasks ----------------------------------------------------------------------------


def test_what_the_trial_of_the_reward_changes_does_not_stay():
    def consumes(episode):
        episode.task["refs"].append(1)
        return 1.0

    config = config_of([{"question": text, "refs": []} for text in "ab"], consumes).task
    config.check()
    assert [task.payload["refs"] for split in config.splits.values() for task in split] == [[], []]


def test_a_tool_without_types_is_refused():
    def shout(text):
        return text.upper()

    refused("parameter 'text': has no type", tools=[shout])


def test_what_is_no_function_is_refused():
    refused("tools must be a list of functions", tools=add)
    refused("expected a function, found", reward=f"{__name__}:ROWS")
    refused("has no 'rewrad'. Did you mean 'reward'", reward=f"{__name__}:rewrad")
    refused("there is no such file: nowhere.py", reward="nowhere.py:reward")
    refused("expected FILE.py:NAME or PACKAGE.MODULE:NAME", reward="reward")


def test_rows_without_ids_are_named_by_their_content():
    first, second = config_of(tasks=ROWS).task.splits, config_of(tasks=ROWS[::-1]).task.splits
    for split in ("train", "eval"):
        assert {task.id for task in first[split]} == {task.id for task in second[split]}
    assert len(first["train"]) + len(first["eval"]) == 20
    more = config_of(tasks=[*ROWS, ROWS[0], {"question": "Another?"}]).task.splits
    assert sum(map(len, more.values())) == 21, "equal rows are one task"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "there is no task"),
        (["Only one?"], "1 tasks .* leave 1 to train on and 0 to evaluate on"),
        ([{"prompt": "a"}, {"prompt": "b"}], "no column 'question'.*task.question=COLUMN"),
        ([{"id": 1, "question": "a"}, {"id": 1, "question": "b"}], "'1' is given twice"),
        ([{"id": 1.5, "question": "a"}] * 2, "id must be text or a whole number"),
        ([{"question": None}] * 2, "question must be text or a list of messages, found None"),
        ([{"question": 7}] * 2, "question must be text or a list of messages, found 7"),
        ([3, 4], "a task is an object or text, found 3"),
        ({"question": "a"}, "tasks must be a file, the name of a data set, or a list"),
        ("nowhere.jsonl", "no such file or folder"),
        ("nobody/nothing", "the Hugging Face hub gave no answer .OSError: no route"),
    ],
)
def test_bad_tasks_are_refused_before_a_model_is_loaded(given, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    refused(message, tasks=given, reward=lambda episode: 0)


def test_a_prompt_that_no_row_can_hold_is_refused():
    refused("has .* tokens and max_tokens=64", tasks=LONG, max_tokens=64, reward=lambda episode: 0)


def test_prompts_without_room_for_a_reply_are_left_out_with_a_count():
    rows = [*(f"Say {n}." for n in range(18)), "long " * 200, "longer " * 10**6]
    config = config_of(tasks=rows, reward=lambda episode: 0, max_tokens=64, tools=())
    files = preflight(config)
    counts = re.findall(r"(\d+) of \d+ (?:train|eval) tasks", " ".join(summary(config, files)))
    assert sum(map(int, counts)) == 2
    prompts = FirstPrompts(config, files.renderer)
    for split in ("train", "eval"):
        drawn = prompts.tasks(split).take(40)
        assert drawn and all(len(task.payload["question"]) < 10 for task in drawn)
    state = prompts.tasks("train").state_dict()
    assert state == config.task.tasks(split="train", seed=config.seed).state_dict()
    with pytest.raises(DataError, match=r"20 of 20|1[0-9] of 1[0-9] train tasks"):
        preflight(resolve(config, ["max_tokens=8"]))


def test_a_mixture_leaves_the_long_prompts_of_each_part_out():
    own = config_of(tasks=[*ROWS, {"question": "long " * 200}], max_tokens=64, tools=())
    parts = {"own": to_dict(own.task) | {"type": "custom"}, "sums": {"type": "math"}}
    mixed = overlaid(own, {"task": {"type": "mixture", "parts": parts}})
    files = preflight(mixed)
    assert "1 of " in " ".join(files.notes)
    prompts = FirstPrompts(mixed, files.renderer)
    long = [
        t for split in ("train", "eval") for t in mixed.task.tasks(split=split, seed=0).listed()
    ]
    assert [prompts.fits(task) for task in long].count(False) == 1


def test_what_is_left_out_of_the_rows_is_in_the_plan():
    rows = [{**row, "seen": {1}, "system": "Be brief."} for row in ROWS]
    notes = " ".join(preflight(config_of(tasks=rows)).notes)
    assert "the column 'seen' is left out" in notes and "'system' is not shown" in notes


def test_columns_are_named_and_files_of_every_form_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(8)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text(
        "prompt,answer\n" + "".join(f"Say {n}.,{n}\n" for n in range(8))
    )
    folder = tmp_path / "set" / "main"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        part = [{**row, "prompt": f"{split}: {row['prompt']}"} for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{split}-0.parquet")
    for name in ("a.json", "a.csv", "set"):
        task = CustomConfig(path=str(tmp_path / name), question="prompt")
        num = {split: len(tasks) for split, tasks in task.splits.items()}
        assert num == ({"train": 8, "eval": 8} if name == "set" else {"train": 6, "eval": 2})


def test_a_data_set_of_several_parts_is_asked_for_one(tmp_path):
    for part in ("main", "socratic"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "train.jsonl").write_text('{"question": "a"}')
    with pytest.raises(DataError, match=r"task.path="):
        _ = CustomConfig(path=str(tmp_path)).splits


def test_two_recipes_of_one_name_are_refused():
    def quickstart():
        """Another."""

    with pytest.raises(ConfigError, match="two recipes are called quickstart"):
        recipe(quickstart)


# -- settings -----------------------------------------------------------------------------------


def test_open_settings_follow_the_model_and_given_ones_stay():
    full, adapter = config_of(), config_of(lora={"rank": 8})
    assert (full.trainer.lr, adapter.trainer.lr) == (1e-3, 3e-3)
    assert config_of(trainer={"lr": 0.1}).trainer.lr == 0.1
    assert config_of(tools=()).agent.max_turns == 1
    assert config_of(groups_per_step=3, max_tokens=200).max_tokens == 200
    assert [learning_rate(n, is_lora=False) for n in (10**9, 32 * 10**9)] == [1e-6, 1e-6]
    sizes, found = (10**5, 135 * 10**6, 8 * 10**9), [3e-3, 1e-4, 1e-5]
    assert [learning_rate(n, is_lora=False, is_supervised=True) for n in sizes] == found
    adapters = [learning_rate(n, is_lora=True, is_supervised=True) for n in sizes]
    assert adapters == [3e-3, 1e-3, 1e-4]
    assert configure("agent", overrides=["model=tiny-qwen3"]).trainer.lr == 1e-3


# -- functions in processes of their own --------------------------------------------------------


WORKED = """
import os, re

def stuck(text: str) -> int:
    "Never lets go of Python's lock."
    return len(re.match(r"(a+)+$", "a" * 40 + text).group())

def huge() -> int:
    "The same in one product."
    return 10 ** 10**9

def add(a: int, b: int) -> int:
    "Adds."
    return a + b

async def later(a: int) -> str:
    "Awaits."
    return f"{os.getpid()} {a}"

def exits() -> int:
    "Ends."
    raise SystemExit(3)

def dies() -> int:
    "Ends the process."
    os._exit(3)

def fails() -> int:
    "Raises."
    raise ValueError("no such word")

def reward(episode):
    return {"calls": len(episode.calls), "right": episode.answer == episode.task["answer"]}

def stuck_reward(episode):
    return sum(range(10**11)) if episode.answer else 0.0
"""


def test_workers_run_tools_and_the_reward_and_are_killed_at_the_limit(here):
    (here / "worked.py").write_text(WORKED)
    names = ("stuck", "huge", "add", "later", "exits", "dies", "fails")
    settings = {
        "tools": tuple(f"worked.py:{name}" for name in names),
        "reward": "worked.py:reward",
        "path": "rows.jsonl",
        "workers": 2,
    }
    rows = [json.dumps({"question": word, "answer": "5"}) for word in ("one", "two")]
    (here / "rows.jsonl").write_text("\n".join(rows))
    config = CustomConfig(**settings)
    config.check()
    (task, *_) = config.splits["train"]
    environment = config.environment(task, AgentConfig(tool_timeout_seconds=3.0))
    beats = []

    async def beat():
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.05)

    async def episode():
        job = asyncio.create_task(beat())
        await environment.reset()
        arguments = {"stuck": '{"text": "b"}', "add": '{"a": 2, "b": 3}', "later": '{"a": 1}'}
        calls = tuple(ToolCall(name=n, arguments=arguments.get(n, "{}")) for n in names)
        observation = await environment.step(Message(role="assistant", tool_calls=calls))
        await environment.step(Message(role="assistant", content="5"))
        job.cancel()
        return observation, await environment.score()

    try:
        observation, score = asyncio.run(episode())
    finally:
        asyncio.run(config.close())
    stuck, huge, added, awaited, exited, died, failed = (m.content for m in observation.messages)
    assert "took longer than 3 s" in stuck and "took longer than 3 s" in huge
    assert added == "5" and awaited.split()[0] != str(os.getpid())
    assert "SystemExit: 3" in exited and "exit code 3" in died
    assert failed == "error: ValueError: no such word"
    assert observation.metrics["tool/timeouts"] == 2
    assert score.reward == 8 and score.parts == {"calls": 7, "right": 1}
    assert max(np.diff(beats)) < 1.5  # the event loop went on meanwhile


def test_a_run_says_at_its_start_that_functions_of_its_process_cannot_be_ended():
    in_process = config_of().task
    assert "Python's lock cannot be ended" in in_process.limits_notice
    assert CustomConfig(workers=1).limits_notice == ""
    with pytest.raises(ConfigError, match="live:reward"):
        CustomConfig(reward="live:reward", workers=1)
