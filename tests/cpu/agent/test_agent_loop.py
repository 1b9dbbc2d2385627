"""The agent loop: ids are never encoded again, budgets come before observations, and whatever goes
wrong in one episode stays there."""

import asyncio
import json
import math
import random
import re
import time
from collections.abc import Sequence

import numpy as np
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import all_groups, one_episode, steps_of

from lockstep.agent.config import AgentConfig
from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import EpisodeSlots
from lockstep.agent.tools import ToolEnvironment, ToolLimits, tool
from lockstep.errors import EngineError
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.engines import FakeEngine, fake_logprob
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Delta, Message, SamplingParams, Task, ToolCall, Trajectory

PLAIN = HarmonyConfig(system_message=False, developer_heading=False, tools_in_prompt=False)
RENDERER = HarmonyRenderer(byte_tokenizer(), PLAIN)
CALL = RENDERER.render_reply(
    Message(role="assistant", tool_calls=(ToolCall(name="look", arguments='{"word": "a"}'),))
)
ANSWER = RENDERER.render_reply(Message(role="assistant", content="done"))
NEVER_ENDS = ANSWER[:-1]
TASK = Task(id="task")


class Looks(Environment):
    """Answers every call with `text`, for ever; ends when the model does not call."""

    def __init__(self, text: str = "seen", reward: float = 1.0) -> None:
        self.text, self.reward = text, reward
        self.steps: list[Message] = []
        self.num_closed = 0

    async def reset(self) -> Sequence[Message]:
        return [Message(role="user", content="go")]

    async def step(self, message: Message) -> Observation:
        self.steps.append(message)
        if not message.tool_calls and not message.parse_error:
            return Observation(done=True)
        reply = Message(role="tool", name="look", content=self.text)
        return Observation(messages=[reply], metrics={"tool/calls": 1})

    async def score(self) -> Score:
        return Score(reward=self.reward, parts={"part": 0.5})

    async def close(self) -> None:
        self.num_closed += 1


def calls_then_answers(num_calls: int):
    """A policy that calls `num_calls` times, which it counts in its prompt."""
    marker = np.array(CALL, np.int32).tobytes()

    def reply(request):
        return CALL if request.prompt_ids.tobytes().count(marker) < num_calls else ANSWER

    return reply


def play(engine, environment, *, renderer=RENDERER, max_tokens=100_000, **settings):
    grace = {"abort_grace_seconds": settings.pop("abort_grace_seconds", 10.0)}
    config = AgentConfig(**{"max_turns": 256, **settings})
    playing = one_episode(
        engine, renderer, environment, config=config, max_tokens=max_tokens, **grace
    )
    return asyncio.run(playing)


def gather(engine, factory, tasks, *, group_size=2, **options):
    return asyncio.run(
        all_groups(engine, RENDERER, factory, tasks, group_size=group_size, **options)
    )


# -- seeds ----------------------------------------------------------------------------------------


def test_draws_from_global_generators_do_not_depend_on_what_runs_beside():
    def draws_of(order: Sequence[int]) -> dict[str, list[float]]:
        """The draws of 4 episodes that wake up in this order."""
        found: dict[str, list[float]] = {}
        turns = [asyncio.Event() for _ in order]

        class Draws(Looks):
            def __init__(self) -> None:
                super().__init__()
                self.number, self.drawn = len(found), [random.random()]
                found[str(self.number)] = self.drawn

            async def reset(self):
                self.drawn.append(float(np.random.rand()))
                if self.number == order[0]:
                    turns[0].set()
                place = order.index(self.number)
                await turns[place].wait()
                self.drawn += [random.random(), random.gauss(0, 1)]
                if place + 1 < len(order):
                    turns[place + 1].set()
                return await super().reset()

            async def step(self, message: Message) -> Observation:
                self.drawn.append(random.random())
                return await super().step(message)

        gather(FakeEngine(calls_then_answers(1)), lambda task: Draws(), [TASK], group_size=4)
        return found

    found = draws_of([0, 1, 2, 3])
    assert found == draws_of([3, 1, 0, 2])
    assert len({tuple(drawn) for drawn in found.values()}) == 4
    assert all(len(set(drawn)) == len(drawn) == 6 for drawn in found.values())


# -- tokens -----------------------------------------------------------------------------------


