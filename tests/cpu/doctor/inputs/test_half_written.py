"""Dumps of a running trainer are read to where they are whole, and say what was left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cpu.doctor.inputs.test_run_input import write_run

from lockstep.cli import main
from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.native import RowsDump
from lockstep.doctor.inputs.registry import open_dump
from lockstep.errors import DataError

ROW: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "loss_mask": [False, True, True],
    "rollout_logprobs": [None, -0.5, -0.25],
}
EXPORT = {
    "token_ids": [5, 6, 7],
    "loss_mask": [False, True, True],
    "inference_logprobs": [0.0, -0.5, -0.25],
    "trainer_logprobs": [0.0, -0.5, -0.25],
}


def lines(path: Path, *rows: object, torn: int = 0) -> Path:
    """JSON lines; the last one lacks its last `torn` bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(text[: len(text) - torn])
    return path


def num_rows(path: Path) -> int:
    return sum(len(rows) for rows in open_dump(path).chunks())


def cut(path: Path, num_bytes: int = 30) -> Path:
    path.write_bytes(path.read_bytes()[:-num_bytes])
    return path


@pytest.mark.parametrize("row", [ROW, EXPORT], ids=["rows", "prime-rl"])
def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path, row: dict[str, Any]):
    path = lines(tmp_path / "rank_0.jsonl", row, row, row, torn=20)

    assert num_rows(path) == 2
    [note] = open_dump(path).notes
    left = len(json.dumps(row)) - 19
    told = f"{path} ends in the middle of a row: its last {left} bytes are left out"
    assert note.startswith(told)
    assert note.endswith("It is still being written, or was cut off")


def test_a_last_line_that_lacks_only_its_end_of_line_is_whole(tmp_path: Path):
    path = lines(tmp_path / "rows.jsonl", ROW, ROW, torn=1)

    assert num_rows(path) == 2 and not open_dump(path).notes


def test_a_torn_line_with_others_behind_it_is_an_error(tmp_path: Path):
    path = lines(tmp_path / "rows.jsonl", ROW, ROW, torn=20)
    with open(path, "a") as file:
        file.write("\n" + json.dumps(ROW) + "\n")

    with pytest.raises(DataError, match=r"rows\.jsonl:2.*JSON"):
        num_rows(path)


def test_a_file_whose_only_line_is_torn_is_an_error(tmp_path: Path):
    path = lines(tmp_path / "rows.jsonl", ROW, torn=20)

    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        num_rows(path)


def test_what_a_trainer_adds_while_it_is_read_is_not_read(tmp_path: Path):
    path = lines(tmp_path / "rows.jsonl", ROW, ROW, ROW, torn=20)
    dump = open_dump(path)
    with open(path, "ab") as file:
        file.write(json.dumps(ROW).encode()[-19:] + b"\n" + json.dumps(ROW).encode() + b"\n")

    assert sum(len(rows) for rows in dump.chunks()) == 2
    assert num_rows(path) == 4


def test_the_newest_files_of_a_directory_may_be_torn(tmp_path: Path):
    """Of prime-rl: two ranks write the last step at the same time."""
    for step in range(9, 11):
        for rank in range(2):
            torn = 20 if step == 10 else 0
            lines(tmp_path / f"step_{step}" / f"rank_{rank}.jsonl", EXPORT, EXPORT, torn=torn)

    dump = open_dump(tmp_path)

    assert dump.format == "prime-rl" and num_rows(tmp_path) == 6
    assert [note.split(" ends ")[0] for note in dump.notes] == [
        str(tmp_path / "step_10" / f"rank_{rank}.jsonl") for rank in range(2)
    ]


def test_a_torn_file_with_a_later_one_is_an_error(tmp_path: Path):
    lines(tmp_path / "step_1.jsonl", ROW, ROW, torn=20)
    lines(tmp_path / "step_2.jsonl", ROW, ROW)

    with pytest.raises(DataError, match=r"step_1\.jsonl:2"):
        num_rows(tmp_path)


def test_an_earlier_step_that_is_torn_is_an_error_in_every_form(tmp_path: Path):
    for step in range(2):
        pq.write_table(pa.table({n: [v] for n, v in ROW.items()}), tmp_path / f"s{step}.parquet")
    cut(tmp_path / "s0.parquet")

    with pytest.raises(DataError, match="its end"):
        num_rows(tmp_path)


def test_the_newest_parquet_file_without_its_footer_is_left_out(tmp_path: Path):
    for step in range(3):
        pq.write_table(pa.table({n: [v] for n, v in ROW.items()}), tmp_path / f"s{step}.parquet")
    cut(tmp_path / "s2.parquet")

    dump = open_dump(tmp_path)

    size = (tmp_path / "s2.parquet").stat().st_size
    assert isinstance(dump, RowsDump) and num_rows(tmp_path) == 2
    [note] = dump.notes
    told = f"{tmp_path / 's2.parquet'} ({size:,} bytes) is left out: its end is miss"
    assert note.startswith(told)


def test_the_newest_file_may_be_empty_yet(tmp_path: Path):
    lines(tmp_path / "step_1.jsonl", ROW)
    (tmp_path / "step_2.jsonl").touch()

    assert num_rows(tmp_path) == 1
    notes = "".join(open_dump(tmp_path).notes)
    assert "step_2.jsonl (0 bytes) is left out: nothing is in it yet" in notes


def test_the_newest_file_of_torch_that_is_cut_off_is_left_out(tmp_path: Path):
    ids = np.array([[5, 6]])
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    batch = {name: torch.from_numpy(ids) for name in names}
    for step in range(3):
        torch.save(batch, tmp_path / f"step_{step}.pt")
    cut(tmp_path / "step_2.pt")

    dump = open_dump(tmp_path)

    assert dump.format == "trl" and num_rows(tmp_path) == 2
    assert "step_2.pt" in dump.notes[0] and "its end is missing" in dump.notes[0]


def test_a_run_whose_last_part_and_metrics_are_torn_is_read_without_them(tmp_path: Path):
    path = write_run(tmp_path / "run", num_steps=3)
    whole = num_rows(path)
    cut(path / "trajectories" / "step-000002.parquet")
    cut(path / "metrics.jsonl", 5)

    dump = open_dump(path)

    assert sum(len(rows) for rows in dump.chunks()) == whole * 2 // 3
    assert [row["step"] for row in dump.step_metrics()] == [0, 1]
    notes = "; ".join(dump.notes)
    assert "step-000002.parquet" in notes and "metrics.jsonl ends in the middle of a row" in notes


def test_the_screen_and_the_page_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = lines(tmp_path / "rows.jsonl", ROW, ROW, torn=20)
    page = tmp_path / "page.html"

    main(["doctor", str(path), "--out", str(page)])

    said = " ".join(capsys.readouterr().out.split())
    assert "ends in the middle of a row" in said
    assert "ends in the middle of a row" in page.read_text()
    assert "diagnosis.notes.map" in page.read_text()
    assert diagnose(path).to_json()["notes"]
