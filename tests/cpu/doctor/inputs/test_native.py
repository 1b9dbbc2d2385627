"""The doctor's own columns: what is written is read, in parts, and what is not there is said."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.cli import main
from lockstep.doctor.inputs.assemble import BY_NAME, COLUMNS
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.inputs.native import RowsDump, facts_to_dict, write_rows
from lockstep.doctor.inputs.registry import EXAMPLE, open_dump
from lockstep.doctor.rows import Rows
from lockstep.errors import AlignmentError, DataError
from lockstep.types import Message, ToolCall

NUM_ROWS = 7
SUFFIXES = (".parquet", ".jsonl")


def some_rows() -> Rows:
    """Rows with every column, and values that are strange and no read errors."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(0, 6, NUM_ROWS)
    n = int(sizes.sum())
    logprobs = np.where(draw.random(n) < 0.3, np.nan, -draw.random(n)).astype(np.float32)
    logprobs[:2] = -np.inf, 0.5
    dialogue = (
        Message(role="user", content="h\ud800\u00e9"),
        Message(role="assistant", thinking="x", tool_calls=(ToolCall(name="f", arguments="{}"),)),
        Message(role="tool", name="f", content="ok"),
    )
    return Rows(
        row_ids=tuple(f"r{i}" for i in range(NUM_ROWS)),
        offsets=np.cumsum([0, *sizes]).astype(np.int64),
        token_ids=draw.integers(0, 2**31 - 1, n).astype(np.int32),
        loss_mask=draw.random(n) < 0.5,
        rollout_logprobs=logprobs,
        trainer_logprobs=-draw.random(n).astype(np.float32),
        is_sampled=draw.random(n) < 0.5,
        turn=draw.integers(-1, 3, n).astype(np.int32),
        policy_version=draw.integers(-1, 3, n).astype(np.int32),
        trainer_version=draw.integers(0, 3, NUM_ROWS),
        advantages=draw.random(n).astype(np.float32),
        routed_experts=draw.integers(-1, 8, (n, 2, 3)).astype(np.int16),
        trainer_routed_experts=draw.integers(-1, 8, (n, 2, 3)).astype(np.int16),
        prompt_lengths=draw.integers(-2, 3, NUM_ROWS),
        rewards=np.where(draw.random(NUM_ROWS) < 0.3, np.nan, draw.random(NUM_ROWS)),
        groups=draw.integers(0, 3, NUM_ROWS),
        steps=draw.integers(0, 3, NUM_ROWS),
        messages=tuple(dialogue if i % 3 else None for i in range(NUM_ROWS)),
        finish_reasons=("stop", None, "length", "stop", None, None, "stop")[:NUM_ROWS],
        texts=tuple(None if i % 2 else "t\u00e9\n" for i in range(NUM_ROWS)),
        engine_ids=by_turn(0),
        engine_prompt_ids=by_turn(5),
    )


def by_turn(first: int) -> tuple[tuple[np.ndarray, ...] | None, ...]:
    return tuple(
        None if i == 1 else tuple(np.arange(first, first + k, dtype=np.int32) for k in range(i))
        for i in range(NUM_ROWS)
    )


def assert_same(a: Rows, b: Rows) -> None:
    for f in fields(Rows):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, f.name
            np.testing.assert_array_equal(x, y, f.name)
        elif f.name in ("engine_ids", "engine_prompt_ids"):
            mine, theirs = ([v and [t.tolist() for t in v] for v in both] for both in (x, y))
            assert mine == theirs
        else:
            assert x == y, f.name


def save(path: Path, rows: Rows, facts: Facts | None = None) -> None:
    """As Parquet, or as a trainer of one's own writes JSON lines."""
    if path.suffix == ".parquet":
        write_rows(path, [rows], facts)
        return
    lines = [{"lockstep.doctor": facts_to_dict(facts or Facts())}]
    for i, tokens in enumerate(rows.slices):
        line = {}
        for column in COLUMNS:
            if (value := getattr(rows, column.field)) is not None:
                is_token = column.shape in ("token", "token or row", "route")
                line[column.name] = value[tokens].tolist() if is_token else value[i]
        lines.append(line)
    text = "".join(json.dumps(line, default=plain) + "\n" for line in lines)
    path.write_text(text.replace("NaN", "null"))