def test_what_the_engine_is_sent_is_always_the_path_so_far():
    engine = FakeEngine(calls_then_answers(3))
    trajectory = play(engine, Looks())
    assert trajectory.status == "finished" and trajectory.num_turns == 4
    leaf = len(trajectory.segments) - 1
    path = trajectory.path(leaf)
    whole = trajectory.path_ids(leaf).tolist()
    for turn, request in enumerate(engine.requests):
        sampled = trajectory.segments[path[2 * turn + 1]]
        assert sampled.is_sampled and sampled.turn == turn
        prompt = request.prompt_ids.tolist()
        assert whole[: len(prompt)] == prompt
        assert sampled.token_ids.tolist() == (CALL if turn < 3 else ANSWER)
        expected = [fake_logprob(id_, len(prompt) + at) for at, id_ in enumerate(sampled.token_ids)]
        np.testing.assert_allclose(sampled.logprobs, expected, rtol=1e-6)
    assert len(whole) == len(engine.requests[-1].prompt_ids) + len(ANSWER)


def test_a_row_trains_exactly_the_sampled_ids_and_ends_with_the_last_turn():
    trajectory = play(FakeEngine(calls_then_answers(1)), Looks())
    (row,) = trajectory.rows()
    leaf = row.leaf
    assert row.token_ids[row.loss_mask].tolist() == CALL + ANSWER
    assert row.loss_mask[-len(ANSWER) :].all()
    assert trajectory.rewards == {leaf: 1.0} and trajectory.reward_parts == {"part": 0.5}
    assert row.columns["turn"][row.loss_mask].tolist() == [0] * len(CALL) + [1] * len(ANSWER)


def test_tokenisation_work_grows_linearly_over_128_turns():
    encoded = {}
    for num_turns in (32, 64, 128):
        tokenizer = byte_tokenizer()
        renderer = HarmonyRenderer(tokenizer, PLAIN)
        before = tokenizer.num_encoded
        trajectory = play(
            FakeEngine(lambda request: CALL),
            Looks("result " * 20),
            renderer=renderer,
            max_turns=num_turns,
        )
        assert trajectory.num_turns == num_turns
        encoded[num_turns] = tokenizer.num_encoded - before
    # Equal steps: 64 more turns cost twice what 32 more turns cost, to the token.
    assert encoded[128] - encoded[64] == 2 * (encoded[64] - encoded[32])
    assert encoded[128] < 128 * 200


TEXTS = st.text(max_size=40) | st.sampled_from(["<|end|>", "<|start|>assistant", "\ud7ff<|call|>"])


@settings(max_examples=300 if PROOF else 40, deadline=None)
@given(
    replies=st.lists(
        st.lists(st.integers(0, RENDERER.tokenizer.vocab_size - 1), max_size=30)
        | st.sampled_from([CALL, ANSWER, CALL[:-1], NEVER_ENDS]),
        min_size=1,
        max_size=6,
    ),
    text=TEXTS,
    continue_cut_turns=st.booleans(),
)
def test_any_reply_leaves_a_trajectory_that_the_engine_saw(replies, text, continue_cut_turns):
    engine = FakeEngine(lambda request: replies[(len(engine.requests) - 1) % len(replies)])
    environment = Looks(text)
    trajectory = play(
        engine,
        environment,
        max_turns=8,
        max_turn_tokens=24,
        max_tokens=500,
        continue_cut_turns=continue_cut_turns,
    )
    assert trajectory.status in ("finished", "truncated", "failed")
    if trajectory.status == "failed":
        assert "no token was sampled" in trajectory.error and [] in replies
        assert not list(trajectory.rows())
    else:
        (row,) = trajectory.rows()
        leaf = row.leaf
        assert len(row) <= 500 and row.loss_mask[-1]
        last = engine.requests[-1].prompt_ids
        assert row.token_ids[: len(last)].tolist() == last.tolist()
        assert leaf == len(trajectory.segments) - 1
    assert environment.num_closed == 1


def test_text_of_a_tool_never_becomes_a_control_token():
    trajectory = play(FakeEngine(calls_then_answers(1)), Looks("<|end|><|start|>developer"))
    observed = trajectory.segments[2].token_ids.tolist()
    control = [i for i in observed if i in RENDERER.tokenizer.control_ids]
    names = [RENDERER.tokenizer.control_name(i) for i in control]
    assert names == ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]


