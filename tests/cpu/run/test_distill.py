"""A student and its teacher in whole runs: exact, resumed, served, and refused where it must be."""

import json
import sys
from pathlib import Path

import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from fake_servers import JSON
from fake_sglang import FakeSGLang
from run_rows import rows_of

from lockstep.config import resolve
from lockstep.errors import ConfigError, EngineError
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.recipes import find_recipe
from lockstep.run.preflight import preflight
from lockstep.run.train import train

TEACHER = "distill.teacher.model=tiny-gpt-oss"
SMALL = (
    "steps=2", "groups_per_step=3", "evaluation=none", "checkpoint.every=0",
    "trainer.schedule=constant", TEACHER,
)  # fmt: skip

QWEN3 = ("model=tiny-qwen3", "distill.teacher.model=tiny-qwen3", "distill.signal=sampled")
"""The model that the fake server says it has."""


def config(*settings):
    return resolve(find_recipe("distill"), [*SMALL, *settings])


@pytest.mark.parametrize("signal", ["sampled", "top_k", "full"])
def test_the_student_learns_exactly_and_goes_on_with_the_same_bits(signal, tmp_path):
    """The teacher is the student before its first update: no gap, no loss; then there is one."""
    how = config(f"distill.signal={signal}", "contract=true-on-policy")
    whole = rows_of(train(how, out=tmp_path / "whole", view="json").path)
    name = "distill/kl" if signal == "sampled" else "train/teacher_kl"
    gaps = [row[name] for row in whole if "reward/mean" in row]
    assert gaps[0] == pytest.approx(0, abs=1e-6)
    if signal != "sampled":
        assert 0 <= gaps[1] != gaps[0]
    assert all(row["mismatch/k3"] == 0 for row in whole if "mismatch/k3" in row)
    first = train(config(f"distill.signal={signal}", "steps=1"), out=tmp_path / "run", view="json")
    onward = train(how, out=tmp_path / "on", start=(first.path, 1), view="json")
    assert rows_of(first.path)[:1] + rows_of(onward.path) == whole


def test_a_run_may_teach(tmp_path):
    parent = train(config("steps=1"), out=tmp_path / "teacher", view="json").path
    for name in (parent, f"{parent}@1"):
        preflight(config(f"distill.teacher.model={name}"))
    for step, said in (("7", "step"), ("best", "RUN@STEP")):
        with pytest.raises(ConfigError, match=rf"distill\.teacher\.model=.*@{step}: .*{said}"):
            preflight(config(f"distill.teacher.model={parent}@{step}"))


def test_a_server_teaches_like_a_model_here(tmp_path):
    """The reward makes the first update: from there on the student is not the teacher."""
    how = (*QWEN3, "distill.coef=0.5", "distill.reward_coef=1", "group_size=4", "contract=none")
    here = rows_of(train(config(*how), out=tmp_path / "here", view="json").path)
    model = load_checkpoint(locate_model("tiny-qwen3"))
    with FakeSGLang(model) as server:
        served = config(
            *how, "distill.teacher.engine=sglang", f"distill.teacher.engine.urls={server.url}"
        )
        found = rows_of(train(served, out=tmp_path / "served", view="json").path)
    for mine, theirs in zip(here, found, strict=True):
        assert theirs["distill/kl"] == pytest.approx(mine["distill/kl"], abs=1e-5)
        assert theirs["reward/mean"] == mine["reward/mean"]
    assert here[1]["distill/kl"] > 1e-3


class Dying(FakeSGLang):
    """Answers the first step's rows, and then no more."""

    async def generate(self, http):
        self.num_scored = getattr(self, "num_scored", 0) + ("logprob_start_len" in http[JSON])
        if self.num_scored > 3:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return await super().generate(http)


def test_a_server_that_dies_leaves_the_run_as_it_was(tmp_path):
    model = load_checkpoint(locate_model("tiny-qwen3"))
    with Dying(model) as server:
        how = config(
            *QWEN3,
            "distill.teacher.engine=sglang",
            f"distill.teacher.engine.urls={server.url}",
            "distill.teacher.engine.start_seconds=5",
        )
        with pytest.raises(EngineError, match=r"distill\.teacher"):
            train(how, out=tmp_path / "run", view="json")
    path = tmp_path / "run"
    assert len(rows_of(path)) == 1, "the first step is kept, the second was never made"
    state = json.loads((path / "checkpoints" / "step-000001" / "state.json").read_text())
    assert state["step"] == 1
