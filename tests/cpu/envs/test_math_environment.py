"""Episodes of word problems and of ReTool: replies, the code tool, rewards, demonstrations."""

import asyncio
import json
import random

import pytest
from tiny_models import (
    CLEAN_MATH,
    FAILED_CODE,
    NOISY_MATH,
    MathDemonstrationsConfig,
    demonstrate_calls,
    demonstrate_head,
    demonstrate_steps,
)

from lockstep.agent.config import AgentConfig
from lockstep.config import from_dict, to_dict
from lockstep.envs.math.config import MathConfig, RetoolConfig
from lockstep.envs.math.problems import chain, make_problem, word_problem
from lockstep.errors import ConfigError
from lockstep.recipes import find_recipe
from lockstep.types import Message, Task, ToolCall

AGENT = AgentConfig()


def says(text):
    return Message(role="assistant", content=text)


def calls(code, **more):
    arguments = json.dumps({"code": code, **more})
    return Message(role="assistant", tool_calls=(ToolCall(name="python", arguments=arguments),))


def play(config, turns, *, answer="30796", question="Q"):
    """(observations, score) of an episode with these assistant turns."""

    async def main():
        task = Task(id="made-0", payload={"question": question, "answer": answer})
        environment = config.environment(task, AGENT)
        try:
            await environment.reset()
            seen = [await environment.step(turn) for turn in turns]
            return seen, await environment.score()
        finally:
            await environment.close()
            await config.close()

    return asyncio.run(main())


def opening_of(config, task):
    return list(asyncio.run(config.environment(task, AGENT).reset()))


@pytest.mark.parametrize(
    ("reply", "reward", "parts"),
    [
        ("14+23=37\n#### 37", 1.0, (1, 1)),
        ("14+23=37\n#### 37.0 apples", 1.0, (1, 1)),
        ("14+23=37\n#### 36", 0.1, (0, 1)),
        ("14+23=37\n37", 0.0, (0, 0)),
        ("", 0.0, (0, 0)),
    ],
)
def test_the_reward_is_of_the_answer_and_of_its_form(reply, reward, parts):
    seen, score = play(MathConfig(), [says(reply)], answer="37")
    assert seen[0].done
    assert score.reward == pytest.approx(reward)
    assert score.parts == {"correctness": parts[0], "format": parts[1]}


def test_a_turn_that_cannot_be_read_is_no_answer():
    _, score = play(MathConfig(), [Message(role="assistant", content="#### 37", parse_error="cut")])
    assert score.reward == 0.0


def test_leniency_and_weights_are_settings():
    config = MathConfig(lenient=True, correctness_weight=2.0, format_weight=0.5, form="boxed")
    assert play(config, [says("so 37.")], answer="37")[1].reward == 2.0
    assert play(config, [says("\\boxed{37}")], answer="37")[1].reward == 2.5


def test_code_runs_in_the_sandbox_and_the_final_answer_is_graded():
    turns = [calls("483*62"), calls("29946+850"), says("#### 30796")]
    seen, score = play(RetoolConfig(), turns)
    assert [o.messages[0].content for o in seen[:2]] == ["29946", "30796"]
    assert seen[1].metrics["tool/calls"] == 1 and seen[1].metrics["sandbox/programs"] == 1
    assert seen[2].done and score.reward == 1.0


def test_failed_code_is_an_observation_and_a_metric_and_the_episode_goes_on():
    turns = [calls("1/0"), calls("open('/etc/passwd').read()"), calls("1+"), says("#### 30796")]
    seen, score = play(RetoolConfig(), turns)
    texts = [o.messages[0].content for o in seen[:3]]
    assert "ZeroDivisionError" in texts[0] and "SyntaxError" in texts[2]
    assert "root:" not in texts[1]
    assert seen[0].metrics["sandbox/error"] == 1 and not seen[0].done
    assert score.reward == 1.0
    seen, _ = play(RetoolConfig(explains_errors=False), turns)
    assert [o.messages[0].content for o in seen[:3]] == [FAILED_CODE] * 3


def test_a_malformed_call_is_answered_and_a_call_without_an_answer_is_worth_nothing():
    turns = [calls("1", wrong=2), Message(role="assistant", parse_error="no JSON"), calls("30796")]
    seen, score = play(RetoolConfig(), turns)
    assert "has an unknown key" in seen[0].messages[0].content
    assert "could not be read" in seen[1].messages[0].content
    assert score.parts == {"correctness": 0.0, "format": 0.0}


