"""What is no dump gets one paragraph and exit code 2; nothing in it is executed."""

import gzip
import json
import os
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.cli import main
from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.inputs.lines import HEAD_ROWS
from lockstep.doctor.inputs.registry import open_dump
from lockstep.errors import DataError

GOOD: dict[str, Any] = {"token_ids": [1, 2], "loss_mask": [False, True]}
GOOD["rollout_logprobs"] = [None, -0.5]


class Boom:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def complaint(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        for _ in open_dump(path).chunks():
            pass
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and len(text) < 900
    return text


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table({**GOOD_COLUMNS, **columns}), path)
    return path


WHOLE, SHORT = "a list of whole numbers", "rollout_logprobs has 1 entries"
ROUTES = "per token and layer, equally long at all tokens, of"
GOOD_COLUMNS: dict[str, Any] = {name: [value] * 3 for name, value in GOOD.items()}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token_ids": [1.5, 2.0]}, f"must be {WHOLE}, from 0 to 2147483647, found 1.5"),
        ({"token_ids": ["1", "2"]}, "must be a list of whole numbers, found ['1', '2']"),
        ({"token_ids": [1, -2]}, "whole numbers, from 0 to 2147483647, found -2"),
        ({"token_ids": [2**31, 1]}, "from 0 to 2147483647, found 2147483648"),
        ({"token_ids": [True, False]}, "must be a list of whole numbers, found [True, False]"),
        ({"token_ids": [1, None]}, "token_ids is null; expected a list of whole numbers"),
        ({"token_ids": 7}, "must be a list of whole numbers, found 7."),
        ({"loss_mask": ["no", "yes"]}, "must be a list of true or false (or 1 and 0)"),
        ({"rollout_logprobs": [-0.5]}, f"{SHORT} and token_ids 2; expected one"),
        ({"rollout_logprobs": ["x", "y"]}, "must be a list of numbers, found ['x', 'y']"),
        (
            {"turn": [0.5, 1.0]},
            "turn must be a list of whole numbers, from -2147483648 to 2147483647, found 0.5",
        ),
        ({"policy_version": [2**40, 1]}, "to 2147483647, found 1099511627776"),
        ({"group": 1.5}, "group must be whole numbers, from -9223372036854775808 to"),
        ({"reward": "high"}, "reward must be numbers, found ['high']"),
        ({"engine_ids": [1, 2]}, "engine_ids must be a list per reply of whole numbers, found 1"),
        ({"routed_experts": [[[1, 2]]]}, "routed_experts has 1 entries and token_ids 2"),
        ({"routed_experts": [[[1, 2]], [[1]]]}, ROUTES),
        ({"routed_experts": [[[1]], [[1], [2]]]}, ROUTES),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_row(
    tmp_path: Path, change: dict[str, Any], expected: str
):
    found = complaint(lines(tmp_path / "rows.jsonl", {**GOOD, **change}))

    assert "rows.jsonl:1: " in found and expected in found, found


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("token_ids", [[1.5, 2.0]] * 3, "row 0: token_ids must be a list of whole"),
        ("token_ids", [[1, 2], [3, 4], [5, -6]], "row 2: token_ids must be"),
        ("token_ids", [["a", "b"]] * 3, "row 0: token_ids must be a list of whole"),
        ("token_ids", [[1, 2], [3], [4, 5]], "row 1: loss_mask has 2 entries and token_ids 1"),
        ("token_ids", [b"12"] * 3, "must be a list of whole numbers, found b'12'"),
        ("loss_mask", [["a", "b"]] * 3, "row 0: loss_mask must be a list of true"),
        ("rollout_logprobs", [[-1.0, None], None, [-1.0]], f"row 2: {SHORT}"),
    ],
)
def test_a_value_in_parquet_that_cannot_be_is_named_with_its_row(
    tmp_path: Path, name: str, values: list[Any], expected: str
):
    found = complaint(parquet(tmp_path / "rows.parquet", **{name: values}))

    assert expected in found, found


