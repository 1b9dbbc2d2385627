"""Every file in examples/ does what it says."""

import asyncio
import importlib
import json
import random
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from check_engine import check_engine
from command_line import refusal

import lockstep
from lockstep.agent.config import AgentConfig
from lockstep.agent.loop import Budget, run_episode
from lockstep.agent.match_loop import collect_matches
from lockstep.agent.turns import Policy
from lockstep.cli import OK, main
from lockstep.envs.custom import Episode
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.errors import ConfigError, EngineError, RendererError
from lockstep.models.locate import SHIPPED_ROOT
from lockstep.renderers.config import HarmonyConfig
from lockstep.renderers.harmony import HarmonyRenderer
from lockstep.testing.engines import FakeEngine
from lockstep.testing.renderers import check_renderer
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, SamplingParams, ToolCall

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SMALL = ["groups_per_step=2", "group_size=4", "evaluation.num_tasks=2", "checkpoint.every=0"]


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch):
    """As for a user who stands in examples/. Modules stay imported: their kinds are registered."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


def example(name):
    return importlib.import_module(name)


def rows_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "reward/mean" in row]


def play(messages):
    """The trajectory of the environment's first task, with replies that are written."""
    renderer = HarmonyRenderer(byte_tokenizer(), HarmonyConfig())
    config = example("my_environment").WarehouseConfig()
    task = next(config.tasks(split="train", seed=0))
    replies = iter(messages)
    return asyncio.run(
        run_episode(
            FakeEngine(lambda _: renderer.render_reply(next(replies))),
            renderer,
            config.environment(task, AgentConfig()),
            task,
            trajectory_id="episode",
            seed=0,
            sampling=SamplingParams(max_tokens=256),
            budget=Budget(max_tokens=8192),
        )
    )


def call(name, arguments):
    calls = (ToolCall(name=name, arguments=json.dumps(arguments)),)
    return Message(role="assistant", tool_calls=calls)


def answer(text):
    return Message(role="assistant", content=text)


def test_every_example_has_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    assert NAMES and [name for name in NAMES if name not in tests] == []


def test_sums_are_rewarded_for_the_last_number_and_a_little_for_an_end():
    module = example("sums")
    first = module.tasks()[0]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    a, b = map(int, re.findall(r"\d+", first["messages"][1]["content"]))
    assert first["answer"] == str(a + b)
    given = [f"{a} + {b} is {a + b}.", f"{a + b} is not 1", ""]
    rewards = [module.reward(Episode(task=first, messages=[], answer=text)) for text in given]
    assert [sum(reward.values()) for reward in rewards] == [1.1, 0.1, 0.0]


def test_the_calculator_answers_its_tasks_and_demonstrates_right_calls(tmp_path, monkeypatch):
    module = example("calculator")
    assert module.calculator("12 * 34 - 5") == "403"
    assert module.calculator("2 ** 9").startswith("error")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "calculator.py"), run_name="__main__")
    demonstrations, tasks = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("demonstrations", "tasks")
    )
    assert (len(demonstrations), len(tasks)) == (60, 1000)
    for row in demonstrations:
        *_, asking, result, answer = row["messages"]
        arguments = json.loads(asking["tool_calls"][0]["function"]["arguments"])
        assert answer["content"] == result["content"] == module.calculator(**arguments)
        shown = row["tools"][0]["function"]["parameters"]["properties"]["expression"]
        assert shown == {"type": "string", "description": "for example 12 * 34 - 5"}
    episode = Episode(task=tasks[0], messages=[], answer=f" {tasks[0]['answer']}\n")
    assert module.reward(episode) == 1.0
    assert module.reward(Episode(task=tasks[0], messages=[], answer="It is 7")) == 0.0