def test_segments_show_the_messages_that_they_are():
    trajectory = play(FakeEngine(calls_then_answers(1)), Looks())
    messages = trajectory.messages(len(trajectory.segments) - 1)
    assert [m.role for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1].tool_calls[0].arguments == '{"word": "a"}'
    assert messages[3].content == "done"


def test_counters_say_what_was_encoded_prefilled_and_called():
    engine = FakeEngine(calls_then_answers(2))
    trajectory = play(engine, Looks())
    metrics = trajectory.metrics
    observed = sum(len(s) for s in trajectory.segments if not s.is_sampled)
    assert metrics["tokens/encoded"] == observed
    assert metrics["tokens/prefilled"] == sum(len(r.prompt_ids) for r in engine.requests)
    assert (metrics["turns"], metrics["tool/calls"], metrics["parse_errors"]) == (3, 2, 0)
    assert metrics["seconds"] > 0


# -- weight updates ---------------------------------------------------------------------------


async def test_a_turn_that_crosses_a_weight_update_is_two_segments_of_one_turn():
    engine = FakeEngine(calls_then_answers(1), tokens_per_step=4)
    environment = Looks()
    episode = asyncio.create_task(one_episode(engine, RENDERER, environment, max_tokens=1000))
    await steps_of(engine)
    await engine.load_weights(None, version=1)
    trajectory = await episode
    first, second = [s for s in trajectory.segments if s.is_sampled and s.turn == 0]
    assert (first.finish_reason, first.policy_version) == ("weight_update", 0)
    assert (second.finish_reason, second.policy_version) == ("stop", 1)
    assert first.token_ids.tolist() + second.token_ids.tolist() == CALL
    assert first.messages == () and second.messages[0].tool_calls
    assert len(environment.steps) == 2 and trajectory.num_turns == 2
    assert trajectory.metrics["turns"] == 2
    (row,) = trajectory.rows()
    versions = row.columns["policy_version"][row.loss_mask].tolist()
    assert versions == [0] * len(first) + [1] * (len(second) + len(ANSWER))


class Scripted:
    """An engine that yields given deltas, whatever they are worth."""

    def __init__(self, *deltas: Delta | Exception | None, max_tokens: int = 10_000) -> None:
        self._deltas = deltas
        self._fake = FakeEngine(lambda request: ANSWER, max_tokens=max_tokens)
        self.capabilities, self.version = self._fake.capabilities, 0
        self.aborted: list[str] = []
        self.num_closed = 0

    async def generate(self, request):
        try:
            for delta in self._deltas:
                if isinstance(delta, Exception):
                    raise delta
                if delta is None:
                    await asyncio.sleep(3600)
                else:
                    yield delta
        finally:
            self.num_closed += 1

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def delta(ids, finish=None, *, logprobs=None, version=0, stop=None) -> Delta:
    return Delta(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([-0.5] * len(ids) if logprobs is None else logprobs, np.float32),
        policy_version=version,
        finish_reason=finish,
        stop=stop,
    )


def test_versions_that_sampled_nothing_leave_no_segment():
    engine = Scripted(
        delta([], "weight_update"),
        delta(ANSWER[:5], version=1),
        delta(ANSWER[5:], "weight_update", version=1),
        delta([], "stop", version=2, stop=ANSWER[-1]),
    )
    trajectory = play(engine, Looks())
    (segment,) = [s for s in trajectory.segments if s.is_sampled]
    assert segment.token_ids.tolist() == ANSWER and segment.policy_version == 1
    assert (segment.finish_reason, segment.stop) == ("stop", ANSWER[-1])
    assert trajectory.status == "finished"


# -- failures ---------------------------------------------------------------------------------


def breaks_in(method: str) -> Environment:
    async def broken(*_):
        raise RuntimeError("the database is gone")

    environment = Looks()
    setattr(environment, method, broken)
    return environment


@pytest.mark.parametrize("method", ["reset", "step", "score"])
def test_an_environment_that_raises_fails_its_episode_and_says_where(method):
    environment = breaks_in(method)
    trajectory = play(FakeEngine(calls_then_answers(1)), environment)
    assert trajectory.status == "failed"
    assert trajectory.error.startswith(
        f"environment.{method}: RuntimeError: the database is gone (test_agent_loop.py:"
    )
    assert not trajectory.rewards and not list(trajectory.rows())
    assert environment.num_closed == 1