TEXT = {"content": "x"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "messages is text that is not JSON"),
        ("[" * 100_000, "messages is text that is not JSON: nested too deeply"),
        (["hi"], "message 0: a message must be an object, found str"),
        ([{"role": "tool", **TEXT}], "message 0: a tool message needs `name`"),  # verl's
        ([{"role": "function", **TEXT}], "role 'function' is not one of"),
        ([{"role": "user", "odd": 1, **TEXT}], "unknown keys ['odd']"),
        ([{"role": "tool", "tool_call_id": "9", **TEXT}], "id of a call of an assistant before it"),
    ],
)
@pytest.mark.parametrize("place", [0, 70])
def test_messages_that_cannot_be_read_are_left_out_with_the_reason(
    tmp_path: Path, messages: Any, reason: str, place: int
):
    said = [{**GOOD, "messages": [{"role": "user", **TEXT}]} for _ in range(80)]
    said[place]["messages"] = messages
    dump = open_dump(lines(tmp_path / "rows.jsonl", *said))
    [rows], is_head = dump.chunks(), place < HEAD_ROWS
    assert len(rows) == 80 and ("messages" in dump.has) is not is_head
    assert is_head or [i for i, one in enumerate(rows.messages) if one is None] == [place]
    assert reason in dump.notes[0] and f"rows.jsonl:{place + 1}: " in dump.notes[0]
    assert (reason in dump.lacks.get("messages", "")) is is_head


def test_a_row_without_what_every_row_must_have_is_refused(tmp_path: Path):
    null = lines(tmp_path / "a.jsonl", GOOD, {**GOOD, "token_ids": None})
    missing = lines(tmp_path / "b.jsonl", GOOD, {"token_ids": [1]})

    assert "a.jsonl:2: token_ids is null or missing" in complaint(null)
    assert "b.jsonl:2: loss_mask is null or missing" in complaint(missing)


def test_values_of_two_kinds_in_one_column_are_refused(tmp_path: Path):
    mixed = lines(tmp_path / "a.jsonl", GOOD, {**GOOD, "token_ids": ["1", "2"]})
    inside = lines(tmp_path / "b.jsonl", GOOD, {**GOOD, "token_ids": [1, "2"]})
    huge = lines(tmp_path / "c.jsonl", {**GOOD, "token_ids": [1, 2**70]})

    assert f"a.jsonl:2: token_ids must be {WHOLE}, found ['1', '2']" in complaint(mixed)
    assert "b.jsonl:2: token_ids must be a list of whole numbers" in complaint(inside)
    assert "c.jsonl:1: token_ids must be a list of whole numbers" in complaint(huge)


def test_a_file_that_was_cut_off_is_said_to_be(tmp_path: Path):
    whole = parquet(tmp_path / "rows.parquet").read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole[:-9])
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(whole[:4] + bytes(len(whole) - 12) + whole[-8:])
    text = lines(tmp_path / "rows.jsonl", GOOD)
    text.write_text(text.read_text()[:-20])

    assert "its end is missing" in complaint(cut)
    assert "cannot be read" in complaint(damaged)
    assert "rows.jsonl:1: the file ends in the middle of a row" in complaint(text)


def test_every_bit_that_flips_in_a_parquet_file_is_read_or_refused(tmp_path: Path):
    # Nested lists have statistics over which pyarrow ends the process if they are looked at.
    routes = [[[[1, 2], [3, 4]]] * 2] * 3
    whole = parquet(tmp_path / "rows.parquet", routed_experts=routes).read_bytes()
    path = tmp_path / "flipped.parquet"
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            for _ in open_dump(path).chunks():
                pass
        except DataError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty (0 bytes)"),
        (b"\n\n", "is neither Parquet nor JSON lines"),
        (b"PAR1", "its end is missing"),
        (b"[" + json.dumps(GOOD).encode() + b"]", "one JSON array"),
        (b"[" * 100_000, "one JSON array"),
        (b"{\n  \"token_ids\": [1]\n}\n", "Expected one object per line"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"token_ids": [1], "loss_mask": tru}\n', "not JSON (Expecting value"),
        (b'{"prompt": "a", "completion": "b"}\n', "has no column token_ids"),
        (b'{"prompt": "a", "completion": "b", "advantage": 0}\n', "has TRL's texts"),
        (b'{"tokens": [1], "loss_mask": [1]}\n', "There is tokens: if that is it, rename it."),
        (b'{"lockstep.doctor": {}}\n', "has no rows"),
        (b'{"lockstep.doctor": {"modle": "x"}}\n', "'modle'"),
        (b'{"lockstep.doctor": {"stop_ids": 3}}\n', "stop_ids must be a list of ids, found 3"),
        (b'{"lockstep.doctor": {"version": 9}}\n', "its schema is of version 9"),
        (b'{"token_ids": [1], "loss_mask": [1], "text": "\xff"}\n', "byte 0xff in position 46"),
        (b"{}\n" * 2 + b"7\n", "expected a JSON object, one row; found a int"),
        (json.dumps(GOOD).encode("utf-16"), "neither Parquet nor JSON lines"),
        (json.dumps(GOOD).encode("utf-16-le"), "neither Parquet nor JSON lines"),
        (gzip.compress(json.dumps(GOOD).encode(), mtime=0), "compressed with gzip"),
        (b"ARROW1\0\0", "Arrow IPC"),
        (bytes(5000), "zero bytes"),
        (b"hello", "it begins with b'hello'"),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_named_by_its_first_bytes(tmp_path: Path, content: bytes, expected: str):
    for name in ("rows.jsonl", "rows.parquet", "rows"):
        path = tmp_path / name
        path.write_bytes(content)

        assert expected in complaint(path)


