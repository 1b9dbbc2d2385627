"""The noise table: passes of the same tokens by both sides, through the verb and as a function."""

import json
import re

import pytest
import torch
from command_line import refusal
from quickstarts import quickstart_with

import lockstep
from lockstep.cli import OK, main
from lockstep.errors import EngineError
from lockstep.run.hooks import RunHooks, hooked
from lockstep.run.noise_table import two_sides
from lockstep.testing.engines import BrokenEngine
from lockstep.testing.faults import injected
from lockstep.testing.faults.sides import KernelNoise

SMALL = ("groups_per_step=2", "group_size=2")
ZERO = ("diff", "single_diff", "var_rollout", "var_train")


class Scoreless(BrokenEngine):
    """An engine that samples and cannot score."""

    async def score(self, token_ids, **how):
        raise EngineError("no prompt log-probs")


class ScorelessRun(RunHooks):
    def make_engine(self, config, context):
        return Scoreless(super().make_engine(config, context))


def noise(capsys, *words):
    """What the verb prints as JSON."""
    assert main(["noise", "quickstart", "--json", "--scorings", "4", *SMALL, *words]) == OK
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_figures_are_means_over_tokens_of_differences_of_means_and_of_variances():
    trained = torch.tensor([[-1.0, -2.0], [-1.2, -2.0]])
    scored = torch.tensor([[-1.3, -2.0], [-1.1, -2.4], [-1.2, -2.2]])
    found = two_sides(trained, scored, torch.tensor([[-1.4, -2.1]]))
    assert found == pytest.approx({
        "diff": (0.1 + 0.2) / 2, "single_diff": (0.4 + 0.1) / 2,
        "var_rollout": (0.01 + 0.04) / 2, "var_train": (0.02 + 0.0) / 2,
    }, rel=1e-5)  # fmt: skip


def test_one_set_of_kernels_has_no_noise_and_another_precision_has_a_bias(capsys):
    exact = noise(capsys)
    assert exact["num_tokens"] > 10
    assert all(exact[name] == exact[f"prob_{name}"] == 0.0 for name in ZERO)
    rounded = noise(capsys, "contract=none", "engine.dtype=bfloat16", "model=tiny-qwen3")
    assert rounded["var_rollout"] == rounded["var_train"] == 0.0
    assert 1e-4 < rounded["diff"] == pytest.approx(rounded["single_diff"])


def test_noise_of_the_sampler_is_in_its_variance_and_averages_out(capsys):
    told = noise(capsys, "--fault", "kernel_noise,std=0.03")
    assert told["var_train"] == 0.0 and 0 < told["diff"] < told["single_diff"]
    config = quickstart_with(*SMALL)
    with injected(KernelNoise(std=0.03)):
        found = lockstep.measure_noise(config, num_scorings=4)
    assert found == pytest.approx(told)


def test_each_figure_is_printed_with_its_name(capsys):
    assert main(["noise", "quickstart", "--scorings", "2", *SMALL]) == OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["diff", "0"] in lines and ["prob_var_rollout", "0"] in lines
    assert [name for name, _ in lines][-1] == "num_tokens"


def test_a_run_is_measured_at_its_checkpoint(tmp_path, capsys):
    small = {"steps": 1, "groups_per_step": 1, "group_size": 2, "evaluation": {"num_tasks": 1}}
    run = lockstep.train("quickstart", out=tmp_path / "run", view="json", **small)
    assert main(["noise", f"{run.path}@1", "--json", *SMALL]) == OK
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["diff"] == 0.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstart", "--scorings", "1"], "scorings=1: a variance needs 2 or more"),
        (["quickstart", "agent.top_p=0.9"], "rescorings=16 with agent.top_p=0.9"),
        (["quickstart", "out=runs/a"], "lockstep noise takes no out="),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    assert re.search(message, refusal("noise", *words, *SMALL, capsys=capsys))


def test_an_engine_that_scores_nothing_is_named_with_its_reason():
    config = quickstart_with(*SMALL)
    with hooked(ScorelessRun()), pytest.raises(
        EngineError, match=r"not one of \d+ .* could be scored again.*no prompt log-probs"
    ):  # fmt: skip
        lockstep.measure_noise(config, num_scorings=2)
