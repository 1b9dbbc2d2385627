"""reasoning-gym's tasks: exactly repeatable, split by question, scored without running answers."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from playing import play_turns
from quickstarts import quickstart_with

from lockstep.agent.config import AgentConfig
from lockstep.envs.mixture import MixtureConfig
from lockstep.envs.reasoning_gym.config import ReasoningGymConfig, extract_answer, shared_child
from lockstep.errors import ChildTimeoutError, ConfigError, DataError
from lockstep.types import Message

if find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed (extra `reasoning-gym`)", allow_module_level=True)

AGENT = AgentConfig()


def score(dataset, answer, seed=5, settings=None):
    config = ReasoningGymConfig(dataset=dataset, settings=settings or {})
    return config.ask("score", seconds=20, seed=seed, answer=answer)["score"]


def play(config, task, reply):
    """(reward, parts, counters) of an episode in which the model says `reply`."""
    found = play_turns(config.environment(task, AGENT), [Message(role="assistant", content=reply)])
    assert found.observations[0].done
    return found.score.reward, dict(found.score.parts), dict(found.observations[0].metrics)


def test_a_dataset_and_its_settings_are_given_on_the_command_line():
    settings = ("task.settings.max_terms=2", "task.settings.allow_negation=true")
    words = ("task=reasoning-gym", "task.dataset=chain_sum", "task.answer=last_line", *settings)
    task = quickstart_with(*words).task
    assert task == ReasoningGymConfig(
        dataset="chain_sum", settings={"max_terms": 2, "allow_negation": True}, answer="last_line"
    )
    task.check()


def test_a_task_depends_on_seed_split_and_index_alone():
    config = ReasoningGymConfig(dataset="leg_counting")
    source = config.tasks(split="train", seed=3)
    first = source.take(4)
    again = config.tasks(split="train", seed=3)
    again.load_state_dict(source.state_dict())
    expected = source.take(3)
    assert again.take(3) == expected
    assert config.tasks(split="train", seed=3).take(7) == first + expected
    assert config.tasks(split="train", seed=4).take(4) != first


def test_another_process_makes_the_same_tasks():
    """ransom_note orders a set of text, which Python's string hashes shuffle in every process."""
    config = ReasoningGymConfig(dataset="ransom_note")
    drawn = []
    for _ in range(2):
        drawn.append(config.ask("draw", seconds=60, seed=7, split="train", eval_share=0.1))
        shared_child().close()  # the next request starts another
    assert drawn[0] == drawn[1]


def test_no_question_is_in_both_splits():
    config = ReasoningGymConfig(settings={"max_terms": 2, "max_digits": 1}, eval_share=0.3)
    train, held_out = (
        {task.payload["question"] for task in config.tasks(split=split, seed=0).take(200)}
        for split in ("train", "eval")
    )
    assert len(train) > 50
    assert len(held_out) > 20
    assert not train & held_out


def test_a_dataset_with_too_few_questions_for_a_split_says_so():
    config = ReasoningGymConfig(
        dataset="coin_flip", settings={"min_trials": 3, "max_trials": 3}, eval_share=1e-12
    )
    with pytest.raises(DataError, match=r"1000.*'eval'"):
        next(config.tasks(split="eval", seed=0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, "'chain_sum'"),
        ({"settings": {"max_term": 3}}, "'settings.max_term'.*'settings.max_terms'"),
        ({"settings": {"max_terms": "x"}}, "settings.max_terms.*'x'"),
        ({"settings": {"max_terms": 1}}, "max_terms.*>= min_terms"),
        ({"settings": {"seed": 1}}, "settings.seed"),
        ({"level": 99}, r"level=99: dataset=chain_sum.*\b0\b.*10"),
        ({"dataset": "composite"}, "task=mixture"),
        ({"dataset": "game_of_life_halting"}, r"\b1\b"),
        (
            {"dataset": "word_sorting", "settings": {"transformation": "uper"}},
            "settings.transformation='uper': 'uper'.*TextTransformation",
        ),
        (
            {"dataset": "time_intervals", "settings": {"min_date": "soon"}},
            "settings.min_date='soon'",
        ),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, dict) else "",
)
def test_a_dataset_that_cannot_be_is_refused_before_a_model_is_loaded(settings, message):
    with pytest.raises(ConfigError, match=message):
        ReasoningGymConfig(**settings).check()


