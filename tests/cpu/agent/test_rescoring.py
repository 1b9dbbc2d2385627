"""Turns that are scored again while others are sampled: each token n times, in different company,
by the weights that sampled it; and nothing of what is sampled changes."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from playing import all_groups
from quickstarts import quickstart_with
from test_agent_loop import ANSWER, RENDERER, Looks, calls_then_answers

from lockstep.agent.loop import Budget, RolloutOptions, collect, training_sampling
from lockstep.agent.rescoring import RESCORING_PRIORITY, Rescorer
from lockstep.agent.turns import Policy
from lockstep.correction.averaging import average_logprobs
from lockstep.errors import EngineError
from lockstep.objectives.config import GRPO
from lockstep.run.build import build
from lockstep.run.preflight import preflight
from lockstep.testing.engines import FakeEngine
from lockstep.training.averaging import average_rows
from lockstep.training.rows import rows_for_training
from lockstep.types import Group, Task, Trajectory

TASKS = [Task(id=f"t{i}") for i in range(4)]


class NoisyScores(FakeEngine):
    """Says something else each time, and notes who was scored at the same time."""

    def __init__(self, reply=None, *, num_broken=0, **options):
        super().__init__(reply or calls_then_answers(2), **options)
        self.draw = np.random.default_rng(0)
        self.asked: list[tuple] = []
        self.running: set[bytes] = set()
        self.companies: dict[bytes, list[frozenset]] = {}
        self.most_at_once = 0
        self.num_broken = num_broken

    async def score(self, token_ids, **options):
        key = token_ids.tobytes() + options["affinity"].encode()
        assert key not in self.running, "a turn is scored twice at the same time"
        self.asked.append((token_ids.copy(), options))
        self.running.add(key)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            await asyncio.sleep(0)  # whoever goes with this one has arrived
            self.companies.setdefault(key, []).append(frozenset(self.running))
            self.num_broken -= 1
            if self.num_broken >= 0:
                raise ConnectionError("the server went away")
            found = await super().score(token_ids, **options)
            noise = 0.1 * self.draw.standard_normal(len(token_ids))
            return replace(found, logprobs=(found.logprobs + noise - 1).astype(np.float32))
        finally:
            self.running.discard(key)


def play(engine, *, environment=Looks, num_scorings=3, max_in_flight=64, tasks=TASKS):
    """The groups of one batch, its turns scored again."""

    async def main():
        rescorer = Rescorer(
            engine, num_scorings=num_scorings, temperature=0.7, max_in_flight=max_in_flight
        )
        return await all_groups(
            engine, RENDERER, lambda task: environment(), tasks, group_size=2, rescorer=rescorer
        )

    return asyncio.run(main())


def rows_of(groups):
    return rows_for_training(groups, GRPO())


def test_every_sampled_token_is_scored_n_times_and_the_row_has_the_mean_probability():
    groups = play(NoisyScores())
    rows = rows_of(groups)
    metrics = average_rows(rows, groups)
    for trajectory in (t for g in groups for t in g.trajectories):
        assert trajectory.rescorings is not None
        looks = trajectory.rescorings.logprobs
        sampled = [i for i, s in enumerate(trajectory.segments) if s.is_sampled]
        assert sorted(looks) == sampled and all(len(looks[i]) == 3 for i in sampled)
        (row,) = [r for r in rows if r.id.startswith(f"{trajectory.id}/")]
        column, at = row.columns["averaged_logprobs"], 0
        for i, segment in enumerate(trajectory.segments):
            here = column[at : at + len(segment)]
            at += len(segment)
            if segment.is_sampled:
                expected = average_logprobs([torch.from_numpy(x) for x in looks[i]]).logprobs
                np.testing.assert_array_equal(here, expected.numpy())
            else:
                assert np.isnan(here).all()
    assert metrics["noise/rescorings"] == 3 and metrics["noise/fallback_tokens"] == 0
    assert metrics["noise/var_rollout"] == pytest.approx(0.01, rel=0.2)  # 0.1^2, of 3 draws each
    assert metrics["noise/sampling_bias"] == pytest.approx(1.0, abs=0.02)


def test_a_turn_is_asked_for_on_top_of_its_prefix_after_whatever_is_sampled():
    engine = NoisyScores()
    groups = play(engine, num_scorings=1, tasks=TASKS[:1])
    starts = set()
    for trajectory in (t for g in groups for t in g.trajectories):
        at = 0
        for index, segment in enumerate(trajectory.segments):
            if segment.is_sampled:
                starts.add((trajectory.path_ids(index).tobytes(), at, trajectory.id))
            at += len(segment)
    assert {(ids.tobytes(), o["first"], o["affinity"]) for ids, o in engine.asked} == starts
    for _, options in engine.asked:
        assert options["priority"] == RESCORING_PRIORITY
        assert (options["distribution"], options["temperature"]) == ("tempered", 0.7)


def test_no_two_scorings_of_a_turn_have_the_same_company():
    engine = NoisyScores()
    play(engine, num_scorings=8)
    assert len(engine.companies) == 4 * 2 * 3
    for companies in engine.companies.values():
        assert len(companies) == 8
        assert len(set(companies)) >= 6  # drawn: now and then one comes twice
        assert len({len(company) for company in companies}) >= 3, "and not always as many"


def test_no_more_turns_are_scored_at_the_same_time_than_may():
    engine = NoisyScores()
    play(engine, max_in_flight=5)
    assert engine.most_at_once == 5


def test_turns_are_scored_while_others_are_sampled():
    """One episode ends in its first turn, the other goes on: the first one is done by then."""

    def reply(request):
        return ANSWER if request.affinity.endswith("/0") else calls_then_answers(5)(request)

    groups = play(NoisyScores(reply, tokens_per_step=4), tasks=TASKS[:1])
    first, second = (t.rescorings for t in groups[0].trajectories)
    assert first.num_overlapped == first.num_scored == 3
    assert 3 < second.num_overlapped < second.num_scored == 18
    metrics = average_rows(rows_of(groups), groups)
    assert metrics["noise/overlapped_share"] == (3 + second.num_overlapped) / 21


def test_a_failed_episode_is_scored_no_further_and_keeps_nothing():
    class Breaks(Looks):
        async def step(self, message):
            if len(self.steps) == 1:
                raise RuntimeError("the tool broke")
            return await super().step(message)

    engine = NoisyScores()
    groups = play(engine, environment=Breaks, num_scorings=50, tasks=TASKS[:1])
    assert all(t.status == "failed" and t.rescorings is None for t in groups[0].trajectories)
    assert len(engine.asked) < 10
    assert average_rows(rows_of(groups), groups)["noise/rescorings"] == 0


def scored(engine, trajectory, leaf, *, num_scorings=2):
    async def main():
        rescorer = Rescorer(engine, num_scorings=num_scorings, temperature=1.0)
        rescorer.add(trajectory, leaf)
        await rescorer.wait([trajectory])
        await rescorer.close()
        return trajectory.rescorings

    return asyncio.run(main())


def turn_over_an_update(*versions):
    """One turn, and a segment for each version that sampled a part of it."""
    trajectory = Trajectory(id="t")
    leaf = trajectory.observe([1, 2, 3])
    for number, version in enumerate(versions):
        leaf = trajectory.record(
            [10 + number, 20 + number],
            logprobs=[-1.0, -2.0],
            parent=leaf,
            prompt_ids=trajectory.path_ids(leaf),
            policy_version=version,
            finish_reason="weight_update" if number + 1 < len(versions) else "stop",
        )
    trajectory.status, trajectory.rewards[leaf] = "finished", 1.0
    return trajectory, leaf


@pytest.mark.parametrize(("versions", "num_stale"), [((0, 1), 2), ((0,), 2), ((1,), 0)])
def test_scores_of_other_weights_are_not_used_and_the_recorded_log_probs_stand(versions, num_stale):
    trajectory, leaf = turn_over_an_update(*versions)
    engine = NoisyScores(lambda request: [7])
    asyncio.run(engine.load_weights(None, version=1))
    found = scored(engine, trajectory, leaf)
    assert found.num_stale == num_stale
    assert sorted(found.logprobs) == [i + 1 for i, v in enumerate(versions) if v == 1]
    assert len(engine.asked) == (0 if versions == (0,) else 2), "nothing is asked for in vain"
    groups = [Group(task=Task(id=""), trajectories=[trajectory])]
    rows = rows_of(groups)
    metrics = average_rows(rows, groups)
    averaged, recorded = (rows[0].columns[n] for n in ("averaged_logprobs", "rollout_logprobs"))
    is_old = np.isin(rows[0].columns["policy_version"], [0])
    np.testing.assert_array_equal(averaged[is_old], recorded[is_old])
    is_new = rows[0].columns["policy_version"] == 1
    assert (averaged[is_new] != recorded[is_new]).all()
    assert metrics["noise/fallback_tokens"] == is_old.sum()
    assert metrics["noise/stale_rescorings"] == num_stale


def test_weights_that_change_between_asking_and_scoring_discard_the_answer():
    class Updates(NoisyScores):
        async def score(self, token_ids, **options):
            await self.load_weights(None, version=self.version + 1)
            return await super().score(token_ids, **options)

    trajectory, leaf = turn_over_an_update(0)
    found = scored(Updates(lambda request: [7]), trajectory, leaf, num_scorings=3)
    assert (found.num_scored, found.num_stale, found.logprobs) == (0, 3, {})


def test_scorings_that_fail_are_counted_and_the_others_are_averaged():
    groups = play(NoisyScores(num_broken=5))
    metrics = average_rows(rows_of(groups), groups)
    assert metrics["noise/failed_rescorings"] == 5
    assert 2 < metrics["noise/rescorings"] < 3


def test_an_engine_that_scores_nothing_ends_the_run_with_its_reason():
    groups = play(NoisyScores(num_broken=1000))
    with pytest.raises(EngineError, match=r"24.*ConnectionError"):
        average_rows(rows_of(groups), groups)


def test_an_engine_that_scores_too_few_ids_is_not_believed_and_nobody_waits_for_ever():
    class Short(NoisyScores):
        async def score(self, token_ids, **options):
            found = await super().score(token_ids, **options)
            return replace(found, logprobs=found.logprobs[:-1])

    trajectory, leaf = turn_over_an_update(0)
    found = scored(Short(lambda request: [7]), trajectory, leaf)
    assert found.num_failed == 2 and not found.logprobs
    assert "scored 4 ids of the 5" in found.error


async def test_giving_up_leaves_no_scoring_behind():
    class Hangs(NoisyScores):
        async def score(self, token_ids, **options):
            self.asked.append((token_ids, options))
            await asyncio.Event().wait()

    engine = Hangs()
    rescorer = Rescorer(engine, num_scorings=2, temperature=1.0)
    trajectory, leaf = turn_over_an_update(0)
    rescorer.add(trajectory, leaf)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(engine.asked) == 1
    await rescorer.close()
    assert len(asyncio.all_tasks()) == 1


def test_no_episode_is_scored_to_nothing():
    assert average_rows([], [])["noise/rescorings"] == 0


# -- over the embedded engine ----------------------------------------------------------------------


def quickstart(*, num_scorings):
    """The first batch of the quickstart under the contract, as bytes; its rows and metrics."""
    config = quickstart_with("contract=true-on-policy")
    parts = build(config, preflight(config))

    async def sample():
        await parts.publisher.publish(0)
        rescorer = None
        if num_scorings:
            rescorer = Rescorer(parts.engine, num_scorings=num_scorings, temperature=1.0)
        groups = await collect(
            Policy(
                parts.engine,
                parts.renderer,
                training_sampling(config.agent, parts.engine.capabilities),
            ),
            lambda task: config.task.environment(task, config.agent),
            config.task.tasks(split="train", seed=0).take(2),
            group_size=4,
            budget=Budget.of(config.agent, max_tokens=config.max_tokens),
            run_seed=0,
            options=RolloutOptions(rescorer=rescorer),
        )
        await parts.engine.close()
        return groups

    groups = asyncio.run(sample())
    sampled = [
        (s.token_ids.tobytes(), s.logprobs.tobytes())
        for g in groups
        for t in g.trajectories
        for s in t.segments
        if s.logprobs is not None
    ]
    return sampled, groups


@pytest.mark.filterwarnings("ignore:all .* scorings are equal")
def test_under_the_contract_the_same_bits_are_sampled_and_every_scoring_is_what_was_recorded():
    plain, _ = quickstart(num_scorings=0)
    sampled, groups = quickstart(num_scorings=3)
    assert sampled == plain
    metrics = average_rows(rows_of(groups), groups)
    for trajectory in (t for g in groups for t in g.trajectories):
        for index, looks in trajectory.rescorings.logprobs.items():
            assert all((x == trajectory.segments[index].logprobs).all() for x in looks)
    assert metrics["noise/var_rollout"] == metrics["noise/sampling_bias"] == 0
    assert metrics["noise/cache_hit_share"] > 0.95 and metrics["noise/overlapped_share"] > 0.3
