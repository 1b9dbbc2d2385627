"""Public sets of problems, in small files of the schemas that they were published in."""

import asyncio
import json
from importlib.util import find_spec

import pyarrow
import pyarrow.parquet
import pytest

from lockstep.agent.config import AgentConfig
from lockstep.envs.math.config import FORM_INSTRUCTIONS, MathConfig
from lockstep.errors import DataError
from lockstep.recipes.fitting import configure

GSM8K = [
    {"question": f"Q{i}?", "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
    for i in range(400, 640)
]
DAPO_PROMPT = "Solve it. The last line is of the form Answer: $Answer.\n\n{}\n\nRemember."


def dapo_row(i, answer=None):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_PROMPT.format(i), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer or str(i), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uuid-{i}"},
    }


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def all_of(config, split):
    source = config.tasks(split=split, seed=0)
    return [next(source) for _ in range(len(source))]


def opening_of(config, task):
    return list(asyncio.run(config.environment(task, AgentConfig()).reset()))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_gsm8k_is_read_as_published_with_its_test_split(tmp_path, suffix):
    name = "main/{}-00000-of-00001.parquet" if suffix == "parquet" else "{}.jsonl"
    write(tmp_path / name.format("train"), GSM8K[:100])
    write(tmp_path / name.format("test"), GSM8K[100:120])
    config = MathConfig(source="gsm8k", path=str(tmp_path))
    config.check()
    tasks = all_of(config, "train")
    assert len(tasks) == 100 and len(all_of(config, "eval")) == 20
    assert {t.payload["answer"] for t in tasks} == {str(2 * i) for i in range(400, 500)}
    said = [m.content for m in opening_of(config, tasks[0])]
    assert said == [FORM_INSTRUCTIONS["hashes"], tasks[0].payload["question"]]


def test_the_hundredfold_rows_of_dapo_are_one_problem_each_and_their_prompt_is_whole(tmp_path):
    rows = [dapo_row(i) for i in range(200)] * 3
    config = MathConfig(
        source="dapo", path=write(tmp_path / "dapo-math-17k.parquet", rows), eval_share=0.2
    )
    train, held_out = all_of(config, "train"), all_of(config, "eval")
    assert len(train) + len(held_out) == 200 and 20 < len(held_out) < 60
    assert not {t.id for t in train} & {t.id for t in held_out}
    (message,) = opening_of(config, train[0])
    assert message.role == "user" and message.content.startswith("Solve it.")


def test_aime_is_read_from_either_repository_and_can_be_what_another_set_is_tested_on(tmp_path):
    one = {
        "id": 60,
        "problem": "P1",
        "solution": "long",
        "answer": "204",
        "url": "u",
        "year": "2024",
    }
    other = {"id": 0, "problem": "P1", "solution": "\\boxed{204}", "url": "u"}
    dapo = write(tmp_path / "dapo.parquet", [dapo_row(i) for i in range(10)])
    for number, row in enumerate((one, other)):
        path = write(tmp_path / f"aime-{number}.parquet", [row])
        config = MathConfig(source="dapo", path=dapo, eval_source="aime", eval_path=path)
        config.check()
        (task,) = all_of(config, "eval")
        assert task.payload == {"question": "P1", "answer": "204"}
        assert len(all_of(config, "train")) == 10
        assert opening_of(config, task)[0].content == FORM_INSTRUCTIONS["boxed"]


def test_a_file_of_ones_own_is_split_by_its_questions(tmp_path):
    rows = [{"question": f"Q{i}", "answer": i} for i in range(300)]
    config = MathConfig(source="file", path=write(tmp_path / "own.jsonl", rows), eval_share=0.1)
    held_out = {t.id for t in all_of(config, "eval")}
    shuffled = MathConfig(
        source="file", path=write(tmp_path / "other.jsonl", rows[::-1]), eval_share=0.1
    )
    assert held_out == {t.id for t in all_of(shuffled, "eval")}


