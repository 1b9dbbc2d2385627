"""Data as people store them: each form is read right, or refused in one line."""

import bz2
import datetime
import decimal
import gzip
import json
import subprocess
import sys
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.envs.custom import CustomConfig
from lockstep.errors import DataError
from lockstep.training.sft import load_examples

USER, DONE = {"role": "user", "content": "Q?"}, {"role": "assistant", "content": "4."}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
REPLY = {"role": "tool", "tool_call_id": "c1", "content": "r"}
SHARED = [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "4."}]
PARTS = [{"type": "text", "text": "Q"}, {"type": "text", "text": "?"}]


def lines(rows):
    return "\n".join(map(json.dumps, rows)).encode()


def csv_of(rows, mark=","):
    quoted = ['"' + json.dumps(row).replace('"', '""') + '"' for row in rows]
    return ("messages" + mark + "n\n" + "\n".join(f"{q}{mark}1" for q in quoted)).encode()


def parquet(table):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def arrow(table, new):
    sink = pa.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def packed_zstd(raw):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(raw)
    return sink.getvalue().to_pybytes()


ROWS = [{"question": f"Q{n}?"} for n in range(4)]
DIALOGUES = [[{"role": "user", "content": f"Q{n}?"}] for n in range(4)]
AS_JSON = pa.array([json.dumps(row) for row in DIALOGUES], pa.json_())
LISTED = pa.ListArray.from_arrays(
    list(range(5)), pa.array([json.dumps(row[0]) for row in DIALOGUES], pa.json_())
)
NESTED = pa.StructArray.from_arrays([LISTED], ["turns"])


def with_column(values, **more):
    return parquet(pa.table({"question": [f"Q{n}?" for n in range(4)], "more": values, **more}))


def asked(question):
    """A Parquet file of this column."""
    return parquet(pa.table({"question": question}))


def two(*messages):
    """Lines of two tasks with these messages."""
    return lines([{"messages": messages, "n": n} for n in (1, 2)])