def test_document_search_demonstrates_calls_that_earn_the_whole_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "document_search.py"), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "searches.jsonl").read_text().splitlines()]
    config = DocSearchConfig()

    async def replay(row, task):
        environment, messages = config.environment(task, AgentConfig()), []
        messages += await environment.reset()
        for message in map(Message.from_dict, row["messages"]):
            if message.role == "assistant":
                messages.append(message)
                messages += (await environment.step(message)).messages
        return [m.content for m in messages], (await environment.score()).reward

    earned = 0
    for task in config.tasks(split="train", seed=1000).take(70):  # some worlds are left out
        row = rows[min(earned, 59)]
        earned += asyncio.run(replay(row, task)) == ([m["content"] for m in row["messages"]], 1.0)
    assert earned == len(rows) == 60


def test_training_by_hand_learns_at_a_kl_of_exactly_zero(capsys):
    rows = asyncio.run(example("from_scratch").main(steps=4))
    assert [(row["kl"], row["unequal"]) for row in rows] == [(0.0, 0.0)] * 4
    assert all(row["tokens"] > 500 for row in rows)
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    printed = capsys.readouterr().out
    assert "<tool_call>" in printed and "<tool_response>" in printed


def test_the_own_task_is_learnt(tmp_path):
    module = example("own_task")
    assert [module.python(code) for code in ("12*34", "2**9", "()")] == ["408", "error", "error"]
    task = {"instructions": "Use python."}
    outcome = lockstep.train(
        model="tiny-math",
        tools=[module.python],
        reward=module.reward,
        tasks=module.tasks,
        task=task,
        steps=8,
        groups_per_step=4,
        evaluation={"num_tasks": 2, "at_start": False},
        out=tmp_path / "run",
    )
    rewards = [row["reward/mean"] for row in rows_of(outcome.path)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5, rewards


def test_the_environment_rewards_the_right_answer():
    module = example("my_environment")
    articles = next(module.WarehouseConfig().tasks(split="train", seed=0)).payload["articles"]
    prices = [module.PRICES[article] for article in articles]
    replies = [call("price", {"article": article}) for article in articles]
    replies += [call("add", {"numbers": prices}), answer(str(sum(prices)))]
    trajectory = play(replies)
    assert trajectory.status == "finished", trajectory.error
    assert trajectory.reward == 1.0
    assert [m.content for m in trajectory.messages(trajectory.leaves()[0]) if m.role == "tool"] == [
        str(value) for value in (*prices, sum(prices))
    ]


def test_the_environment_counts_calls_that_do_not_work():
    wrong = [call("price", {"article": "unicorn"}), call("add", {"numbers": "2"})]
    trajectory = play([*wrong, answer("0")])
    assert trajectory.status == "finished"
    assert trajectory.reward_parts == {"correctness": 0.0, "penalty": 0.5}
    assert trajectory.metrics["tool/errors"] == trajectory.metrics["tool/invalid_arguments"] == 1


def test_the_environment_trains_from_the_command_line(tmp_path):
    run = tmp_path / "run"
    words = ["train", "warehouse", "--plugin", "my_environment", "steps=2", f"out={run}", *SMALL]
    assert main(words) == OK
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1]
    assert all("reward/penalty" in row and row["episodes/failed"] == 0 for row in rows)


@pytest.mark.parametrize(
    "name", ["tiny-gpt-oss", "tiny-qwen3", "tiny-qwen3-next", "tiny-math", "tiny-instructions"]
)
def test_the_shipped_models_are_made_again_from_the_command_line(name, tmp_path):
    small = ["data.num_dialogues=64", "sft.steps=2", "sft.rows_per_step=8"]
    words = ["sft", name, "--plugin", "tiny_models.py", *small, f"out={tmp_path / 'run'}"]
    assert main(words) == OK
    made, shipped = tmp_path / "run/model", SHIPPED_ROOT / name
    assert (made / "model.safetensors").is_file()
    written, known = (json.loads((each / "config.json").read_text()) for each in (made, shipped))
    # Fewer dialogues make a smaller vocabulary.
    assert written | {key: known[key] for key in ("vocab_size", "eos_token_id")} == known