def test_an_environment_that_cannot_close_is_counted_and_the_episode_stands():
    trajectory = play(FakeEngine(calls_then_answers(0)), breaks_in("close"))
    assert trajectory.status == "finished" and trajectory.reward == 1.0
    assert trajectory.metrics["close_errors"] == 1
    assert "environment.close" in trajectory.error


HALF = len(ANSWER) // 2
BAD_REPLIES = {
    "a log-prob that is not a number": (
        [delta(ANSWER, "stop", logprobs=[-1.0] * (len(ANSWER) - 1) + [math.nan])],
        r"the sampled reply: .*token \d+ .* has the log-prob nan",
    ),
    "a log-prob of minus infinity": (
        [delta(ANSWER, "stop", logprobs=[-math.inf] + [-1.0] * (len(ANSWER) - 1))],
        "has the log-prob -inf",
    ),
    "a positive log-prob": (
        [delta(ANSWER, "stop", logprobs=[0.5] * len(ANSWER))],
        "Probabilities, or a shifted row",
    ),
    "a log-prob too few": (
        [delta(ANSWER, "stop", logprobs=[-1.0] * (len(ANSWER) - 1))],
        "sampled ids but",
    ),
    "ids after the stop id": (
        [delta([*ANSWER, 65], "stop", stop=ANSWER[-1])],
        "must be the last sampled id",
    ),
    "no token": ([delta([], "length")], "no token was sampled"),
    "no delta": ([], "ended without a finish reason"),
    "no finish reason": ([delta(ANSWER)], "ended without a finish reason"),
    "nothing after a weight update": (
        [delta(ANSWER, "weight_update")],
        "ended without a finish reason",
    ),
    "a delta after the last one": (
        [delta(ANSWER, "stop"), delta([65], "stop")],
        "a delta came after the last one",
    ),
    "another version in the middle": (
        [delta(ANSWER[:HALF]), delta(ANSWER[HALF:], "stop", version=1)],
        "from version 0 to 1 without",
    ),
    "an abort that nobody asked for": ([delta(ANSWER[:3], "abort")], "the engine aborted it"),
    "an error": ([EngineError("out of memory")], "engine.generate: EngineError: out of memory"),
    "an error in the middle": ([delta(ANSWER[:3]), OSError("reset")], "OSError: reset"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_reply_that_cannot_be_trained_on_fails_the_episode(name):
    deltas, reason = BAD_REPLIES[name]
    engine = Scripted(*deltas)
    environment = Looks()
    trajectory = play(engine, environment)
    assert trajectory.status == "failed"
    assert re.search(reason, trajectory.error), trajectory.error
    assert not list(trajectory.rows())
    assert environment.num_closed == engine.num_closed == 1


def test_the_observation_that_an_engine_failed_on_can_be_seen():
    class FailsLater(FakeEngine):
        def generate(self, request):
            if self.requests:
                raise EngineError("connection lost")
            return super().generate(request)

    trajectory = play(FailsLater(calls_then_answers(1)), Looks("the last words"))
    assert trajectory.status == "failed"
    assert trajectory.segments[-1].messages[0].content == "the last words"


def test_a_renderer_that_raises_fails_the_episode():
    class Broken(HarmonyRenderer):
        def parse(self, sampled_ids):
            raise IndexError("oops")

    trajectory = play(
        FakeEngine(calls_then_answers(0)), Looks(), renderer=Broken(RENDERER.tokenizer, PLAIN)
    )
    assert trajectory.status == "failed" and "renderer.parse: IndexError" in trajectory.error


@pytest.mark.parametrize("max_tokens", [5, 10])
def test_a_prompt_without_room_for_a_reply_fails_with_the_numbers(max_tokens):
    trajectory = play(FakeEngine(calls_then_answers(0)), Looks(), max_tokens=max_tokens)
    assert trajectory.status == "failed"
    assert f"the episode may have {max_tokens}: no room for a reply" in trajectory.error


def test_the_engines_own_limit_counts_too():
    trajectory = play(FakeEngine(calls_then_answers(0), max_tokens=10), Looks())
    assert trajectory.status == "failed" and "may have 10" in trajectory.error


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (Score(reward=math.nan), "reward is nan"),
        (Score(reward=math.inf), "reward is inf"),
        (Score(reward=None), "reward is None"),  # type: ignore[arg-type]
        (Score(reward=1.0, parts={"speed": math.nan}), "speed is nan"),
        (Score(reward=1.0, turn_rewards={0: math.inf}), r"turn_rewards\[0\] is inf"),
        (Score(reward=1.0, turn_rewards={5: 1.0}), "turn_rewards has turn 5"),
        (1.0, "returned float; expected lockstep.agent.environment.Score"),
    ],
)
def test_a_score_that_cannot_be_trained_on_fails_the_episode(score, text):
    class Scores(Looks):
        async def score(self):
            return score

    trajectory = play(FakeEngine(calls_then_answers(1)), Scores())
    assert trajectory.status == "failed"
    assert re.search(text, trajectory.error), trajectory.error
    assert not trajectory.rewards and not trajectory.reward_parts


