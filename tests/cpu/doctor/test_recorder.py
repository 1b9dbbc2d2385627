"""The recorder for other programs: what it writes is read, and judged with the engine's ids."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import lockstep
import lockstep.doctor.recorder
from lockstep.doctor.recorder import Recorder

FILE = Path(lockstep.doctor.recorder.__file__)


def recorded(path, *, lose=0):
    recorder = Recorder(str(path), temperature=1.0, stop_ids=[2], tools=[{"name": "find"}])
    for number in range(9):
        prompt, first, glue, last = [5, 6, 7 + number], [20, 21, 2], [5, 6, 8], [22, 23, 24, 2]
        row = recorder.row(messages=[{"role": "user", "content": "where?"}])
        logprobs = [-0.1 - 0.01 * number, -1.5, -0.2], [-0.5, -2.1, -0.9, -0.3]
        row.reply(prompt, first, logprobs[0])
        row.say({"role": "assistant", "content": "look"},
                {"role": "tool", "name": "find", "content": "x"})  # fmt: skip
        row.reply([*prompt, *first, *glue], last, logprobs[1], finish_reason="stop", version=3)
        row.say({"role": "assistant", "content": "there"})
        ids = [*prompt, *first, *glue, *last]
        mask = [0] * 3 + [1] * 3 + [0] * 3 + [1] * 4
        trainer = [0.0] * 3 + logprobs[0] + [0.0] * 3 + logprobs[1]
        size = len(ids) - lose
        row.train(ids[:size], mask[:size], trainer[:size], step=1, reward=0.5)
    recorder.close()
    return lockstep.diagnose(path)


def test_sound_rows_are_consistent_and_every_record_is_there(tmp_path):
    found = recorded(tmp_path / "rows.jsonl")
    assert found.outcome == "consistent"
    assert {"engine_ids", "engine_prompt_ids", "messages", "policy_version", "finish_reasons",
            "rewards", "steps"} <= found.dump.has  # fmt: skip
    assert found.setting.tools and found.setting.stop_ids == {2}


def test_a_lost_end_is_proved(tmp_path):
    found = recorded(tmp_path / "rows.jsonl", lose=1)
    cause, finding = found.causes[0]
    assert cause.name == "missing_final"
    assert found.certainty_of(cause, finding)[0] == "proved"


def test_numbers_of_numpy_and_torch_are_written_and_an_engine_may_lack_a_log_prob(tmp_path):
    recorder = Recorder(tmp_path / "rows.jsonl", temperature=np.float32(1), stop_ids={2})
    row = recorder.row()
    row.reply(np.array([5]), torch.tensor([7, 2]), [np.float32(-0.5), None], version=np.int64(3))
    row.train([5, 7, 2], [0, 1, 1], [0, -0.5, -0.1], reward=torch.tensor(1.0), group=np.int64(0))
    [head, line] = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert head["lockstep.doctor"] == {"temperature": 1.0, "stop_ids": [2]}
    assert line["rollout_logprobs"] == [None, -0.5, None] and line["reward"] == 1.0
    with pytest.raises(ValueError, match="trainer_logprobs: 2 for 3 ids, not one each"):
        row.train([5, 7, 2], [0, 1, 1], [-0.5, -0.1])
    with pytest.raises(ValueError, match="logprobs: 1 for 2 ids"):
        row.reply([5], [7, 2], [-0.5])


def test_it_is_one_short_file_that_needs_nothing_of_lockstep():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 100 and "import lockstep" not in text
    assert "from lockstep" not in text
    assert "Recorder" in runpy.run_path(str(FILE))