def played(name, replies, *, seats, **task):
    """The trajectories of one match of `examples/NAME.py`. replies: seat -> its turns' texts."""
    renderer = HarmonyRenderer(byte_tokenizer(), HarmonyConfig())

    def policy(seat):
        texts = iter(replies[seat])
        return Policy(
            engine=FakeEngine(lambda _: renderer.render_reply(answer(next(texts)))),
            renderer=renderer,
            sampling=SamplingParams(max_tokens=64),
        )

    module = example(name)
    kind = next(getattr(module, each) for each in dir(module) if each.lower() == f"{name}config")
    config = kind(**task)
    (group,) = asyncio.run(
        collect_matches(
            {seat: policy(seat) for seat in seats},
            lambda task: config.match(task, AgentConfig()),
            [next(config.tasks(split="train", seed=0))],
            group_size=1,
            budget=Budget(max_tokens=8192),
            run_seed=0,
        )
    )
    return group.trajectories


def test_nim_is_won_by_the_last_stone_and_lost_by_a_move_against_the_rules(monkeypatch):
    monkeypatch.setattr(random.Random, "randint", lambda *_: 6)
    seats = {"first": ["2", "1"], "second": ["1", "2"]}
    first, second = played("nim", seats, seats=seats)
    said = [m.content for m in first.messages(first.leaves()[0])]
    assert said == ["6 stones", "2", "3 stones", "1"]
    assert (first.reward, second.reward) == (0.0, 1.0)
    first, second = played("nim", {"first": ["2"], "second": ["4"]}, seats=seats)
    assert (first.reward, second.reward, second.reward_parts["legal"]) == (1.0, 0.0, 0.0)


def test_a_proposer_is_paid_for_questions_that_are_solved_sometimes():
    seats = ("proposer", "solver")
    tries = ["3", "3", "7", "8", "6"]  # the tries take turns: the second errs in the second term
    proposer, *solvers = played(
        "proposer", {"proposer": ["3+4+9"], "solver": tries}, seats=seats, num_solvers=2
    )
    assert proposer.reward == 0.5 and [t.reward for t in solvers] == [1.0, 0.0]
    assert [t.num_turns for t in solvers] == [3, 2]
    (alone,) = played("proposer", {"proposer": ["3+"], "solver": []}, seats=seats)
    assert alone.reward == 0.0 and alone.reward_parts == {"valid": 0.0, "terms": 0.0}


@pytest.mark.parametrize("name", ["nim", "proposer"])
def test_a_match_makes_its_model_and_trains_from_the_command_line(name, tmp_path):
    model, run = tmp_path / "made", tmp_path / "run"
    make = ["sft", f"{name}-model", "--plugin", name, f"out={model}", "sft.steps=2"]
    assert main([*make, "data.num_dialogues=200"]) == OK
    words = ["train", name, "--plugin", name, f"model={model / 'model'}", "steps=1", *SMALL]
    assert main([*words, "evaluation.at_start=false", f"out={run}"]) == OK
    assert [row["episodes/failed"] for row in rows_of(run)] == [0]


def test_the_loss_trains_from_the_command_line(tmp_path):
    run = tmp_path / "run"
    words = ["train", "quickstart", "--plugin", "my_loss", "objective=sapo", "steps=2"]
    assert main([*words, f"out={run}", *SMALL]) == OK
    assert json.loads((run / "config.json").read_text())["objective"]["type"] == "sapo"
    assert all(np.isfinite(row["train/loss"]) for row in rows_of(run))


def test_the_loss_is_the_policy_gradient_at_ratio_one_and_fades_away_from_it():
    torch = pytest.importorskip("torch")
    from lockstep.objectives.losses import TokenBatch, make_loss

    module = example("my_loss")
    logprobs = torch.tensor([-1.0, -2.0, -1.0, -1.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 1.0, -2.0])
    tokens = TokenBatch(
        logprobs=logprobs,
        entropy=torch.zeros(4),
        columns={"old_logprobs": torch.tensor([-1.0, -2.0, -3.0, -3.0]), "advantages": advantages},
        row=torch.tensor([0, 0, 1, 1]),
        num_rows=2,
    )
    make_loss(module.SAPO())(tokens).loss.sum().backward()
    assert torch.allclose(logprobs.grad[:2], -advantages[:2])
    # at ratio e^2 the gate is all but flat, and flatter where the advantage is negative
    assert 0 < logprobs.grad[3] / 2 < -logprobs.grad[2] < 0.06
    with pytest.raises(ConfigError, match=r"objective\.temperatures=\(0, 1\)"):
        module.SAPO(temperatures=(0, 1))