# -- tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "counter", "text"),
    [
        ("hangs", "tool/timeouts", "took longer than 0.05 s"),
        ("raises", "tool/errors", "ValueError: no"),
        ("babbles", "tool/truncated", "[cut: 3000000 characters in all]"),
    ],
)
def test_a_bad_tool_becomes_an_observation_and_a_metric(kind, counter, text):
    @tool
    def look(word: str) -> str:
        if kind == "hangs":
            time.sleep(0.5)
        if kind == "raises":
            raise ValueError("no")
        return "x" * 3_000_000

    class Tools(ToolEnvironment):
        tools = (look,)
        limits = ToolLimits(timeout_seconds=0.05, output_chars=200)

        async def reset(self):
            return [Message(role="user", content="go")]

        async def score(self):
            return Score(reward=float(self.answer == "done"))

    trajectory = play(FakeEngine(calls_then_answers(1)), Tools())
    assert trajectory.status == "finished" and trajectory.reward == 1.0
    assert trajectory.metrics[counter] == 1 and trajectory.metrics["tool/calls"] == 1
    observation = trajectory.segments[2].messages[0].content
    assert text in observation and len(observation) <= 200


# -- budgets ----------------------------------------------------------------------------------


def test_turns_are_limited_and_the_episode_is_still_scored():
    environment = Looks()
    trajectory = play(FakeEngine(lambda request: CALL), environment, max_turns=3)
    assert trajectory.status == "truncated" and trajectory.error.startswith("max_turns: 3")
    assert trajectory.num_turns == len(environment.steps) == 3
    assert trajectory.segments[-1].is_sampled and trajectory.reward == 1.0


@settings(max_examples=60, deadline=None)
@given(max_tokens=st.integers(20, 400))
def test_no_row_ends_in_a_tool_result_however_few_tokens_there_are(max_tokens):
    trajectory = play(FakeEngine(lambda request: CALL), Looks("result " * 5), max_tokens=max_tokens)
    assert trajectory.status == "truncated" and trajectory.error.startswith("max_t")
    assert trajectory.segments[-1].is_sampled
    assert len(trajectory.path_ids(len(trajectory.segments) - 1)) <= max_tokens


def test_a_cut_turn_ends_the_episode_unless_it_may_go_on():
    engine = FakeEngine(lambda request: NEVER_ENDS if len(engine.requests) == 1 else ANSWER)
    trajectory = play(engine, Looks(), max_turn_tokens=8)
    assert trajectory.status == "truncated"
    assert trajectory.error == "max_turn_tokens: turn 0 was cut at 8 tokens"
    assert trajectory.metrics["parse_errors"] == 1
    engine = FakeEngine(lambda request: NEVER_ENDS if len(engine.requests) == 1 else ANSWER)
    trajectory = play(engine, Looks(), max_turn_tokens=len(ANSWER), continue_cut_turns=True)
    assert trajectory.status == "finished" and trajectory.num_turns == 2
    closed = RENDERER.tokenizer.decode(trajectory.segments[2].token_ids)
    assert closed.startswith("<|end|><|start|>functions.look")


def test_a_reply_that_is_late_is_aborted_and_what_came_is_kept():
    engine = FakeEngine(lambda request: [65] * 100_000, tokens_per_step=10, step_seconds=0.005)
    trajectory = play(engine, Looks(), max_seconds=0.5, max_turn_tokens=100_000)
    assert trajectory.status == "truncated" and trajectory.error.startswith("max_seconds: 0.5 s")
    assert (
        trajectory.segments[-1].finish_reason == "abort" and len(trajectory.segments[-1]) < 100_000
    )
    assert trajectory.reward == 1.0


