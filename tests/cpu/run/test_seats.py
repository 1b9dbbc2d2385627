"""Runs of a task with two seats: trained, frozen, resumed, evaluated, looked at by the doctor."""

import json
import shutil
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from command_line import refusal
from quickstarts import quickstart_with
from run_rows import rows_of

from lockstep.agent.config import FrozenSeat
from lockstep.agent.environment import Score
from lockstep.agent.match import Match
from lockstep.agent.task_config import TaskConfig
from lockstep.agent.tasks import GeneratedSource
from lockstep.cli import OK, main
from lockstep.config import resolve
from lockstep.doctor.ladder import climb
from lockstep.envs.mixture import MixtureConfig
from lockstep.errors import ConfigError, DataError
from lockstep.run.served import find_seats, open_seats
from lockstep.run.train import train
from lockstep.store.run import load_run
from lockstep.types import Message, Task

SMALL = (
    "task=duel", "model=tiny-qwen3", "steps=3", "groups_per_step=2", "group_size=3",
    "evaluation.num_tasks=2", "evaluation.at_start=false", "checkpoint.every=1",
    "checkpoint.keep_last=3",
    "agent.max_turns=2", "agent.max_turn_tokens=12", "trainer.warmup_updates=0",
)  # fmt: skip
FROZEN = ("seats.second=frozen", "seats.second.model=tiny-qwen3")
OWN = ("seats.second=own", "lora.rank=4", "trainer.lr=0.01")
SETTINGS = {"self_play": (), "against_frozen": FROZEN, "two_adapters": OWN}


class Duel(Match):
    """Two rounds in which second reads what first said. Who says more different letters wins."""

    async def play(self, ask):
        self.said = {"first": "", "second": ""}
        message = "begin"
        for _ in range(2):
            for seat in self.said:
                message = (await ask(seat, [Message(role="user", content=message)])).content or "-"
                self.said[seat] += message

    async def score(self):
        letters = {seat: len(set(text)) / 16 for seat, text in self.said.items()}
        return {seat: Score(reward=n, parts={"letters": n}) for seat, n in letters.items()}


@dataclass(frozen=True, kw_only=True)
class DuelConfig(TaskConfig):
    TAG: ClassVar[str] = "duel"
    SEATS: ClassVar[tuple[str, ...]] = ("first", "second")

    def tasks(self, *, split, seed):
        return GeneratedSource(lambda seed, n: Task(id=f"duel-{seed}"), seed=seed, split=split)

    def match(self, task, agent):
        return Duel()


def config(*settings):
    return quickstart_with(*SMALL, *settings)


def trained_at(path, *settings):
    return train(config(*settings), out=path, view="json").path


def trained(tmp_path_factory, name):
    return trained_at(tmp_path_factory.mktemp(name) / "run", *SETTINGS[name])


@pytest.fixture(scope="module")
def self_play(tmp_path_factory):
    return trained(tmp_path_factory, "self_play")


@pytest.fixture(scope="module")
def against_frozen(tmp_path_factory):
    return trained(tmp_path_factory, "against_frozen")


@pytest.fixture(scope="module")
def two_adapters(tmp_path_factory):
    return trained(tmp_path_factory, "two_adapters")


def test_self_play_trains_both_seats_with_a_kl_of_zero_in_each(self_play):
    steps = [row for row in rows_of(self_play) if "train/loss" in row]
    assert len(steps) == 3
    for row in steps:
        per_seat = [row[f"mismatch/by_seat/{seat}/compared_tokens"] for seat in DuelConfig.SEATS]
        assert min(per_seat) > 0 and sum(per_seat) == row["mismatch/compared_tokens"]
        for seat in DuelConfig.SEATS:
            assert row[f"mismatch/by_seat/{seat}/unequal_tokens"] == 0
            assert row[f"mismatch/by_seat/{seat}/k3"] == 0.0
            assert row[f"episodes/seat/{seat}"] == 6
            assert row[f"reward/{seat}/mean"] == pytest.approx(row[f"reward/{seat}/letters"])
        assert row["training/rows"] == 12 and "reward/letters" not in row
    groups = load_run(self_play).groups(0)
    assert [{t.seat for t in group.trajectories} for group in groups] == [{"first"}, {"second"}] * 2


