"""Matches: every seat has its own path, budget and reward, and no seat reads another's tokens."""

import asyncio

import numpy as np
import pytest

from lockstep.agent.environment import Score
from lockstep.agent.match import Match, OutOfBudget
from lockstep.agent.match_loop import collect_matches
from lockstep.agent.turns import Budget, Policy
from lockstep.errors import EngineError
from lockstep.objectives.config import GRPO
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.training.rows import rows_for_training
from lockstep.types import Message, SamplingParams, Task

PLAIN = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
RENDERER = HarmonyRenderer(byte_tokenizer(), PLAIN)


def says(text):
    return RENDERER.render_reply(Message(role="assistant", content=text))


def user(text):
    return Message(role="user", content=text)


def seat(reply=lambda request: says("a"), name=""):
    return Policy(
        engine=FakeEngine(reply),
        renderer=RENDERER,
        sampling=SamplingParams(max_tokens=64),
        name=name,
    )


class Relay(Match):
    """Two rounds: second reads what first said. first wins in the match of an even number."""

    num_matches = 0

    def __init__(self):
        self.number, Relay.num_matches = Relay.num_matches, Relay.num_matches + 1
        self.is_closed = False

    async def play(self, ask):
        said = user("begin")
        for _ in range(2):
            said = await ask("first", [user(f"heard {said.content}")])
            said = await ask("second", [user(f"heard {said.content}")])

    async def score(self):
        won = float(self.number % 2 == 0)
        return {"first": Score(reward=won), "second": Score(reward=1 - won, parts={"lost": won})}

    async def close(self):
        self.is_closed = True


def play(make_match, seats=None, *, num_tasks=1, group_size=1, **budget):
    """The groups of some tasks, seats mixed."""
    seats = seats or {"first": seat(), "second": seat(lambda request: says("b"))}
    Relay.num_matches = 0
    return asyncio.run(
        collect_matches(
            seats,
            lambda task: make_match(),
            [Task(id=f"t{n}") for n in range(num_tasks)],
            group_size=group_size,
            budget=Budget(**{"max_tokens": 4096} | budget),
            run_seed=0,
        )
    )


def contents(trajectory):
    (leaf,) = trajectory.leaves()
    return [message.content for message in trajectory.messages(leaf)]


def test_each_seat_has_its_own_path_of_exactly_what_its_engine_was_sent_and_its_own_reward():
    seats = {"first": seat(), "second": seat(lambda request: says("b"))}
    (group,) = play(Relay, seats)
    first, second = group.trajectories
    assert [first.id, second.id] == ["train/0/t0/0/first", "train/0/t0/0/second"]
    assert contents(first) == ["heard begin", "a", "heard b", "a"]
    assert contents(second) == ["heard a", "b", "heard a", "b"]
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert second.reward_parts == {"lost": 1.0} and first.reward_parts == {}
    for trajectory, name in ((first, "first"), (second, "second")):
        assert trajectory.status == "finished" and trajectory.seat == name
        requests = seats[name].engine.requests
        prompts = [request.prompt_ids for request in requests]
        turns = [i for i, each in enumerate(trajectory.segments) if each.is_sampled]
        before = [trajectory.path_ids(trajectory.segments[i].parent) for i in turns]
        assert all(map(np.array_equal, prompts, before)) and len(turns) == 2


def test_a_seat_is_compared_with_its_like_and_never_with_its_opponent():
    (group,) = play(Relay, group_size=4)
    first, second = group.by_seat()
    assert {t.seat for t in first.trajectories} == {"first"}
    assert first.rewards == [1.0, 0.0, 1.0, 0.0] and second.rewards == [0.0, 1.0, 0.0, 1.0]
    rows = rows_for_training([first, second], GRPO(normalize_std=False))
    means = {row.id.split("/")[-2]: 0.0 for row in rows}
    for row in rows:
        means[row.id.split("/")[-2]] += float(row.columns["advantages"].sum())
    assert means == {"first": 0.0, "second": 0.0}
    assert {row.group for row in rows if "/first/" in row.id} == {0}


class Answers(Match):
    """A question, and three answers at the same time, of which the second is right."""

    async def play(self, ask):
        question = await ask("first", [user("ask")])
        self.answers = await asyncio.gather(
            *(ask("second", [question], player=n) for n in (0, 1, 2))
        )

    async def score(self):
        return {"first": Score(reward=2.0), "second": [Score(reward=r) for r in (0.0, 1.0, 0.0)]}