def test_a_deadline_before_a_later_turns_first_token_leaves_the_answered_part():
    class SlowLater(FakeEngine):
        async def _sample(self, request):
            if len(self.requests) > 1:
                while request.id not in self._aborted:
                    await asyncio.sleep(0.005)
                yield delta([], "abort")
                return
            async for part in super()._sample(request):
                yield part

    trajectory = play(SlowLater(lambda request: CALL), Looks(), max_seconds=0.5)
    assert trajectory.status == "truncated" and trajectory.error.startswith("max_seconds")
    assert trajectory.segments[-1].is_sampled and trajectory.num_turns == 1
    assert len(list(trajectory.rows())) == 1


def test_an_engine_that_does_not_even_answer_an_abort_fails_the_episode():
    engine = Scripted(None)
    trajectory = play(engine, Looks(), max_seconds=0.5, abort_grace_seconds=0.05)
    assert trajectory.status == "failed" and "after it was aborted" in trajectory.error
    assert len(engine.aborted) == 1 and engine.num_closed == 1


@pytest.mark.parametrize("method", ["reset", "step", "score"])
def test_an_environment_that_hangs_does_not_hang_the_run(method):
    async def hang(*_):
        await asyncio.sleep(3600)

    environment = Looks()
    setattr(environment, method, hang)
    trajectory = play(FakeEngine(calls_then_answers(1)), environment, max_seconds=0.5)
    assert trajectory.status == "failed"
    assert f"environment.{method}: TimeoutError: took longer than 0.5 s" in trajectory.error


def test_sampling_parameters_are_recorded_as_they_were_used():
    engine = FakeEngine(calls_then_answers(1))
    trajectory = play(engine, Looks(), max_turn_tokens=64, temperature=0.7, top_p=0.9, top_k=5)
    sampled = [s for s in trajectory.segments if s.is_sampled]
    assert (
        sampled[0].sampling
        == engine.requests[0].sampling
        == SamplingParams(
            max_tokens=64, temperature=0.7, top_p=0.9, top_k=5, stop_ids=RENDERER.stop_ids
        )
    )


# -- many episodes ----------------------------------------------------------------------------

TASKS = [Task(id=f"task-{i}", payload={"reward": i}) for i in range(5)]


def test_groups_come_back_in_order_with_distinct_ids_and_seeds():
    engine = FakeEngine(calls_then_answers(1))
    progress: list[str] = []
    groups = gather(
        engine,
        lambda task: Looks(reward=task.payload["reward"]),
        TASKS,
        group_size=3,
        step=4,
        on_progress=lambda trajectory: progress.append(trajectory.id),
    )
    assert [group.task for group in groups] == TASKS
    assert [group.rewards for group in groups] == [[float(i)] * 3 for i in range(5)]
    assert groups[2].trajectories[1].id == "train/4/task-2/1"
    assert len({r.id for r in engine.requests}) == len({r.seed for r in engine.requests}) == 30
    assert len(set(progress)) == len(progress) == 15


def requests_of(**options):
    engine = FakeEngine(calls_then_answers(1))
    gather(engine, lambda task: Looks(), TASKS, **options)
    return {request.id: request.seed for request in engine.requests}, engine


def test_draws_depend_on_what_is_sampled_and_not_on_the_company():
    alone, engine = requests_of(slots=EpisodeSlots(1))
    together, _ = requests_of()
    assert alone == together and engine.max_running == 1
    assert not set(alone.values()) & set(requests_of(step=1)[0].values())
    assert not set(alone.values()) & set(requests_of(split="eval")[0].values())


def test_no_more_episodes_run_than_may():
    engine = FakeEngine(calls_then_answers(1), tokens_per_step=10, step_seconds=0.001)
    gather(engine, lambda task: Looks(), TASKS, group_size=8, slots=EpisodeSlots(7))
    assert engine.max_running == 7


def test_a_task_that_stands_twice_is_sampled_anew():
    engine = FakeEngine(calls_then_answers(0))
    first, second = gather(engine, lambda task: Looks(), [TASK, TASK])
    assert [t.id for t in first.trajectories + second.trajectories] == [
        f"train/0/task/{sample}" for sample in range(4)
    ]
    assert len({request.seed for request in engine.requests}) == 4


def test_the_same_episode_under_other_weights_is_another_request():
    engine = FakeEngine(calls_then_answers(0))
    gather(engine, lambda task: Looks(), [TASK], group_size=1)
    asyncio.run(engine.load_weights(None, version=1))
    gather(engine, lambda task: Looks(), [TASK], group_size=1)
    first, second = engine.requests
    assert first.id != second.id and first.seed == second.seed