async def test_a_frozen_seat_gives_no_rows_and_its_weights_never_change(against_frozen):
    last = load_run(against_frozen).trajectories(2)
    records = {seat: [] for seat in DuelConfig.SEATS}
    for record in last:
        records[record.trajectory.seat].append(record)
    assert all(record.trajectory.policy == "tiny-qwen3" for record in records["second"])
    assert all(any(p is not None for p in r.trainer_logprobs) for r in records["first"])
    assert all(p is None for r in records["second"] for p in r.trainer_logprobs)
    assert [list(r.trajectory.rows()) for r in records["second"]] == [[]] * 6
    for row in rows_of(against_frozen)[:3]:
        assert row["training/rows"] == 6 and row["reward/mean"] == row["reward/first/mean"]
        assert "mismatch/by_seat/second/k3" not in row
    frozen = open_seats(config(*FROZEN), scratch=None)["second"]
    for record in records["second"]:
        trajectory = record.trajectory
        (leaf,) = trajectory.leaves()
        given = trajectory.row(leaf).columns["rollout_logprobs"]
        scores = await frozen.engine.score(trajectory.path_ids(leaf), distribution="tempered")
        assert np.array_equal(scores.logprobs[~np.isnan(given)], given[~np.isnan(given)])
    await frozen.engine.close()


def adapters_of(path, step=3):
    """Seat -> the bytes of its adapter."""
    checkpoint = path / "checkpoints" / f"step-{step:06d}"
    return {
        "first": (checkpoint / "policy" / "adapter_model.safetensors").read_bytes(),
        "second": (checkpoint / "seats/second/policy/adapter_model.safetensors").read_bytes(),
    }


def test_two_adapters_are_trained_each_on_its_seat_with_a_kl_of_zero(two_adapters):
    steps = [row for row in rows_of(two_adapters) if "train/loss" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["mismatch/k3"] == row["policy/second/mismatch/k3"] == 0.0
        both = row["mismatch/compared_tokens"] + row["policy/second/mismatch/compared_tokens"]
        assert row["tokens/trained"] == row["mismatch/compared_tokens"] < both
        assert row["training/rows"] == 12 and row["reward/mean"] == row["reward/first/mean"]
        assert row["mismatch/by_seat/second/k3"] == 0.0
        assert row["train/grad_norm"] != row["policy/second/train/grad_norm"] > 0
        silent = [
            g.trajectories[0].seat
            for g in load_run(two_adapters).groups(int(row["step"]))
            if len({t.reward for t in g.trajectories}) == 1
        ]
        for seat in DuelConfig.SEATS:
            assert row[f"episodes/without_signal/{seat}"] == silent.count(seat)
    first, last = adapters_of(two_adapters, 1), adapters_of(two_adapters)
    assert len({*first.values(), *last.values()}) == 4
    for record in load_run(two_adapters).trajectories(2):
        assert record.trajectory.policy == ("second" if record.trajectory.seat == "second" else "")
        assert any(p is not None for p in record.trainer_logprobs)


async def test_what_two_adapters_sample_is_what_their_checkpoints_give(two_adapters):
    """Each seat's log-probs of step 2, by a model that is loaded with the adapter of step 2."""
    run, loaded = load_run(two_adapters), {}
    checkpoint = two_adapters / "checkpoints" / "step-000002"
    for seat, part in {"first": "policy", "second": "seats/second/policy"}.items():
        frozen = ("seats.second=frozen", f"seats.second.model={checkpoint / part}")
        loaded[seat] = open_seats(config(*frozen), scratch=None)["second"].engine
    for record in run.trajectories(2):
        (leaf,) = record.trajectory.leaves()
        given = record.trajectory.row(leaf).columns["rollout_logprobs"]
        drawn = ~np.isnan(given)
        gaps = {}
        for seat, engine in loaded.items():
            ids = record.trajectory.path_ids(leaf)
            scores = await engine.score(ids, distribution="tempered")
            gaps[seat] = float(np.abs(scores.logprobs[drawn] - given[drawn]).max())
        seat = record.trajectory.seat
        assert gaps.pop(seat) == 0.0 and min(gaps.values()) > 0
    for engine in loaded.values():
        await engine.close()


def test_a_run_begins_with_both_adapters_of_another_or_says_what_it_lacks(
    two_adapters, tmp_path, capsys
):
    train(config(*OWN, "steps=4"), out=tmp_path / "both", start=(two_adapters, 3), view="json")
    found = adapters_of(tmp_path / "both", 4)
    assert not {*found.values()} & {*adapters_of(two_adapters).values()}
    words = ["eval", str(tmp_path / "both"), "--json"]
    assert main(words) == OK
    assert "eval/sampled/second/mean@1" in json.loads(capsys.readouterr().out)["metrics"]
    against = ["seats.first=frozen", "seats.first.model=tiny-qwen3"]
    assert main([*words, *against]) == OK
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert "eval/sampled/second/mean@1" in found and "eval/sampled/mean@1" not in found

    one = trained_at(tmp_path / "one", "lora.rank=4", "steps=1")
    train(config(*OWN, "steps=2"), out=tmp_path / "lacks", start=(one, 1))
    said = " ".join("".join(capsys.readouterr()).split())
    assert "has no policy of seats.second: this run's begins anew" in said


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_that_was_cut_short_resumes_to_the_same_bits(kind, request, tmp_path):
    whole, cut = request.getfixturevalue(kind), tmp_path / "run"
    shutil.copytree(whole, cut)
    for step in (2, 3):
        shutil.rmtree(cut / "checkpoints" / f"step-{step:06d}")
    train(config(*SETTINGS[kind]), out=cut, resume=True, view="json")
    assert rows_of(cut) == rows_of(whole)
    left, right = (
        sorted((path / "checkpoints" / "step-000003" / "policy").glob("*.safetensors"))
        for path in (whole, cut)
    )
    assert [file.read_bytes() for file in left] == [file.read_bytes() for file in right]
    if kind == "two_adapters":
        assert adapters_of(cut) == adapters_of(whole)


def test_eval_plays_held_out_matches_against_any_opponent(self_play, capsys):
    old = [f"seats.second.model={self_play}@1", "seats.second=frozen"]
    words = ["eval", str(self_play), *reversed(old), "--json"]
    assert main(words) == OK
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found["eval/sampled/mean@1"] == found["eval/sampled/first/mean@1"]
    assert "eval/sampled/second/mean@1" in found and found["eval/sampled/failed"] == 0.0


def test_doctor_replay_and_report_read_a_run_with_seats(against_frozen, capsys):
    assert main(["doctor", str(against_frozen), "--model", "own"]) == OK
    ids = [summary.id for summary in load_run(against_frozen).summaries()]
    frozen = next(id for id in ids if id.endswith("/second"))
    assert main(["replay", f"{against_frozen}#{frozen}"]) == OK
    assert "second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seats.third=policy"], "seats.third.*task=duel"),
        (["seats.second=frozen"], "seats.second"),
        ([*OWN, "advantage=gae"], "seats.second=own"),
        ([*OWN, "distill.teacher.model=tiny-qwen3"], "and the run has distill: leave it out"),
        (["task=docsearch", "seats.second=policy"], "task=docsearch"),
    ],
)
def test_seats_that_cannot_be_played_are_refused_with_the_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(*settings)