def plain(value):
    return value.to_dict() if isinstance(value, Message) else value.tolist()


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(*ids: int, **more: object) -> dict[str, object]:
    return {"token_ids": list(ids), "loss_mask": [True] * len(ids), **more}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written_is_read_back_in_every_column(tmp_path: Path, suffix: str):
    rows = some_rows()
    path = tmp_path / f"rows{suffix}"
    facts = Facts(trainer="verl", stop_ids=frozenset({3, 1}), top_k=0, temperature=1.0)

    save(path, rows, facts)

    dump = open_dump(path)
    assert isinstance(dump, RowsDump) and dump.facts == facts
    assert dump.has == {c.field for c in COLUMNS} and dump.lacks == {}
    (read,) = dump.chunks()
    assert_same(rows, read.with_(absent=None))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_chunks_are_of_at_most_max_tokens_and_lose_no_row(tmp_path: Path, suffix: str):
    rows = some_rows()
    save(tmp_path / f"rows{suffix}", rows)

    chunks = list(open_dump(tmp_path / f"rows{suffix}").chunks(max_tokens=6))

    assert all(c.num_tokens <= 6 or len(c) == 1 for c in chunks) and len(chunks) > 2
    assert sum((c.row_ids for c in chunks), ()) == rows.row_ids
    assert np.concatenate([c.token_ids for c in chunks]).tolist() == rows.token_ids.tolist()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_fewest_columns_are_ids_and_mask_and_each_other_is_said_to_be_missing(
    tmp_path: Path, suffix: str
):
    few = some_rows()
    few = Rows(**{n: getattr(few, n) for n in ("row_ids", "offsets", "token_ids", "loss_mask")})
    save(tmp_path / f"rows{suffix}", few)

    dump = open_dump(tmp_path / f"rows{suffix}")

    assert dump.has == {"row_ids", "token_ids", "loss_mask"}
    assert set(dump.lacks) == {c.field for c in COLUMNS} - dump.has
    assert "before the update" in dump.lacks["trainer_logprobs"]


def test_a_directory_is_read_as_its_parts_in_the_order_of_their_numbers(tmp_path: Path):
    rows = some_rows()
    for step in (10, 9, 1):
        write_rows(tmp_path / f"step-{step}.parquet", [rows.with_(steps=rows.steps * 0 + step)])
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "_SUCCESS.parquet").write_text("")

    steps = np.concatenate([c.steps for c in open_dump(tmp_path).chunks(max_tokens=50)])

    assert steps.tolist() == [1] * NUM_ROWS + [9] * NUM_ROWS + [10] * NUM_ROWS


def test_rows_without_ids_are_called_by_their_number_and_their_file(tmp_path: Path):
    jsonl(tmp_path / "b.jsonl", row(1), row(2, id=7))
    (tmp_path / "sub").mkdir()
    jsonl(tmp_path / "sub" / "x1.jsonl", row(1))
    jsonl(tmp_path / "sub" / "x2.jsonl", row(2))

    assert next(open_dump(tmp_path / "b.jsonl").chunks()).row_ids == ("0", "7")
    assert next(open_dump(tmp_path / "sub").chunks()).row_ids == ("x1:0", "x2:0")


def test_one_number_for_a_row_stands_for_the_tokens_that_it_can_be_of(tmp_path: Path):
    path = jsonl(
        tmp_path / "rows.jsonl",
        row(5, 6, 7, turn=[-1, 0, 0], policy_version=3, advantages=0.5)
        | {"loss_mask": [False, False, True]},
        row(5, turn=[0], policy_version=None, advantages=None),
    )

    (rows,) = open_dump(path).chunks()

    assert rows.policy_version.tolist() == [-1, 3, 3, -1]
    np.testing.assert_array_equal(rows.advantages, np.float32([np.nan, np.nan, 0.5, np.nan]))
    assert rows.is_sampled.tolist() == [False, True, True, True]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_label_is_a_group_and_what_a_row_does_not_say_is_unknown(tmp_path: Path, suffix: str):
    of_rows = [row(1, reward=True, group="uid-1"), row(2, reward=None, step=3)]
    of_rows.append(row(3, reward=False, group="uid-1", trainer_version=2))
    path = jsonl(tmp_path / "rows.jsonl", *of_rows)
    if suffix == ".parquet":
        names, path = set().union(*of_rows), tmp_path / "rows.parquet"
        pq.write_table(pa.table({n: [r.get(n) for r in of_rows] for n in names}), path)

    (rows,) = open_dump(path).chunks()

    np.testing.assert_array_equal(rows.rewards, [1.0, np.nan, 0.0])
    assert rows.steps.tolist() == [-1, 3, -1] and rows.trainer_version.tolist() == [-1, -1, 2]
    assert rows.groups[0] == rows.groups[2] > rows.groups[1] == -1


