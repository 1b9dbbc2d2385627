"""Programs of tinker-cookbook 0.6.1, as they were published, over this server."""

import os
import re
import signal
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.store.run import load_run

RECIPES = "tinker_cookbook.recipes"
STUDENT, TEACHER, READER = "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-4B-Instruct-2507"
HERE = Path(__file__).parent
MODEL = {"model_name": STUDENT, "behavior_if_log_dir_exists": "delete"}
QUIET = {"eval_every": 0, "save_every": 0}


def source(name):
    """A file of the published source that is in no wheel."""
    root = os.environ.get("LOCKSTEP_COOKBOOK_SOURCE")
    if root is None:
        pytest.skip("LOCKSTEP_COOKBOOK_SOURCE does not name the cookbook's source")
    return str(Path(root) / "tests" / name)


def assert_exact(program):
    """The program's own figures say that sampler and trainer have the same log-probs."""
    first, second = (program.rows(f"optim/kl_sample_train_{v}") for v in ("v1", "v2"))
    assert first and set(first) == {0.0} and set(second) == {0.0}


def mean(values):
    return sum(values) / len(values)


def test_math_rl_learns(start):
    program = start(
        ("-m", f"{RECIPES}.math_rl.train"), **MODEL, **QUIET, env="arithmetic",
        loss_fn="importance_sampling", group_size=16, groups_per_batch=32, learning_rate=2e-3,
        max_tokens=5, max_steps=16,
    ).wait()  # fmt: skip
    assert_exact(program)
    rewards = program.rows("env/all/reward/total")
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.02, rewards


def test_math_rl_off_policy_and_in_a_stream(start):
    common = {**MODEL, **QUIET, "env": "arithmetic", "group_size": 4, "groups_per_batch": 8}
    common |= {"loss_fn": "importance_sampling", "max_tokens": 5, "max_steps": 3}
    module = ("-m", f"{RECIPES}.math_rl.train")
    assert_exact(
        start(
            module, **common, **{"stream_minibatch_config.groups_per_batch": 8},
            **{"stream_minibatch_config.num_minibatches": 2},
        ).wait()
    )  # fmt: skip
    late = start(module, **common, max_steps_off_policy=2).wait()
    assert len(late.rows("optim/kl_sample_train_v1")) == 3


def test_guess_number_plays_several_turns_with_the_loss_in_place_of_the_unpublished_one(start):
    program = start(
        ("-m", f"{RECIPES}.multiplayer_rl.guess_number.train"), **MODEL, **QUIET,
        renderer_name="qwen3_disable_thinking", group_size=4, batch_size=4, max_tokens=8,
        max_steps=2,
    ).wait()  # fmt: skip
    assert_exact(program)
    assert max(program.rows("env/all/turns_per_episode")) > 1


def test_rl_loop_trains(start):
    program = start(
        ("-m", f"{RECIPES}.rl_loop"), model_name=STUDENT, batch_size=32, group_size=16,
        max_tokens=12, max_steps=3, save_every=1, learning_rate=1e-3,
    ).wait()  # fmt: skip
    assert max(program.rows("reward/total")) > 0
    assert len(program.checkpoints()) == 3


def test_sl_loop_learns(start):
    program = start(
        ("-m", f"{RECIPES}.sl_loop"), model_name=STUDENT, batch_size=64, max_length=1024,
        max_steps=4, save_every=2, learning_rate=1e-3,
    ).wait()  # fmt: skip
    losses = program.rows("train_mean_nll")
    assert losses == sorted(losses, reverse=True)


def test_chat_sl_that_is_killed_continues_from_its_rolling_checkpoint(start):
    settings = {"dataset": "no_robots", "batch_size": 64, "max_length": 1024, "eval_every": 4}
    settings |= {"save_every": 4, "rolling_save_every": 1, "learning_rate": 1e-3}
    settings |= {"model_name": STUDENT}
    module = ("-m", f"{RECIPES}.chat_sl.train")
    killed = start(module, **settings, behavior_if_log_dir_exists="delete")
    killed.kill_after(lambda program: len(program.checkpoints()) >= 3)
    last = killed.checkpoints()[-1]
    assert last["rolling"]
    resumed = start(module, **settings, behavior_if_log_dir_exists="resume", log=killed.log).wait()
    assert f"Resumed training from {last['state_path']}" in resumed.output.read_text()
    assert resumed.checkpoints()[-1]["name"] == "final"
    losses = resumed.rows("train_mean_nll")
    assert len(losses) >= 8 and losses[-1] < losses[0]


def test_dpo_prefers_what_was_chosen(start):
    program = start(
        ("-m", f"{RECIPES}.preference.dpo.train"), **MODEL, dataset="hhh", batch_size=32,
        max_length=512, max_steps=3, learning_rate=1e-3,
    ).wait()  # fmt: skip
    losses = program.rows("dpo_loss")
    assert losses[0] == pytest.approx(0.693147, abs=1e-6) and losses[-1] < losses[0]


def test_on_policy_distillation_nears_the_teacher(start):
    program = start(
        ("-m", f"{RECIPES}.distillation.on_policy_distillation"), **MODEL, **QUIET,
        teacher_model=TEACHER, dataset="deepmath", group_size=4, groups_per_batch=32,
        learning_rate=1e-3, max_tokens=6, max_steps=6, lora_rank=32,
    ).wait()  # fmt: skip
    assert_exact(program)
    distances = program.rows("teacher_kl")
    assert min(distances[2:]) < distances[0], distances


def test_rl_numerics_check_finds_no_gap_over_thirty_turns(start):
    program = start(
        ("-m", f"{RECIPES}.rl_numerics_check.train"), **MODEL | {"model_name": READER},
        save_every=0, renderer_name="qwen3_instruct", group_size=2, groups_per_batch=4,
        max_tokens=64, max_steps=2, max_trajectory_tokens=6000,
        **{"task.num_pages_min": 28, "task.num_pages_max": 32, "task.page_chars": 40},
    ).wait()  # fmt: skip
    assert_exact(program)
    assert max(program.rows("env/all/turns_per_episode")) > 20


def test_sampled_and_trained_log_probs_are_equal(start):
    program = start(
        (str(HERE / "offline.py"), source("compare_sampling_training_logprobs.py")),
        f"model_names={STUDENT}",
    )  # fmt: skip
    program.wait()
    (error,) = re.findall(r"'mse\[sample, train\]': ([^,]+),", program.output.read_text())
    assert float(error) == 0.0


def test_log_probs_are_those_of_each_temperature(start):
    program = start(
        (source("validate_temperature_logprobs.py"),), base_model=STUDENT, num_trials=10
    ).wait(-signal.SIGABRT)  # it never closes its client, whose threads may abort its end
    table = re.findall(r"^ +(\d\.\d{3}) .* (\d\.\d+) +(\d\.\d+)$", program.output.read_text(), re.M)
    assert len(table) >= 6 and all(float(largest) < 1e-5 for *_, largest in table)


def test_each_model_left_a_run_that_the_doctor_finds_sound(server, place, capsys):
    runs = [load_run(path) for path in (place / "server" / "runs").iterdir()]
    assert len(runs) >= 8
    for run in runs:
        ages = run.column("staleness/max")[1]
        on_policy = [row for row in run.metrics if row.get("staleness/max") == 0]
        assert all(row["mismatch/unequal_tokens"] == 0 for row in on_policy)
        if ages and max(ages) == 0:
            assert main(["doctor", str(run.path)]) == 0
            assert "CONSISTENT" in capsys.readouterr().out