@pytest.mark.parametrize("settings", [{"eval_share": 1.0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match="must"):
        ReasoningGymConfig(**settings)


@pytest.mark.parametrize(
    ("dataset", "settings"),
    [
        ("word_sorting", {"transformation": "uppercase"}),
        ("aiw", {"task_types": ["siblings"]}),
        ("time_intervals", {"min_date": "2000-01-01"}),
        ("fraction_simplification", {"styles": ["plain"]}),
        ("arc_agi", {"board_format_opts": {"col_delimiter": ","}}),
    ],
)
def test_settings_that_are_no_plain_json_are_read(dataset, settings):
    ReasoningGymConfig(dataset=dataset, settings=settings).check()


def test_a_level_of_the_curriculum_is_taken_and_settings_go_before():
    easy, hard = (
        ReasoningGymConfig(level=level, settings={"max_terms": 4, "min_terms": 4})
        for level in (0, 5)
    )
    lengths = [
        sum(len(t.payload["question"]) for t in c.tasks(split="train", seed=0).take(20))
        for c in (easy, hard)
    ]
    assert lengths[1] > lengths[0]
    questions = [t.payload["question"] for t in easy.tasks(split="train", seed=0).take(9)]
    assert all(len(re.findall(r"\d+", q)) == 4 for q in questions)


def test_an_episode_is_scored_by_the_datasets_verifier():
    config = ReasoningGymConfig(dataset="chain_sum")
    task = next(config.tasks(split="train", seed=0))
    right = task.payload["answer"]
    assert play(config, task, f"It is <answer>{right}</answer>") == (
        1.0, {"correctness": 1.0, "answered": 1.0}, {},
    )  # fmt: skip
    assert play(config, task, "<answer>x</answer>")[0] == 0.0
    assert play(config, task, f"It is {right}") == (
        0.0, {"correctness": 0.0, "answered": 0.0}, {"verifier/unanswered": 1.0},
    )  # fmt: skip
    assert config.label(task) == "chain_sum"


def test_an_answer_that_a_verifier_breaks_on_is_counted():
    config = ReasoningGymConfig(dataset="prime_factorization")
    task = next(config.tasks(split="train", seed=0))
    reward, _, counters = play(config, task, "<answer>two times three</answer>")
    assert (reward, counters) == (0.0, {"verifier/errors": 1.0})


def test_a_verifier_that_takes_too_long_is_given_up_and_the_next_is_asked():
    config = ReasoningGymConfig()
    with pytest.raises(ChildTimeoutError, match="1e-09"):
        config.ask("draw", seconds=1e-9, seed=1, split="train", eval_share=0.1)
    config.check()


@pytest.mark.parametrize(
    "dataset",
    [
        "binary_matrix", "string_insertion", "spiral_matrix", "n_queens", "countdown", "puzzle24",
        "simple_integration", "intermediate_integration", "polynomial_multiplication",
    ],
)  # fmt: skip
def test_what_the_model_wrote_is_never_run(dataset, tmp_path):
    sign = tmp_path / "sign"
    for answer in (
        f"__import__('os').system('touch {sign}')",
        f"open({str(sign)!r}, 'w')",
        f"[open(x, 'w') for x in [{str(sign)!r}]]",
        f"sqrt(open({str(sign)!r}, 'w'))",
        "9**9**9**9",
        "(9**9)**(9**9)",
        "factorial(factorial(99))",
        "(lambda: 0)()",
        "x.__class__",
    ):
        assert score(dataset, answer) < 0.1
    assert not sign.exists()


def test_answers_that_are_expressions_are_still_read():
    assert score("simple_integration", "sin(", seed=1) == 0.0
    config = ReasoningGymConfig(dataset="countdown")
    drawn = config.ask("draw", seconds=60, seed=1, split="train", eval_share=0.1)
    assert score("countdown", drawn["answer"], seed=drawn["seed"]) == 1.0
    assert score("countdown", f"({drawn['answer']}) + 1", seed=drawn["seed"]) == 0.05


def test_every_place_where_the_package_evaluates_is_known():
    """A version with another `eval` in it must be read before it is trusted."""
    package = Path(find_spec("reasoning_gym").origin).parent
    pattern = re.compile(r"(?<![\w.])(?:eval|exec)\(|\bparse_expr\(|sympify\(|pickle|os\.system")
    found = {
        str(path.relative_to(package)).removesuffix(".py").replace("/", ".")
        for path in package.rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    guarded = {
        "algorithmic.binary_matrix", "algorithmic.number_sorting", "algorithmic.spiral_matrix",
        "algorithmic.string_insertion", "games.n_queens", "games.countdown", "games.puzzle24",
        "algebra.simple_integration", "algebra.intermediate_integration",
        "algebra.polynomial_multiplication",
    }  # fmt: skip
    of_its_own_text = {
        "arithmetic.basic_arithmetic", "arithmetic.bitwise_arithmetic", "code.codeio",
        "arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99",
        "logic.propositional_logic",  # a parser of its own of that name
    }  # fmt: skip
    assert found == guarded | of_its_own_text


def test_a_mixture_of_datasets_is_reported_by_dataset():
    task = MixtureConfig(
        parts={
            "sums": ReasoningGymConfig(dataset="chain_sum"),
            "legs": ReasoningGymConfig(dataset="leg_counting"),
        }
    )
    drawn = task.tasks(split="eval", seed=0).take(8)
    assert {task.label(t) for t in drawn} == {"sums/chain_sum", "legs/leg_counting"}


@pytest.mark.parametrize(
    ("text", "rule", "expected"),
    [
        ("<answer> 4\n</answer>", "tag", "4"),
        ("<answer>3</answer> <answer>4</answer>", "tag", "4"),
        ("<answer>4", "tag", None),
        ("<answer></answer>", "tag", None),
        ("is\n4 \n\n", "last_line", "4"),
        ("", "last_line", None),
        (" 4 ", "whole", "4"),
    ],
)
def test_the_answer_is_where_the_rule_says(text, rule, expected):
    assert extract_answer(text, rule) == expected


def test_help_does_not_import_the_package():
    code = (
        "import sys, lockstep.recipes;"
        "assert not {'reasoning_gym', 'sympy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