def test_the_players_of_one_seat_in_one_match_are_a_group_of_their_own():
    (group,) = play(Answers, group_size=2)
    proposers, *solvers = group.by_seat()
    assert proposers.rewards == [2.0, 2.0] and not proposers.has_signal
    assert [part.rewards for part in solvers] == [[0.0, 1.0, 0.0]] * 2 and group.has_signal
    assert [t.id for t in solvers[1].trajectories] == [
        "train/0/t0/1/second", "train/0/t0/1/second-1", "train/0/t0/1/second-2",
    ]  # fmt: skip


def test_a_frozen_seat_is_played_and_scored_and_has_no_rows():
    (group,) = play(Relay, {"first": seat(), "second": seat(name="old")}, group_size=2)
    frozen = [t for t in group.trajectories if t.seat == "second"]
    assert [t.policy for t in frozen] == ["old", "old"] and [t.reward for t in frozen] == [0.0, 1.0]
    assert [row for t in frozen for row in t.rows()] == []
    rows = rows_for_training(group.by_seat(), GRPO(normalize_std=False))
    assert {row.id.split("/")[-2] for row in rows} == {"first"}
    only_frozen_differ = play(Relay, {"first": seat(name="x"), "second": seat(name="y")})
    assert not only_frozen_differ[0].has_signal


def test_a_seat_out_of_budget_ends_the_match_which_is_scored_as_it_stands():
    (group,) = play(Relay, max_turns=1)
    first, second = group.trajectories
    assert (first.status, second.status) == ("truncated", "finished")
    assert first.error == "max_turns: 1 turns are over"
    assert (first.reward, second.reward) == (1.0, 0.0)


def test_a_match_may_go_on_without_a_seat_that_is_out_of_budget():
    class GoesOn(Relay):
        async def play(self, ask):
            await ask("first", [user("1")])
            with pytest.raises(OutOfBudget, match="first"):
                await ask("first", [user("2")])
            await ask("second", [user("3")])

    (group,) = play(GoesOn, max_turns=1)
    assert [contents(t) for t in group.trajectories] == [["1", "a"], ["3", "b"]]
    assert [t.status for t in group.trajectories] == ["truncated", "finished"]


class Breaks(Relay):
    async def play(self, ask):
        await super().play(ask)
        raise KeyError("board")


class Unscored(Relay):
    async def score(self):
        return {"first": Score(reward=1.0)}


class AsksAStranger(Relay):
    async def play(self, ask):
        await ask("first", [user("1")])
        await ask("third", [user("2")])


class AsksTwice(Relay):
    async def play(self, ask):
        await asyncio.gather(ask("first", [user("1")]), ask("first", [user("2")]))


class AsksNobody(Relay):
    async def play(self, ask):
        return


class CannotBeMade(Relay):
    def __init__(self):
        raise OSError("no board")


@pytest.mark.parametrize(
    ("kind", "reason", "num_failed"),
    [
        (Breaks, "match.play: KeyError: 'board'", 2),
        (Unscored, "expected a Score for second, or one for each of its 1 players", 1),
        (AsksAStranger, "no seat 'third'; the seats are first, second", 1),
        (AsksTwice, "first was asked again before it had replied", 1),
        (AsksNobody, "match.play: it ended before a seat was asked", 2),
        (CannotBeMade, "the match could not be made: OSError: no board", 2),
    ],
)
def test_a_match_that_breaks_fails_with_its_reason_and_nothing_of_it_is_trained(
    kind, reason, num_failed
):
    (group,) = play(kind)
    failed = [t for t in group.trajectories if t.status == "failed"]
    assert len(failed) == num_failed and all(reason in t.error for t in failed)
    assert [row for t in failed for row in t.rows()] == []


def test_an_engine_that_fails_one_seat_fails_the_match():
    def broken(request):
        raise EngineError("gone")

    matches = []

    def make():
        matches.append(Relay())
        return matches[-1]

    (group,) = play(make, {"first": seat(), "second": seat(broken)})
    first, second = group.trajectories
    assert "gone" in second.error and "the episode of second failed" in first.error
    assert {t.status for t in group.trajectories} == {"failed"} and matches[0].is_closed


def test_a_match_draws_alike_alone_and_in_company():
    seats = {"first": seat(), "second": seat()}
    play(Relay, seats, num_tasks=3, group_size=2)
    in_company = {r.id: r.seed for each in seats.values() for r in each.engine.requests}
    alone = {"first": seat(), "second": seat()}
    play(Relay, alone)
    seeds = {r.id: r.seed for each in alone.values() for r in each.engine.requests}
    assert len(seeds) == 4 == len(set(seeds.values()))
    assert seeds.items() <= in_company.items()