FIRST = [("user", "Q0?")]
IN_LINES = {
    "byte-order-mark": (b"\xef\xbb\xbf" + lines(ROWS), FIRST),
    "windows-lines": (lines(ROWS).replace(b"\n", b"\r\n"), FIRST),
    "key-twice": (b'{"question": "a", "question": "b"}', "'question' is given twice"),
    "nan-in-lines": (b'{"question": "Q0?", "s": NaN}\n{"question": "b"}', FIRST),
    "large-numbers": (b'{"question": "Q0?", "s": 1%s}\n{"question": "b"}' % (b"0" * 60), FIRST),
    "question-of-nan": (b'{"question": "a"}\n{"question": NaN}', ":2: .*'question'.*needed"),
    "gold-answer": (two(USER, DONE), "ends with an assistant's"),
    "gold-in-shares": (two(*SHARED), "ends with an assistant's"),
    "gold-in-json": (lines([{"question": json.dumps([USER, DONE])}] * 2), "ends with an"),
    "no-text": (lines([{"messages": [{"role": "user", "content": None}]}]), "no text"),
    "parts": (two({**USER, "content": PARTS}), [("user", "Q\n?")]),
    "image-part": (
        two({**USER, "content": [{"type": "image_url"}]}),
        r"content\[0\].type is 'image_url': Only text is read",
    ),
    "developer": (
        two({"role": "developer", "content": "D"}, USER),
        [("developer", "D"), ("user", "Q?")],
    ),
    "tool-without-name": (
        two(USER, CALLS, REPLY),
        [("user", "Q?"), ("assistant", ""), ("tool", "r")],
    ),
    "lost-call": (
        two(USER, {**REPLY, "tool_call_id": "c9"}),
        "tool_call_id must be the id of a call of an assistant before it, found 'c9'",
    ),
    "legacy-role": (
        two({"role": "function", "name": "f", "content": "x"}),
        "'function' is not one of",
    ),
}
IN_PARQUET = {
    "json-whole": (asked(AS_JSON), FIRST),
    "json-listed": (parquet(pa.table({"messages": LISTED})), FIRST),
    "json-in-a-struct": (parquet(pa.table({"messages": LISTED, "x": NESTED})), FIRST),
    "json-as-text": (parquet(pa.table({"messages": AS_JSON.storage})), FIRST),
    "json-torn": (
        parquet(pa.table({"messages": pa.array(["[{", "[]"], pa.json_())})),
        ":row 1: messages is not JSON",
    ),
    "large-text": (asked(pa.array(["Q0?", "Q1?"], pa.large_string())), FIRST),
    "categories": (asked(pa.array(["Q0?", "Q1?"]).dictionary_encode()), FIRST),
    "struct-messages": (parquet(pa.table({"messages": DIALOGUES})), FIRST),
    "times": (with_column([datetime.datetime(2025, 1, 1)] * 4), FIRST),
    "nanoseconds": (with_column(pa.array([1, 2, 3, 5], pa.timestamp("ns"))), FIRST),
    "dates": (with_column([datetime.date(2025, 1, 1)] * 4), FIRST),
    "spans": (with_column([datetime.timedelta(1)] * 4), FIRST),
    "decimals": (with_column([decimal.Decimal("1.5")] * 4), FIRST),
    "bytes": (with_column([b"x"] * 4), FIRST),
    "images": (with_column([{"bytes": b"x", "path": "a"}] * 4), FIRST),
    "listed-bytes": (with_column([[b"x"]] * 4), FIRST),
    "uuids": (with_column(pa.array([uuid.uuid4().bytes] * 4, pa.uuid())), FIRST),
    "maps": (with_column(pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64()))), FIRST),
    "nan": (with_column([1.0, float("nan"), 2.0, None]), FIRST),
    "inf-within": (with_column([{"a": [float("inf")]}] * 4), FIRST),
    "nulls": (with_column(pa.nulls(4)), FIRST),
    "question-of-bytes": (asked([b"a", b"b"]), "a column of binary is not read"),
}
BY_COLUMN = b'{"question":\n{"0": "Q0?"}}'
FORMS = {
    **{form: ("a.jsonl", *case) for form, case in IN_LINES.items()},
    **{form: ("a.parquet", *case) for form, case in IN_PARQUET.items()},
    "ndjson": ("a.ndjson", lines(ROWS), FIRST),
    "json-array": ("a.json", json.dumps(ROWS).encode(), FIRST),
    "json-lines-called-json": ("a.json", lines(ROWS), FIRST),
    "json-by-column": ("a.json", BY_COLUMN, "list of objects, or an object per"),
    "csv": ("a.csv", b"question,n\nQ0?,1\nQ1?,2\n", FIRST),
    "tsv": ("a.tsv", b"question\tn\nQ0?\t1\nQ1?\t2\n", FIRST),
    "csv-of-dialogues": ("a.csv", csv_of(DIALOGUES), FIRST),
    "tsv-of-dialogues": ("a.tsv", csv_of(DIALOGUES, "\t"), FIRST),
    "csv-of-python": ("a.csv", b"question\n\"[{'role': 'user'}]\"\nb", "text that is not JSON"),
    "csv-column-twice": ("a.csv", b"question,question\na,b\nc,d\n", "'question' is there twice"),
    "gz": ("a.jsonl.gz", gzip.compress(lines(ROWS)), FIRST),
    "csv-gz": ("a.csv.gz", gzip.compress(b"question,n\nQ0?,1\nQ1?,2\n"), FIRST),
    "json-bz2": ("a.json.bz2", bz2.compress(json.dumps(ROWS).encode()), FIRST),
    "zst": ("a.jsonl.zst", packed_zstd(lines(ROWS)), FIRST),
    "gz-that-is-none": ("a.jsonl.gz", lines(ROWS), "cannot be read"),
    "stream": ("a.arrow", arrow(pa.Table.from_pylist(ROWS), pa.ipc.new_stream), FIRST),
    "arrow-file": ("a.arrow", arrow(pa.Table.from_pylist(ROWS), pa.ipc.new_file), FIRST),
    "arrow-that-is-none": ("a.arrow", lines(ROWS), "cannot be read as arrow"),
    "xlsx": ("a.xlsx", b"PK", "expected a .jsonl"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_task_file_is_read_right_or_refused_in_a_line(tmp_path, form):
    name, raw, expected = FORMS[form]
    (tmp_path / name).write_bytes(raw)
    config = CustomConfig(path=str(tmp_path / name), eval_share=0.5)

    def read():
        tasks = [*config.splits["train"], *config.splits["eval"]]
        return min([[(m.role, m.content) for m in config.opening(task)] for task in tasks])

    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected) as caught:
            read()
        assert str(caught.value).startswith(str(tmp_path / name))
        assert "\n" not in str(caught.value)
    else:
        assert read() == expected


def test_a_column_that_is_no_json_is_named_where_it_is_read_and_only_there(tmp_path):
    (tmp_path / "a.parquet").write_bytes(
        with_column([1.0, float("nan"), 2.0, 3.0], seen=[datetime.date(2025, 1, 1)] * 4, n=[1] * 4)
    )
    (tmp_path / "rw.py").write_text(
        "def plain(e):\n    return e.task['n']\n"
        "def reads(e):\n    return e.task['more']\n"
        "def asks(e):\n    return e.task.get('seen', 0)\n"
        "def misses(e):\n    return e.task.get('none', 1)\n"
    )

    def check(name):
        CustomConfig(path=str(tmp_path / "a.parquet"), reward=f"{tmp_path}/rw.py:{name}").check()

    check("plain")
    check("misses")
    with pytest.raises(DataError, match=r"row 2: 'more'.*JSON"):
        check("reads")
    with pytest.raises(DataError, match=r"row 1: 'seen'.*date32.day"):
        check("asks")


def test_rows_of_python_lose_numpy_and_keep_their_values():
    rows = [
        {"question": "a", "n": np.int64(3), "x": np.arange(3), "y": np.float32(0.5), "z": (1,)},
        {"question": np.str_("b"), "t": np.datetime64("2025"), "s": {1}, "loop": []},
    ]
    rows[1]["loop"].append(rows[1]["loop"])
    sys.modules["rows_of_python"] = type(sys)("rows_of_python")
    sys.modules["rows_of_python"].tasks = rows
    config = CustomConfig(path="rows_of_python:tasks", eval_share=0.5)
    tasks = {t.payload["question"]: t for t in (*config.splits["train"], *config.splits["eval"])}
    assert tasks["a"].payload == {"question": "a", "n": 3, "x": [0, 1, 2], "y": 0.5, "z": [1]}
    assert set(config.left_out) == {"t", "s", "loop"} and set(tasks["b"].payload) == {"question"}


def test_a_folder_of_shards_leaves_the_notes_of_datasets_out(tmp_path):
    for n in range(3):
        table = pa.table({"question": [f"Q{n}?"]})
        (tmp_path / f"data-0000{n}-of-00003.arrow").write_bytes(arrow(table, pa.ipc.new_stream))
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    config = CustomConfig(path=str(tmp_path), eval_share=0.5)
    assert len(config.splits["train"]) + len(config.splits["eval"]) == 3


CALLED = [
    ("user", "Q?", ()),
    ("assistant", "", ('{"q": 1}',)),
    ("tool", "r", ()),
    ("assistant", "4.", ()),
]
PLAIN = [("user", "Q?", ()), ("assistant", "4.", ())]
BY_DICT = {**CALLS, "tool_calls": [{"function": {"name": "find", "arguments": {"q": 1}}}]}
TURNS = [USER, CALLS, REPLY, DONE]
NULLS = {**DONE, "refusal": None, "annotations": [], "tool_calls": None}
FOUND = [
    SHARED[0],
    {"from": "function_call", "value": '{"name": "find", "arguments": {"q": 1}}'},
    {"from": "observation", "value": "r"},
    SHARED[1],
]


def spoken(**last):
    """A dialogue whose last message has these fields too."""
    return {"messages": [USER, {**DONE, **last}]}


SUPERVISED = {
    "calls": ({"messages": TURNS}, CALLED),
    "dict-arguments": (
        {"messages": [USER, BY_DICT, {**REPLY, "tool_call_id": None}, DONE]},
        CALLED,
    ),
    "empty-and-null-keys": ({"messages": [USER, NULLS], "tools": None}, PLAIN),
    "parts": ({"messages": [{**USER, "content": PARTS[:1]}, DONE]}, [("user", "Q", ()), PLAIN[1]]),
    "shares": ({"conversations": SHARED}, PLAIN),
    "shares-with-system": (
        {"system": "S", "conversations": SHARED, "tools": '[{"name": "find", "parameters": {}}]'},
        [("system", "S", ()), *PLAIN],
    ),
    "shares-with-calls": ({"conversations": FOUND}, CALLED),
    "as-text": ({"messages": json.dumps(TURNS)}, CALLED),
    "each-as-text": ({"messages": [json.dumps(each) for each in TURNS]}, CALLED),
    "non-ascii": (
        spoken(tool_calls=[{"name": "f", "arguments": {"q": "é"}}]),
        [PLAIN[0], ("assistant", "4.", ('{"q": "é"}',))],
    ),
    "several-turns": ({"messages": [USER, DONE, USER, DONE]}, PLAIN * 2),
    "ends-with-user": ({"messages": [USER]}, "the last message must be an assistant's"),
    "prompt-and-completion": ({"prompt": "a", "completion": "b"}, "expected `messages`"),
    "robot": ({"conversations": [{"from": "robot", "value": "x"}]}, "'robot' is not one of"),
    "name-of-number": ({"messages": [{**REPLY, "name": 3}, DONE]}, "name must be text, found 3"),
    "call-of-number": (spoken(tool_calls=[3]), r"tool_calls\[0\] is malf"),
    "call-id-of-number": (
        spoken(tool_calls=[{"name": "f", "id": 3}]),
        r"tool_calls\[0\].id must be text, found 3",
    ),
    "thinking-of-list": (spoken(thinking=["a"]), "thinking must be text"),
}


@pytest.mark.parametrize("form", SUPERVISED)
@pytest.mark.parametrize("store", ["jsonl", "json", "parquet"])
def test_a_supervised_dialogue_is_read_right_or_refused_in_a_line(tmp_path, form, store):
    row, expected = SUPERVISED[form]
    raw = {"jsonl": lines([row]), "json": json.dumps([row]).encode()}.get(store)
    path = tmp_path / f"a.{store}"
    try:
        path.write_bytes(raw or parquet(pa.Table.from_pylist([row])))
    except pa.ArrowInvalid:
        pytest.skip("Arrow has no type for this row")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected) as caught:
            load_examples(path)
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
        return
    (example,) = load_examples(path)
    found = [
        (m.role, m.content, tuple(call.arguments for call in m.tool_calls))
        for m in example.messages
    ]
    assert found == expected