def test_the_renderer_keeps_every_invariant():
    module = example("my_renderer")
    tokenizer = byte_tokenizer(control_tokens=module.CONTROL_TOKENS)
    check_renderer(module.PlainRenderer(tokenizer), has_thinking=False)


def test_a_renderer_that_writes_the_sampled_turn_again_is_found_out():
    module = example("my_renderer")

    class Rewriting(module.PlainRenderer):
        def extend(self, sampled_ids, messages):
            return [*sampled_ids, *super().extend(sampled_ids, messages)]

    tokenizer = byte_tokenizer(control_tokens=module.CONTROL_TOKENS)
    with pytest.raises(RendererError, match="check_renderer"):
        check_renderer(Rewriting(tokenizer), has_thinking=False)


def test_the_renderer_is_a_choice_of_the_command_line(capsys):
    words = ["train", "quickstart", "--plugin", "my_renderer", "renderer=plain", "--dry-run"]
    assert "lacks the control tokens <|system|>" in refusal(*words, capsys=capsys)


def test_the_engine_keeps_what_it_claims():
    module = example("my_engine")
    report = asyncio.run(
        check_engine(
            module.BigramEngine(module.random_logits()),
            prompt_ids=[3, 1, 4],
            weights={"logits": module.random_logits(seed=1)},
        )
    )
    assert {"score", "seeds", "abort", "weights", "streams"} <= set(report.passed)
    assert set(report.skipped) == {"prefix cache", "stop strings", "support", "routed experts"}


def test_an_engine_that_reports_another_log_prob_is_found_out():
    module = example("my_engine")

    class Shifted(module.BigramEngine):
        def _draw(self, previous, position, request):
            chosen, logprob = super()._draw(previous, position, request)
            return chosen, logprob - 0.01

    with pytest.raises(EngineError, match="score to agree"):
        asyncio.run(check_engine(Shifted(module.random_logits()), prompt_ids=[3, 1, 4]))


@pytest.mark.parametrize(
    ("name", "printed"),
    [("my_renderer", "every invariant holds"), ("my_engine", "kept: one reply")],
)
def test_an_example_proves_itself_as_a_program(name, printed, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert printed in capsys.readouterr().out


@pytest.fixture
def own_metrics(monkeypatch):
    """Metrics registered in a test end with it: no later run of this process logs them."""
    from lockstep.observe import metrics

    monkeypatch.setattr(metrics, "_REGISTERED", {})
    monkeypatch.setattr(metrics, "_EXACT", dict(metrics._EXACT))
    return metrics


def test_the_metric_is_in_every_step(tmp_path, own_metrics):
    run = tmp_path / "run"
    words = ["train", "quickstart", "--plugin", "my_metric", "steps=2", f"out={run}", *SMALL]
    assert main(words) == OK
    shares = [row["rows/sampled_share"] for row in rows_of(run)]
    assert len(shares) == 2 and all(0 < share < 1 for share in shares)


def test_a_metric_that_fails_is_left_out_and_a_known_name_is_refused(own_metrics, caplog):
    from lockstep.errors import DataError

    with pytest.raises(DataError, match="reward/mean"):
        own_metrics.step_metric("reward/mean", unit="1", better="up", meaning="")(lambda g, r: 0.0)
    broken = own_metrics.step_metric("mine/broken", unit="1", better="none", meaning="x")
    broken(lambda g, r: 1 / 0)
    assert "mine/broken" not in own_metrics.registered_metrics([], [])
    assert "mine/broken left out: ZeroDivisionError" in caplog.text