def malformed():
    """(source, rows, text of the error)"""
    good = GSM8K[:3]
    return {
        "no mark": ("gsm8k", [*good, {"question": "Q", "answer": "72"}], ":4: answer must end in"),
        "no question": ("gsm8k", [{"question": " ", "answer": "#### 1"}], ":1: question must"),
        "columns": ("gsm8k", [dapo_row(1)], "no column 'question', which gsm8k has; found"),
        "own columns": ("file", [{"problem": "Q", "answer": "1"}], ":1: no column 'question'"),
        "two messages": (
            "dapo",
            [{**dapo_row(1), "prompt": [{"content": "a", "role": "user"}] * 2}],
            ":1: expected prompt=",
        ),
        "contradiction": ("dapo", [dapo_row(1), dapo_row(1, "2")], ":2: answer '2': the same"),
        "no box": ("aime", [{"problem": "P", "solution": "204"}], ":1: neither `answer` nor"),
    }  # fmt: skip


@pytest.mark.parametrize("name", malformed())
def test_a_malformed_row_is_refused_with_its_place(tmp_path, name):
    source, rows, message = malformed()[name]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError) as error:
        MathConfig(source=source, path=path).check()
    assert "rows.jsonl" in str(error.value) and message in str(error.value)


def test_a_row_of_a_parquet_file_is_named_by_its_number(tmp_path):
    path = write(tmp_path / "t.parquet", [*GSM8K[:5], {"question": "Q", "answer": "none"}])
    with pytest.raises(DataError, match=r"t\.parquet:row 6\b"):
        MathConfig(source="gsm8k", path=path).check()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        MathConfig(source="gsm8k", path=str(tmp_path / "broken.parquet")).check()


@pytest.mark.skipif(find_spec("math_verify"), reason="math-verify is installed, and grades it")
def test_an_answer_that_needs_math_verify_names_the_extra_or_is_left_out(tmp_path):
    rows = [{"question": f"Q{i}", "answer": "\\sqrt{2}" if i == 7 else "1"} for i in range(300)]
    path = write(tmp_path / "own.jsonl", rows)
    with pytest.raises(DataError, match=r"own\.jsonl:8.*lockstep-rl\[math\]"):
        MathConfig(source="file", path=path).check()
    config = MathConfig(source="file", path=path, bad_rows="drop")
    assert len(all_of(config, "train")) + len(all_of(config, "eval")) == 299


def test_a_question_of_both_splits_is_refused_or_not_trained_on(tmp_path):
    write(tmp_path / "train.jsonl", GSM8K[:10])
    write(tmp_path / "test.jsonl", GSM8K[9:12])
    with pytest.raises(DataError, match=r"train\.jsonl:10.*test\.jsonl:1"):
        MathConfig(source="gsm8k", path=str(tmp_path)).check()
    config = MathConfig(source="gsm8k", path=str(tmp_path), bad_rows="drop")
    assert len(all_of(config, "train")) == 9 and len(all_of(config, "eval")) == 3


def test_contradicting_questions_are_left_out_in_all_their_rows(tmp_path):
    rows = [*(dapo_row(i) for i in range(200)), dapo_row(3, "4"), dapo_row(3)]
    path = write(tmp_path / "dapo.parquet", rows)
    config = MathConfig(source="dapo", path=path, bad_rows="drop", eval_share=0.2)
    assert len(all_of(config, "train")) + len(all_of(config, "eval")) == 199


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        MathConfig(source="gsm8k", path="./nowhere").check()
    with pytest.raises(DataError, match=r"main/train-\*\.parquet"):
        MathConfig(source="gsm8k", path=str(tmp_path)).check()
    with pytest.raises(DataError, match=r"task\.path"):
        MathConfig(source="file").check()
    with pytest.raises(DataError, match=r"\b1\b.*\b0\b"):
        MathConfig(source="gsm8k", path=write(tmp_path / "one.jsonl", GSM8K[:1])).check()


def test_without_a_path_and_a_network_the_error_names_what_to_download(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(DataError, match=r"--repo-type.*openai/gsm8k"):
        MathConfig(source="gsm8k").check()


def test_gsm8k_leaves_its_thinking_switch_to_qwen3_and_other_models_their_own_format():
    def renderer(*words):
        return configure("gsm8k", overrides=words).renderer

    assert renderer("model=tiny-qwen3").enable_thinking is False
    assert renderer("model=tiny-gpt-oss") is None  # the model's: harmony
    given = renderer("model=tiny-gpt-oss", "renderer=chatml", "renderer.enable_thinking=false")
    assert given == renderer("model=tiny-qwen3")