def test_a_null_that_parquet_adds_to_arguments_is_no_argument(tmp_path):
    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in "ab"]
    rows = [{"messages": [USER, {**DONE, "tool_calls": [call]}]} for call in calls]
    (tmp_path / "a.parquet").write_bytes(parquet(pa.Table.from_pylist(rows)))
    found = [example.messages[1].tool_calls[0].arguments for example in load_examples(tmp_path)]
    assert found == ['{"a": 1}', '{"b": 1}']


def long_values(nested):
    text = "x" * 10**6
    column = [[{**USER, "content": text}]] if nested else [text]
    return parquet(pa.table({"question": column * 300}))


def zeros():
    sink = pa.BufferOutputStream()
    table = pa.table({"question": ["\0" * (80 << 20)]})
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    return sink.getvalue().to_pybytes()


def one_row():
    values = pa.array(np.zeros(80 << 20, np.int8))
    ends = pa.array([0, len(values)], pa.int32())
    return parquet(pa.table({"question": pa.ListArray.from_arrays(ends, values)}))


BOMBS = {
    "row.parquet": one_row,
    "dictionary.parquet": lambda: long_values(nested=False),
    "nested.parquet": lambda: long_values(nested=True),
    "zeros.parquet": zeros,
    "line.jsonl.gz": lambda: gzip.compress(b"\0" * (80 << 20), 1),
    "lines.jsonl.zst": lambda: packed_zstd(b'{"question": "a"}\n' * (8 << 20)),
    "array.json.bz2": lambda: bz2.compress(b"[" * (80 << 20), 1),
    "field.csv.gz": lambda: gzip.compress(b"question\n" + b"x" * (80 << 20), 1),
}
BOUNDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from pathlib import Path
from lockstep.errors import DataError
from lockstep.store import files, tables
files.MAX_PLAIN_BYTES, tables.BATCH_BYTES = 64 << 20, 64 << 20
try:
    for _ in tables.read_rows(Path(sys.argv[1])):
        pass
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_expands_is_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(BOMBS[name]())
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, tmp_path / name], capture_output=True, text=True, timeout=99
    )
    assert "expands to" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1 and done.stdout.startswith(str(tmp_path / name))
