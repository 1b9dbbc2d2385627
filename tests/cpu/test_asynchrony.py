"""Sampling while the trainer trains: ages, updates within an episode, ends and resumes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quickstarts import quickstart_with

from lockstep.agent.loop import Budget, RolloutOptions, collect, training_sampling
from lockstep.agent.turns import Policy
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.errors import RolloutError
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.observe.metrics import find_metric
from lockstep.ops.context import PackedContext
from lockstep.run.build import build
from lockstep.run.preflight import preflight
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.sync.config import SyncConfig
from lockstep.sync.publisher import Publisher
from lockstep.training.config import TrainerConfig
from lockstep.training.rows import rows_for_training
from lockstep.training.trainer import Trainer
from lockstep.types import Request, SamplingParams

SMALL = (
    "groups_per_step=2", "group_size=2", "evaluation.num_tasks=1", "evaluation.greedy=false",
    "evaluation.at_start=false", "trainer.measure_after_every=0", "contract=none",
    "trainer.schedule=constant", "max_failed_share=0.4",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WatchedConfig(DocSearchConfig):
    """Document search whose environments wait, fail and are counted as a test wants."""

    run: str = ""
    """Episodes of batch b take their second turn when the row of step b - 1 stands in the metrics
    of this run."""
    failing_step: int = -1
    """Whose environments break."""

    def environment(self, task, agent):
        made = super().environment(task, agent)
        step_of = {t.id: at // 2 for at, t in enumerate(self.tasks(split="train", seed=0).take(30))}
        batch, take_turn, end = step_of.get(task.id, 0), made.step, made.close
        OPEN.append(task.id)

        async def step(message):
            if batch == self.failing_step:
                raise OSError("the index is gone")
            while self.run and len(rows_of(Path(self.run))) < batch:
                await asyncio.sleep(0.002)
            return await take_turn(message)

        async def close():
            OPEN.remove(task.id)
            await end()

        made.step, made.close = step, close
        return made


OPEN: list[str] = []


def rows_of(path):
    try:
        return (path / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []


def config_of(*settings, **watched):
    config = quickstart_with(*SMALL, *settings)
    return replace(config, task=WatchedConfig(**watched))


def steps_of(run):
    """step -> its training groups."""
    return {r["step"]: run.groups(r["step"]) for r in run.metrics if "train/loss" in r}


def batches_of(config):
    source = config.task.tasks(split="train", seed=config.seed)
    return [[t.id for t in source.take(config.groups_per_step)] for _ in range(config.steps)]


def check_steps(path, config):
    """Every batch in its place, whole, and each of its rows once."""
    run = load_run(path)
    found = steps_of(run)
    assert list(found) == list(range(config.steps))
    assert [[g.task.id for g in groups] for groups in found.values()] == batches_of(config)
    trajectories = [t for groups in found.values() for g in groups for t in g.trajectories]
    assert len({t.id for t in trajectories}) == len(trajectories) == 4 * config.steps
    return run


# -- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    """Two steps ahead: the first turn of an episode is two versions older than its last."""
    path = tmp_path_factory.mktemp("runs") / "ahead"
    config = config_of("steps=6", "max_staleness=2", "correction=mis", run=str(path))
    assert train(config, out=path, view="json").status == "done"
    return check_steps(path, config)


def test_no_token_is_older_than_allowed_and_versions_are_recorded_as_they_were(ahead):
    for step, groups in steps_of(ahead).items():
        for trajectory in (t for g in groups for t in g.trajectories):
            versions = [s.policy_version for s in trajectory.segments if s.is_sampled]
            assert versions == sorted(versions)
            assert max(step - 2, 0) <= versions[0] <= versions[-1] <= step
            if trajectory.num_turns > 1 and step:
                assert versions[-1] == step, "it waited for the step before"
    rows = [r for r in ahead.metrics if "staleness/max" in r]
    assert [r["staleness/max"] for r in rows] == [0, 1, 2, 2, 2, 2]
    assert all(r["staleness/over_rows"] == r["staleness/dropped_rows"] == 0 for r in rows)
    assert all(r["staleness/mixed_rows"] > 0 for r in rows[1:])
    for row in ahead.metrics:
        assert all(map(find_metric, row))


def test_tokens_of_the_version_in_training_have_the_trainers_log_probs(ahead):
    """Whatever weights the episode began with: the engine's keys are those of its version."""
    for row in ahead.metrics[2:6]:
        assert row["mismatch/by_age/0/compared_tokens"] > 0
        assert row["mismatch/by_age/0/max_abs_diff"] < 1e-4
        assert row["mismatch/by_age/2-3/max_abs_diff"] > 1e-3


