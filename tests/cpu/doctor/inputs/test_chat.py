"""Dialogues with ids: as vLLM answers (return_token_ids), as NeMo-Gym writes its rollouts, and as
messages of one's own."""

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.doctor.inputs.chat import ChatDump
from lockstep.doctor.inputs.registry import open_dump
from lockstep.errors import DataError

nan = np.nan


def save(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows_of(tmp_path: Path, *lines: dict):
    dump = open_dump(save(tmp_path / "a.jsonl", *lines))
    assert isinstance(dump, ChatDump)
    [rows] = dump.chunks()
    assert all(getattr(rows, name) is not None for name in dump.has)
    assert not dump.has & dump.lacks.keys()
    return rows


def dialogue(second_prompt: list[int]) -> dict:
    return {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}],
                "prompt_token_ids": [5, 6],
                "token_ids": [10, 11],
                "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"logprob": -0.25}]},
            },
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            {
                "role": "assistant",
                "content": "4",
                "prompt_token_ids": second_prompt,
                "token_ids": [12],
                "logprobs": [-1.0],
            },
        ],
        "reward": 1,
    }


def test_replies_that_continue_each_other_are_one_row(tmp_path):
    rows = rows_of(tmp_path, dialogue([5, 6, 10, 11, 20, 21]))
    assert rows.row_ids == ("0",)
    assert rows.token_ids.tolist() == [5, 6, 10, 11, 20, 21, 12]
    assert rows.turns.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert rows.loss_mask.tolist() == (rows.turns >= 0).tolist()
    expected = np.float32([nan, nan, -0.5, -0.25, nan, nan, -1.0])
    assert np.array_equal(rows.rollout_logprobs, expected, equal_nan=True)
    assert rows.prompt_lengths.tolist() == [2] and rows.rewards.tolist() == [1.0]
    assert [m.role for m in rows.messages[0]] == ["user", "assistant", "tool", "assistant"]


def test_a_prompt_that_reads_otherwise_begins_a_new_row(tmp_path):
    rows = rows_of(tmp_path, dialogue([5, 6, 10, 13, 20, 21]))
    assert rows.row_ids == ("0", "0.1")
    assert rows.token_ids.tolist() == [5, 6, 10, 11, 5, 6, 10, 13, 20, 21, 12]
    assert rows.turns.tolist() == [-1, -1, 0, 0, -1, -1, -1, -1, -1, -1, 0]
    assert [len(m) for m in rows.messages] == [2, 4]


def test_a_rollout_of_nemo_gym_is_read_from_its_output(tmp_path):
    line = {
        "responses_create_params": {"input": [{"role": "user", "content": "2 + 2?"}]},
        "response": {
            "id": "resp-1",
            "output": [
                {"type": "reasoning", "summary": []},
                {
                    "type": "function_call", "name": "add", "arguments": "{}", "call_id": "1",
                    "prompt_token_ids": [5, 6], "generation_token_ids": [10, 11],
                    "generation_log_probs": [-0.5, -0.25],
                },
                {"type": "function_call_output", "call_id": "1", "output": "4"},
                {
                    "type": "message", "role": "assistant",
                    "content": [{"type": "output_text", "text": "4"}],
                    "prompt_token_ids": [5, 6, 10, 11, 20], "generation_token_ids": [12],
                    "generation_log_probs": [-1.0],
                },
            ],
        },
        "reward": 0.5,
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
    }  # fmt: skip
    rows = rows_of(tmp_path, line)
    assert rows.token_ids.tolist() == [5, 6, 10, 11, 20, 12]
    assert rows.rollout_logprobs[[2, 3, 5]].tolist() == [-0.5, -0.25, -1.0]
    assert rows.groups.tolist() == [3] and rows.rewards.tolist() == [0.5]


def test_answers_of_vllm_are_rows_by_their_choices(tmp_path):
    chat = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "prompt_token_ids": [5, 6],
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", "content": "4"},
                "logprobs": {"content": [{"token": "4", "logprob": -0.5 * (i + 1)}]},
                "token_ids": [10 + i],
            }
            for i in range(2)
        ],
    }
    logprobs = {"tokens": ["token_id:12"], "token_logprobs": [-1.5]}
    choice = {"text": "4", "prompt_token_ids": [7], "token_ids": [12], "logprobs": logprobs}
    rows = rows_of(tmp_path, chat, {"object": "text_completion", "choices": [choice]})
    assert rows.row_ids == ("0", "0.1", "1")
    assert rows.token_ids.tolist() == [5, 6, 10, 5, 6, 11, 7, 12]
    assert rows.rollout_logprobs[[2, 5, 7]].tolist() == [-0.5, -1.0, -1.5]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt_token_ids": None}, "reply 1"),
        ({"logprobs": [-0.5]}, r"\b2\b.*\b1\b"),
        ({"token_ids": [10, "x"]}, "token_ids"),
        ({"token_ids": [10, 1 << 70]}, "token_ids.*32"),
        ({"logprobs": {"content": 3}}, r"\b2\b.*\b3\b"),
        ({"logprobs": [-0.5, 1 << 2000]}, r"\b2\b.*\[-0.5, 1"),
    ],
)
def test_what_contradicts_itself_is_named_with_its_line(tmp_path, changed, message):
    line = dialogue([5, 6, 10, 11, 20])
    line["messages"][1] |= changed
    with pytest.raises(DataError, match=f"a.jsonl:1: .*{message}"):
        open_dump(save(tmp_path / "a.jsonl", line))


def test_messages_with_images_are_left_out_with_the_reason(tmp_path):
    line = dialogue([5, 6, 10, 11, 20])
    line["messages"][0]["content"] = [{"type": "image_url"}]
    dump = open_dump(save(tmp_path / "a.jsonl", line))
    assert "messages" not in dump.has and "Only text is read here" in dump.lacks["messages"]


def test_a_dialogue_without_ids_is_not_taken_for_one_with_them(tmp_path):
    failed = {"messages": [{"role": "user", "content": "hi"}]}
    path = save(tmp_path / "a.jsonl", failed)
    assert not ChatDump.recognises(path)
    with pytest.raises(DataError, match="no row of the format chat"):
        open_dump(path, format="chat")
    assert rows_of(tmp_path, failed, dialogue([5, 6, 10, 11, 20])).row_ids == ("1",)