def test_a_byte_order_mark_and_blank_lines_are_no_fault(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + json.dumps(GOOD).encode() + b"\r\n\r\n")

    assert [len(rows) for rows in open_dump(path).chunks()] == [1]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "rows.jsonl", "rows.parquet"])
def test_nothing_in_a_pickle_is_executed(tmp_path: Path, name: str, protocol: int):
    path, fired = tmp_path / name, tmp_path / "fired"
    path.write_bytes(pickle.dumps(Boom(fired), protocol=protocol))

    text = complaint(path)

    assert not fired.exists()
    assert "is a pickle" in text and "nothing of it was run" in text
    with open(path, "rb") as file:
        pickle.load(file).close()
    assert fired.exists(), "the pickle does nothing, so that the test showed nothing"


def test_a_zip_archive_is_not_opened(tmp_path: Path):
    path = tmp_path / "rows.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rows.jsonl", json.dumps(GOOD))

    assert "is a zip archive" in complaint(path)


def test_a_sparse_file_of_10_gb_is_refused_at_once(tmp_path: Path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, head in (
        ("a.jsonl", b""), ("b.jsonl", json.dumps(GOOD).encode() + b"\n"), ("c.parquet", b"PAR1")
    ):  # fmt: skip
        path = tmp_path / name
        path.write_bytes(head)
        os.truncate(path, 10 << 30)

        assert "zero bytes" in complaint(path) or "its end is missing" in complaint(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10, f"{grown} KiB"


def test_a_line_without_end_is_refused_before_it_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lockstep.doctor.inputs.lines.MAX_LINE_BYTES", 3 << 20)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"token_ids": [' + b"1," * (4 << 20))

    assert "rows.jsonl:1: the line is longer than 3 MiB" in complaint(path)


def test_a_place_without_rows_is_said_to_be_one(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("x")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    none = tmp_path / "none.parquet"
    pq.write_table(pa.table({"token_ids": pa.array([], pa.list_(pa.int32()))}), none)

    assert "it has nothing" in complaint(empty)
    assert "without a .parquet or .jsonl file; it has notes.txt" in complaint(other)
    assert "is a link to nothing" in complaint(link)
    assert "is neither a file nor a directory" in complaint(pipe)
    assert "has no rows: a Parquet file of 0 rows" in complaint(none)
    assert "does not exist" in complaint(tmp_path / "absent")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_said_to_be_one(tmp_path: Path):
    path = lines(tmp_path / "rows.jsonl", GOOD)
    path.chmod(0)

    assert "cannot be read: Permission denied" in complaint(path)


def test_parts_with_other_columns_are_refused(tmp_path: Path):
    lines(tmp_path / "part-1.jsonl", GOOD)
    lines(tmp_path / "part-2.jsonl", {**GOOD, "turn": [-1, 0]})

    assert "part-2.jsonl has the column turn and" in complaint(tmp_path)


def test_a_column_that_comes_late_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.doctor.inputs.native.HEAD_TOKENS", 1)
    path = lines(tmp_path / "rows.jsonl", GOOD, {**GOOD, "turn": [-1, 0]})

    assert "rows.jsonl:2: the first row with turn" in complaint(path)


def test_the_command_says_it_in_one_paragraph_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = lines(tmp_path / "rows.jsonl", {**GOOD, "token_ids": [1, -2]})

    assert main(["doctor", str(path)]) == 2
    said = capsys.readouterr().err
    assert "DataError" in said and "Traceback" not in said
    assert main(["doctor", str(path), "--format", "rosw"]) == 2
    assert "Did you mean 'rows'?" in capsys.readouterr().err
    assert main(["doctor", "a\0b"]) == 2


def test_rows_without_a_token_are_no_consistent_run(tmp_path: Path):
    empty = {name: [] for name in GOOD if isinstance(GOOD[name], list)}
    path = lines(tmp_path / "rows.jsonl", *[{**GOOD, **empty}] * 3)
    with pytest.raises(DataError, match="3 rows"):
        diagnose(path)