@pytest.mark.parametrize("correction", ["mis", "bypass"])
def test_under_the_contract_what_differs_is_age_alone(tmp_path, correction):
    """Tokens of the version in training are equal bit for bit, and older ones to the version that
    drew them: its weights, kept in a checkpoint, give what was recorded."""
    path = tmp_path / "run"
    config = config_of(
        "steps=4", "max_staleness=2", f"correction={correction}", "contract=auto",
        "checkpoint.every=1", "checkpoint.keep_last=9", run=str(path),
    )  # fmt: skip
    parts = build(replace(config, max_staleness=0), preflight(config))
    if not parts.numerics.is_kept:
        pytest.skip(parts.numerics.line)
    assert train(config, out=path, view="json").status == "done"
    run = check_steps(path, config)
    assert run.environment["contract"] == "true-on-policy"
    for row in run.metrics[1:4]:
        assert row["mismatch/by_age/0/compared_tokens"] > 0
        assert row["mismatch/by_age/0/unequal_tokens"] == row["mismatch/k3_numerics"] == 0
        assert row["mismatch/k3_staleness"] == row["mismatch/k3"] > 0
        assert all(map(find_metric, row))
    num_older = 0
    for step, groups in steps_of(run).items():
        rows = rows_for_training(groups, config.advantage, control_ids=frozenset())
        for version in range(step + 1):
            kept = path / "checkpoints" / f"step-{version:06d}" / "policy"
            model = load_checkpoint(kept if version else locate_model(config.model))
            model.ops = parts.trainer.model.ops
            trainer = Trainer(model, TrainerConfig(), like="unused")
            for row, found in zip(rows, trainer.forward(rows, column=None), strict=True):
                drawn = row.loss_mask & (row.columns["policy_version"] == version)
                assert np.array_equal(found[drawn], row.columns["rollout_logprobs"][drawn])
                num_older += int(drawn.sum()) * (version < step)
    assert num_older > 100


def test_the_clock_tells_waiting_from_sampling(ahead):
    for row in ahead.metrics[:6]:
        assert row["time/wait_seconds"] <= row["time/step_seconds"]
        assert row["time/idle_seconds"] >= 0
    late = ahead.metrics[3]
    assert late["time/sample_seconds"] > late["time/wait_seconds"], "it began two steps before"


@pytest.mark.filterwarnings("ignore:all .* scorings are equal")
def test_turns_are_scored_again_by_the_weights_that_sampled_them_or_not_at_all(tmp_path):
    path = tmp_path / "run"
    config = config_of(
        "steps=3", "max_staleness=1", "correction=averaged", "correction.rescorings=3",
        run=str(path),
    )  # fmt: skip
    assert train(config, out=path, view="json").status == "done"
    rows = [r for r in check_steps(path, config).metrics if "train/loss" in r]
    assert rows[1]["staleness/mixed_rows"] > 0
    for row in rows:
        assert all(map(find_metric, row))
        assert 1 < row["noise/rescorings"] <= 3, "first turns had all the time of a step"
        assert row["mismatch_averaged/compared_tokens"] == row["mismatch/compared_tokens"]
        # Equal numbers but for rounding; old weights' scores would be far off.
        assert abs(row["noise/sampling_bias"]) < 1e-5


async def test_without_staleness_a_run_is_the_plain_loop_bit_for_bit(tmp_path):
    config = replace(config_of("steps=2", "contract=auto"), task=DocSearchConfig())
    outcome = train(config, out=tmp_path / "run", view="json")
    parts = build(config, preflight(config))
    engine, trainer = parts.engine, parts.trainer
    tasks = config.task.tasks(split="train", seed=config.seed)
    assert trainer.model is parts.model, "one copy of the weights"
    for step in range(config.steps):
        await engine.load_weights(None, version=trainer.version)
        groups = await collect(
            Policy(engine, parts.renderer, training_sampling(config.agent, engine.capabilities)),
            lambda task: config.task.environment(task, config.agent),
            tasks.take(config.groups_per_step),
            group_size=config.group_size,
            budget=Budget.of(config.agent, max_tokens=config.max_tokens),
            run_seed=config.seed,
            options=RolloutOptions(step=step),
        )
        trainer.update(
            rows_for_training(groups, config.advantage), config.objective, config.correction
        )
    *_, newest = load_run(outcome.path).checkpoints().values()
    found = load_checkpoint(newest / "policy")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name


# -- an update in the middle of a turn ------------------------------------------------------------


def logprobs_under(model, ids, temperature=1.0):
    with torch.no_grad():
        tensor = torch.from_numpy(np.asarray(ids, np.int64))
        hidden = model(tensor, torch.arange(len(ids)), PackedContext.of([len(ids)]))
        return torch.log_softmax(model.logits(hidden).float(), -1)[
            torch.arange(len(ids) - 1), tensor[1:]
        ].numpy()