def test_parquet_of_other_writers_is_read(tmp_path: Path):
    """Large and fixed lists, 64-bit ids, half floats, structs for messages."""
    message = {"role": "tool", "content": "ok", "name": None, "tool_call_id": "c", "extra": None}
    call = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
    table = pa.table(
        {
            "token_ids": pa.array([[1, 2], [3, 4]], pa.large_list(pa.int64())),
            "loss_mask": pa.array([[0, 1], [1, 1]], pa.list_(pa.uint8(), 2)),
            "rollout_logprobs": pa.array([[None, -0.5], None], pa.list_(pa.float16())),
            "messages": [[call, message], None],
            "other": ["x", "y"],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")

    (rows,) = open_dump(tmp_path / "rows.parquet").chunks()

    assert rows.token_ids.tolist() == [1, 2, 3, 4] and rows.token_ids.dtype == np.int32
    assert rows.loss_mask.tolist() == [False, True, True, True]
    np.testing.assert_array_equal(rows.rollout_logprobs, np.float32([np.nan, -0.5, np.nan, np.nan]))
    assert [m.name for m in rows.messages[0]] == ["", "f"] and rows.messages[1] is None


def test_values_that_are_wrong_and_not_unreadable_are_left_to_the_checks(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"token_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "prompt_length": -4,'
        ' "rollout_logprobs": [NaN, -Infinity, 3.5]}\n'
    )

    (rows,) = open_dump(path).chunks()

    np.testing.assert_array_equal(rows.rollout_logprobs, np.float32([np.nan, -np.inf, 3.5]))
    assert rows.prompt_lengths.tolist() == [-4] and rows.loss_mask.all()


def test_a_column_of_another_name_is_asked_about_and_not_taken(tmp_path: Path):
    dump = open_dump(jsonl(tmp_path / "rows.jsonl", row(1, old_log_probs=[-1.0])))

    assert "trainer_logprobs" not in dump.has
    assert "There is old_log_probs" in dump.lacks["trainer_logprobs"]
    assert not {name for column in COLUMNS for name in column.often_called} & set(BY_NAME)


def test_a_column_that_is_misspelt_is_asked_about(tmp_path: Path):
    dump = open_dump(jsonl(tmp_path / "rows.jsonl", row(1, rollout_logprob=[-1.0])))
    assert "There is rollout_logprob: if that is it" in dump.lacks["rollout_logprobs"]
    assert "There is" not in dump.lacks["trainer_logprobs"]


def test_the_first_line_says_what_the_file_knows_of_itself(tmp_path: Path):
    head = {"lockstep.doctor": {"version": 1, "stop_ids": [2], "is_moe": True, "top_p": None}}
    dump = open_dump(jsonl(tmp_path / "rows.jsonl", head, row(1)))

    assert dump.facts == Facts(stop_ids=frozenset({2}), is_moe=True)


def test_chunks_are_written_one_after_another(tmp_path: Path):
    rows = some_rows()
    path = tmp_path / "rows.parquet"

    assert write_rows(path, [rows.take([0, 1, 2]), rows.take([3, 4, 5, 6])]) == NUM_ROWS
    (read,) = open_dump(path).chunks()
    assert_same(rows, read.with_(absent=None))


def test_a_chunk_with_other_columns_is_refused_and_no_file_is_left(tmp_path: Path):
    rows = some_rows()
    path = tmp_path / "rows.parquet"

    with pytest.raises(AlignmentError, match="lack turn"):
        write_rows(path, [rows, rows.with_(turn=None)])
    with pytest.raises(DataError, match="no rows"):
        write_rows(path, [rows.take([])])

    assert not path.exists()


def test_rows_are_written_under_one_ending_only(tmp_path: Path):
    with pytest.raises(DataError, match=r".parquet"):
        write_rows(tmp_path / "rows.csv", [some_rows()])


def test_text_that_parquet_cannot_hold_is_refused_there_and_read_as_json(tmp_path: Path):
    rows = some_rows().with_(texts=("\ud800",) * NUM_ROWS)

    with pytest.raises(DataError, match=r"half of a surrogate pair.*JSON lines"):
        write_rows(tmp_path / "rows.parquet", [rows])
    save(tmp_path / "rows.jsonl", rows)

    (read,) = open_dump(tmp_path / "rows.jsonl").chunks()
    assert read.texts == rows.texts


def test_every_column_has_a_row_in_the_docs():
    page = (Path(__file__).parents[4] / "docs" / "doctor-dumps.md").read_text()

    assert all(f"\n| `{column.name}`" in page for column in COLUMNS)


def test_a_directory_of_several_dumps_is_asked_about_and_one_of_a_single_file_is_named(
    tmp_path, capsys
):
    shutil.copy(EXAMPLE, tmp_path / "step-1.parquet")
    assert main(["doctor", str(tmp_path)]) == 1
    assert f"DIFFERS  {tmp_path}/step-1.parquet" in capsys.readouterr().out.replace("\n", "")
    shutil.copy(EXAMPLE, tmp_path / "step-2.parquet")
    assert open_dump(tmp_path).path == tmp_path
    shutil.copy(EXAMPLE, tmp_path / "other.parquet")
    assert main(["doctor", str(tmp_path)]) == 2
    assert "holds several dumps" in (said := " ".join(capsys.readouterr().err.split()))
    assert all(f"{name}.parquet" in said for name in ("step-1", "step-2", "other"))
