"""A run of Lockstep is read as the rows that were trained, and says what it has and has not."""

import json
from pathlib import Path

import numpy as np
import pytest
from cpu.store.store_samples import failed_trajectory, groups, rows_with_trainer_values

from lockstep.cli import main
from lockstep.doctor.inputs.native import write_rows
from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.inputs.run_dump import RunDump
from lockstep.errors import DataError
from lockstep.store.files import is_locked
from lockstep.store.run import RunDirectory
from lockstep.types import Group, Task

CONFIG = {"model": "tiny-gpt-oss", "agent": {"temperature": 0.7, "top_p": 1.0, "top_k": 0}}


def write_run(path: Path, num_steps: int = 2, **config: object) -> Path:
    with RunDirectory.create(path, CONFIG | config, facts={"family": "moe"}) as run:
        for step in range(num_steps):
            of_step = groups()
            run.write_trajectories(step, of_step, samples=rows_with_trainer_values(of_step))
            run.log({"step": step, "staleness/version": step + 3.0})
    return path


def test_rows_are_those_that_the_run_trained_with_both_sides_log_probs(tmp_path: Path):
    expected = [
        sample
        for group in groups()
        for trajectory in group.trajectories
        for sample in trajectory.rows()
    ]

    dump = open_dump(write_run(tmp_path / "run", num_steps=1))
    (rows,) = dump.chunks()

    assert isinstance(dump, RunDump) and rows.row_ids == tuple(s.id for s in expected)
    assert rows.token_ids.tolist() == np.concatenate([s.token_ids for s in expected]).tolist()
    assert rows.loss_mask.tolist() == np.concatenate([s.loss_mask for s in expected]).tolist()
    np.testing.assert_allclose(np.nanmax(rows.gap), 1e-3, rtol=1e-3)
    assert np.isfinite(rows.gap).sum() == rows.loss_mask.sum()
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert rows.prompt_lengths.tolist() == [3] * len(rows)
    assert rows.trainer_version.tolist() == [3] * len(rows)


def test_what_the_engine_answered_stands_beside_the_rows_reply_by_reply(tmp_path: Path):
    (rows,) = open_dump(write_run(tmp_path / "run", num_steps=1)).chunks()

    for number, tokens in enumerate(rows.slices):
        replies = np.concatenate(rows.engine_ids[number])
        assert len(rows.engine_ids[number]) == 2
        assert replies.tolist() == rows.token_ids[tokens][rows.is_sampled[tokens]].tolist()


def test_routes_that_only_some_rows_have_are_unknown_in_the_others(tmp_path: Path):
    dump = open_dump(write_run(tmp_path / "run"))
    (rows,) = dump.chunks()

    assert "routed_experts" in dump.has and rows.routed_experts.shape[1:] == (2, 2)
    assert not dump.lacks


def test_a_run_is_written_as_rows_and_reads_the_same(tmp_path: Path):
    dump = open_dump(write_run(tmp_path / "run"))
    write_rows(tmp_path / "rows.parquet", dump.chunks(max_tokens=20), dump.facts)

    again = open_dump(tmp_path / "rows.parquet")

    assert again.facts == dump.facts and again.has == dump.has
    (a,), (b,) = dump.chunks(), again.chunks()
    assert a.messages == b.messages and np.array_equal(a.gap, b.gap, equal_nan=True)


def test_facts_are_those_of_the_runs_own_config(tmp_path: Path):
    renderer = {"type": "chatml", "variant": "qwen2.5"}
    facts = open_dump(write_run(tmp_path / "run", renderer=renderer)).facts

    assert (facts.trainer, facts.model, facts.temperature) == ("lockstep", "tiny-gpt-oss", 0.7)
    assert facts.is_moe is True and json.loads(facts.renderer) == renderer


def test_a_part_of_the_trajectories_is_said_to_be_one(tmp_path: Path):
    kept = {"keep": {"type": "sample", "fraction": 0.25}}
    sample = open_dump(write_run(tmp_path / "a", record=kept))
    last = open_dump(write_run(tmp_path / "b", record={"keep": {"type": "last", "steps": 20}}))

    assert "25% of the groups" in sample.notes[0]
    assert "keep=last: the rows are of steps 0 to 1" in last.notes[0]
    assert not open_dump(write_run(tmp_path / "c")).notes


def test_a_run_that_goes_on_is_read_as_far_as_it_was_when_it_was_opened(tmp_path: Path):
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        with pytest.raises(DataError, match=r"reward .*step"):
            open_dump(tmp_path / "run")
        run.write_trajectories(0, groups())
        dump = open_dump(tmp_path / "run")
        num_rows = sum(len(rows) for rows in dump.chunks())
        run.write_trajectories(1, groups())

        assert "still goes on; the rows are of steps 0 to 0" in dump.notes[0]
        assert sum(len(rows) for rows in dump.chunks()) == num_rows
        assert "trainer_version" in dump.lacks
    assert not is_locked(tmp_path / "run" / "lock")
    assert not open_dump(tmp_path / "run").notes


def test_a_run_without_rows_says_why(tmp_path: Path):
    with RunDirectory.create(tmp_path / "a", CONFIG) as run:
        run.write_trajectories(0, [Group(task=Task(id="t"), trajectories=[failed_trajectory()])])
    RunDirectory.create(tmp_path / "b", CONFIG).close()
    with RunDirectory.create(tmp_path / "c", CONFIG) as run:
        run.log({"step": 0})

    for name in "abc":
        with pytest.raises(DataError, match="no stored episode has a reward"):
            open_dump(tmp_path / name)


def test_a_damaged_part_of_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    part = run / "trajectories" / "step-000000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])

    assert main(["doctor", str(run)]) == 2
    assert "step-000000.parquet" in capsys.readouterr().err
    part.write_bytes(whole[:4] + bytes(996) + whole[1000:])
    assert main(["doctor", str(run)]) == 2
    assert "step-000000.parquet: the part is damaged" in " ".join(capsys.readouterr().err.split())


def test_what_lies_beside_a_run_or_in_it_leads_to_the_run(tmp_path: Path):
    run = write_run(tmp_path / "runs" / "mine")

    with pytest.raises(DataError, match=r"holds runs and is none. Give one of them: .*mine"):
        open_dump(tmp_path / "runs")
    for inside in (run / "trajectories", run / "trajectories" / "step-000000.parquet"):
        with pytest.raises(DataError, match="part of a run of Lockstep; give the run's directory"):
            open_dump(inside)