@pytest.mark.parametrize("kv", ["drop", "keep"])
async def test_each_segment_of_a_turn_has_the_log_probs_of_its_own_weights(kv):
    path = locate_model("tiny-gpt-oss")
    sampled = load_checkpoint(path).requires_grad_(False)
    trained = deepcopy(sampled).requires_grad_(True)
    trainer = Trainer(trained, TrainerConfig(), like=path)
    publisher = Publisher(
        EmbeddedEngine(sampled, EmbeddedConfig()), trainer, sampled, SyncConfig(kv=kv)
    )
    engine, versions = publisher.engine, {0: deepcopy(sampled)}
    request = Request(
        id="a", prompt_ids=np.arange(300, 320, dtype=np.int32),
        sampling=SamplingParams(max_tokens=24), seed=3, stream=True,
    )  # fmt: skip
    deltas = []
    await publisher.publish(0)
    async for delta in engine.generate(request):
        deltas.append(delta)
        if len(deltas) in (6, 14):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(1.02)
            assert not torch.equal(trained.embedding, sampled.embedding), "its own memory"
            version = len(versions)
            versions[version] = deepcopy(trained)
            await publisher.publish(version)
    assert [d.policy_version for d in deltas if d.finish_reason == "weight_update"] == [0, 1]
    path = np.concatenate([request.prompt_ids, *(d.token_ids for d in deltas)])
    found = np.concatenate([d.logprobs for d in deltas])
    version_of = np.concatenate([np.full(len(d.token_ids), d.policy_version) for d in deltas])
    assert set(version_of) == {0, 1, 2}
    kept = {d.policy_version for d in deltas if "kv=kept" in d.fingerprint}
    assert kept == (set() if kv == "drop" else {1, 2})
    for version, model in versions.items():
        of_it = version_of == version
        gap = np.abs(logprobs_under(model, path)[len(request.prompt_ids) - 1 :] - found)[of_it]
        assert (gap.max() < 1e-4) == (version not in kept), "kept keys are of neither policy"


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_later_batch_that_fails_waits_for_its_turn_and_leaves_nothing_open(tmp_path):
    config = config_of("steps=6", "max_staleness=2", failing_step=2)
    with pytest.raises(RolloutError, match=r"step 2: 4 of 4\b"):
        train(config, out=tmp_path / "run", view="json")
    run = load_run(tmp_path / "run")
    assert [r["step"] for r in run.metrics] == [0, 1]
    assert run.groups(2)[0].trajectories[0].status == "failed", "it is on record"
    assert not OPEN


def test_a_step_whose_episodes_mostly_fail_keeps_the_updates_before_it(tmp_path):
    config = config_of("steps=4", "checkpoint.every=0", failing_step=2)
    with pytest.raises(RolloutError, match=r"step 2: 4 of 4\b"):
        train(config, out=tmp_path / "run", view="json")
    assert list(load_run(tmp_path / "run").checkpoints()) == [2]
    train(replace(config, task=replace(config.task, failing_step=-1)),
          out=tmp_path / "run", resume=True, view="json")  # fmt: skip
    assert [r["step"] for r in load_run(tmp_path / "run").metrics] == [0, 1, 2, 3, 4]


def test_ctrl_c_saves_and_a_resume_samples_again_what_was_not_trained(tmp_path):
    path = tmp_path / "run"
    config = config_of("steps=500", "max_staleness=2")

    def interrupt():
        while len(rows_of(path)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    outcome = train(config, out=path, view="json")
    watcher.join()
    assert outcome.status == "interrupted" and not OPEN
    rows = load_run(path).metrics
    assert list(load_run(path).checkpoints()) == [len(rows)]
    config = replace(config, steps=len(rows) + 3)
    assert train(config, out=path, resume=True, view="json").status == "done"
    run = check_steps(path, config)
    assert run.metrics[: len(rows)] == rows
    first = run.metrics[len(rows)]
    assert first["staleness/max"] == 0, "its batch was sampled anew, with the weights of by then"


def test_a_run_that_is_killed_goes_on_from_its_checkpoint_without_losing_a_task(tmp_path):
    path = tmp_path / "run"
    settings = (*SMALL, "steps=500", "max_staleness=1", "checkpoint.every=1")
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep.cli", "train", "quickstart", *settings, f"out={path}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while len(rows_of(path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    done = json.loads(rows_of(path)[-1])["step"]
    config = replace(
        config_of(*settings[len(SMALL) :], f"steps={done + 3}"), task=DocSearchConfig()
    )
    assert train(config, out=path, resume=True, view="json").status == "done"
    check_steps(path, config)


# -- settings -------------------------------------------------------------------------------------