def test_variables_stay_within_an_episode_if_that_is_asked_for():
    turns = [calls("x = 30000"), calls("x + 796"), says("#### 30796")]
    assert play(RetoolConfig(keeps_variables=True), turns)[0][1].messages[0].content == "30796"
    assert "NameError" in play(RetoolConfig(), turns)[0][1].messages[0].content


def test_without_the_tool_a_call_is_refused_and_the_prompt_is_another():
    config = find_recipe("retool").task
    bare = from_dict(type(config), {**to_dict(config), "tool": False})
    seen, score = play(bare, [calls("483*62"), says("#### 30796")])
    assert seen[0].messages[0].content == FAILED_CODE and seen[0].metrics["tool/unknown"] == 1
    assert score.reward == 1.0
    task = Task(id="made-0", payload={"question": "Q", "answer": "1"})
    with_tool, without = (opening_of(c, task)[0].content for c in (config, bare))
    assert with_tool != without
    assert config.environment(task, AGENT).tools and not bare.environment(task, AGENT).tools


@pytest.mark.parametrize("config", [MathConfig(), RetoolConfig()], ids=["math", "retool"])
def test_made_tasks_are_the_same_for_a_seed_and_the_splits_share_none(config):
    train, again = (config.tasks(split="train", seed=1).take(200) for _ in range(2))
    held_out = config.tasks(split="eval", seed=1).take(200)
    assert train == again
    assert not {t.payload["question"] for t in train} & {t.payload["question"] for t in held_out}
    assert {config.label(t) for t in train} in ({"2-step", "3-step"}, {"chain", "choice"})
    assert from_dict(type(config), to_dict(config)) == config


@pytest.mark.parametrize("kind", ["word", "chain"])
def test_the_steps_of_a_made_problem_lead_to_its_answer(kind):
    for seed in range(300):
        made = make_problem(seed, kind)
        for before, after in zip(made.steps, made.steps[1:], strict=False):
            assert after.left == before.result
        assert str(eval(made.steps[-1].code)) == made.answer
        assert all(str(number) in made.question for number in made.unused)
        if kind == "word":
            assert all(0 <= step.result < 60 for step in made.steps)
        if made.label == "choice":
            sign = "even" if made.steps[0].result % 2 == 0 else "odd"
            assert f"{sign} add {made.steps[1].right}" in made.question


def test_the_demonstrator_without_fault_is_always_right_and_the_other_often_wrong():
    rng = random.Random(0)

    def mean_reward(noise):
        rewards = []
        for _ in range(200):
            made = word_problem(rng)
            (reply,) = demonstrate_steps(made, rng, noise)[2:]
            rewards.append(play(MathConfig(), [reply], answer=made.answer)[1].reward)
        return sum(rewards) / len(rewards)

    assert mean_reward(CLEAN_MATH) == pytest.approx(1.0)
    assert 0.1 < mean_reward(NOISY_MATH) < 0.6


def test_the_results_in_demonstrated_calls_are_those_of_the_sandbox_word_for_word():
    rng = random.Random(1)
    recipe = find_recipe("retool").task
    kinds = set()
    for _ in range(12):
        made = chain(rng)
        dialogue = demonstrate_calls(made, rng, NOISY_MATH)
        turns = [m for m in dialogue if m.role == "assistant"]
        shown = [m.content for m in dialogue if m.role == "tool"]
        seen, _ = play(recipe, turns, answer=made.answer)
        assert [m.content for o in seen for m in o.messages] == shown
        kinds |= {text == FAILED_CODE for text in shown}
        task = Task(id="made-0", payload={"question": made.question, "answer": made.answer})
        assert dialogue[:2] == opening_of(recipe, task)
    assert kinds == {True, False}
    made = chain(rng)
    assert demonstrate_head(made)[-1].content == f"#### {made.answer}"


def test_demonstrations_are_the_same_for_a_seed_and_have_both_kinds():
    config = MathDemonstrationsConfig(num_dialogues=200)
    first, again = config.stages(3), config.stages(3)
    assert first == again and sum(stage.share for stage in first) == 1
    said = {d[0].content for stage in first for d in stage.dialogues}
    assert len(said) == 3
    for wrong in ({"num_dialogues": 1}, {"head_share": 2.0}):
        with pytest.raises(ConfigError):
            MathDemonstrationsConfig(**wrong)