def test_a_frozen_policy_that_is_not_there_is_named_before_a_model_is_loaded(
    self_play, tmp_path, capsys
):
    def refused(model, *settings):
        words = ["train", "quickstart", *SMALL, f"out={tmp_path / 'run'}", "seats.second=frozen"]
        return refusal(*words, f"seats.second.model={model}", *settings, capsys=capsys)

    found = refused(self_play)
    assert f"seats.second.model={self_play} is a run, and an opponent is one of its" in found
    assert "It has 1, 2, 3." in found
    assert "seats.second.model=no-such-model: " in refused("no-such-model")
    assert f"{self_play}@9: " in refused(f"{self_play}@9")
    assert not (tmp_path / "run").exists()
    seat = FrozenSeat(model="tiny-math")
    with pytest.raises(ConfigError, match="on a GPU the plan of the memory has no room"):
        find_seats(
            resolve(
                config(), ["device=cuda", "seats.second=frozen", f"seats.second.model={seat.model}"]
            )
        )


@pytest.mark.parametrize(
    "seats",
    [[*OWN, "seats.first=own"], [*FROZEN, "seats.first=frozen", "seats.first.model=tiny-math"]],
)
def test_a_run_needs_a_seat_for_its_policy(seats, tmp_path, capsys):
    words = ["train", "quickstart", *SMALL, *seats, f"out={tmp_path / 'run'}"]
    said = refusal(*words, capsys=capsys)
    assert "no seat is left for the policy of the run (first, second)" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seats.second=own"], "lora.rank=16"),
        ([*OWN, "max_staleness=1"], "engine.replicas, engine.dtype.*max_staleness"),
        ([*OWN, "engine.dtype=bfloat16"], "engine=embedded"),
        ([*OWN, "parallel.processes=2"], "they train in one process. Leave parallel"),
    ],
)
def test_a_second_adapter_needs_one_model_in_one_process(settings, message):
    with pytest.raises(ConfigError, match=f"seats.second=own.*{message}"):
        find_seats(config(*settings))


def test_a_match_that_asks_nobody_or_cannot_begin_is_found_before_the_run(tmp_path, monkeypatch):
    class Silent(Duel):
        async def play(self, ask):
            return

    monkeypatch.setattr(DuelConfig, "match", lambda *_: Silent())
    with pytest.raises(DataError, match="ended before it asked a seat"):
        train(config(), out=tmp_path / "run", view="json")


def test_what_plays_one_dialogue_refuses_seats_by_name():
    with pytest.raises(ConfigError, match="task=duel"):
        climb(config())
    with pytest.raises(ConfigError, match="'a'"):
        MixtureConfig(parts={"a": DuelConfig()})