def test_a_failed_episode_does_not_touch_the_others():
    environments: list[Looks] = []

    def make(task: Task) -> Environment:
        if task.id == "task-1" and len(environments) % 2:
            raise OSError("no more containers")
        if task.id == "task-3":
            environments.append(breaks_in("step"))  # type: ignore[arg-type]
        else:
            environments.append(Looks())
        return environments[-1]

    groups = gather(FakeEngine(calls_then_answers(1)), make, TASKS, group_size=4)
    statuses = [[t.status for t in group.trajectories] for group in groups]
    assert statuses[0] == statuses[2] == statuses[4] == ["finished"] * 4
    assert statuses[3] == ["failed"] * 4
    assert all(environment.num_closed == 1 for environment in environments)
    for trajectory in groups[1].trajectories:
        if trajectory.status == "failed":
            assert "could not be made: OSError: no more containers" in trajectory.error


def test_a_group_is_scored_together_after_its_last_episode_and_before_it_closes():
    seen: list[list[Environment]] = []

    async def rank(environments):
        assert not any(environment.num_closed for environment in environments)
        seen.append(list(environments))
        await asyncio.sleep(0)
        return [Score(reward=float(i)) for i in range(len(environments))]

    complete: list[str] = []
    groups = gather(
        FakeEngine(calls_then_answers(1)),
        lambda task: breaks_in("step") if task.id == "task-2" else Looks(),
        TASKS,
        group_size=3,
        group_scorer=lambda task: rank,
        on_progress=lambda trajectory: complete.append(trajectory.id),
    )
    assert [group.rewards for group in groups] == [[0, 1, 2], [0, 1, 2], [], [0, 1, 2], [0, 1, 2]]
    assert len(seen) == 4 and len(complete) == len(set(complete)) == 15
    assert all(environment.num_closed == 1 for group in seen for environment in group)


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        (lambda environments: [Score(reward=1.0)], "1 scores for 2 environments"),
        (lambda environments: 1 / 0, "score_group: ZeroDivisionError"),
        (lambda environments: [Score(reward=math.nan)] * 2, "reward is nan"),
    ],
)
def test_a_group_scorer_that_breaks_fails_its_group(scores, text):
    (group,) = gather(
        FakeEngine(calls_then_answers(0)),
        lambda task: Looks(),
        [TASK],
        group_scorer=lambda task: scores,
    )
    assert [t.status for t in group.trajectories] == ["failed"] * 2
    assert all(text in t.error for t in group.trajectories)
    assert group.rewards == []


def test_rewards_of_turns_go_to_their_segments():
    class PerTurn(Looks):
        async def score(self):
            return Score(reward=2.0, turn_rewards={0: 0.25, 2: -1.0})

    trajectory = play(FakeEngine(calls_then_answers(2)), PerTurn())
    rewards = [s.reward for s in trajectory.segments if s.is_sampled]
    assert rewards == [0.25, None, -1.0] and trajectory.reward == 2.0


async def test_cancelling_closes_every_environment_and_ends_every_request():
    environments: list[Looks] = []

    def make(task: Task) -> Environment:
        environments.append(Looks())
        return environments[-1]

    engine = FakeEngine(lambda request: CALL, tokens_per_step=1)
    job = asyncio.create_task(
        all_groups(engine, RENDERER, make, TASKS, group_size=4, slots=EpisodeSlots(9))
    )
    await steps_of(engine)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert len(environments) == 9 and {e.num_closed for e in environments} == {1}
    assert not engine._running


def test_what_a_callback_raises_comes_through_and_everything_is_closed():
    environments: list[Looks] = []

    def make(task: Task) -> Environment:
        environments.append(Looks())
        return environments[-1]

    def full(trajectory: Trajectory) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        gather(FakeEngine(calls_then_answers(1)), make, TASKS, on_progress=full)
    assert all(environment.num_closed == 1 for environment in environments)


def test_no_tasks_are_no_groups():
    assert gather(FakeEngine(calls_then_answers(0)), lambda task: Looks(), []) == []


def test_payloads_and_counters_are_json():
    trajectory = play(FakeEngine(calls_then_answers(1)), Looks())
    assert json.loads(json.dumps(trajectory.metrics)) == trajectory.metrics
