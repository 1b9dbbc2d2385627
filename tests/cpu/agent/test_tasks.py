"""Task sources: seeded, endless or finite, and resumed without a task lost or repeated."""

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agent.tasks import GeneratedSource, ListSource, MixtureSource, derive_seed, read_tasks
from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.store.files import read_jsonl
from lockstep.types import Task


def tasks_of(count: int, name: str = "t") -> list[Task]:
    return [Task(id=f"{name}{i}") for i in range(count)]


def make(seed: int, index: int) -> Task:
    return Task(id=f"{seed}-{index}")


def ids(tasks) -> list[str]:
    return [task.id for task in tasks]


SOURCES = {
    "list": lambda: ListSource(tasks_of(5), seed=3),
    "one pass": lambda: ListSource(tasks_of(5), shuffle=False, epochs=1),
    "three passes": lambda: ListSource(tasks_of(5), seed=1, epochs=3),
    "generated": lambda: GeneratedSource(make, seed=4),
    "mixture": lambda: MixtureSource(
        {
            "a": ListSource(tasks_of(4, "a"), seed=1),
            "b": GeneratedSource(make, seed=9),
            "c": ListSource(tasks_of(3, "c"), epochs=1),
        },
        weights={"a": 1, "b": 2, "c": 1},
        seed=5,
    ),
}


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 25))
def test_a_resumed_source_goes_on_as_if_never_stopped(name, stop):
    whole = ids(SOURCES[name]().take(40))
    source = SOURCES[name]()
    before = ids(source.take(stop))
    resumed = SOURCES[name]()
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert before + ids(resumed.take(40 - stop)) == whole


def test_a_source_stopped_at_an_epochs_border_begins_the_next_one():
    source = ListSource(tasks_of(4), seed=0)
    source.take(4)
    resumed = ListSource(tasks_of(4), seed=0)
    resumed.load_state_dict(source.state_dict())
    second = ids(resumed.take(4))
    assert sorted(second) == ids(tasks_of(4))
    assert second == ids(ListSource(tasks_of(4), seed=0).take(8))[4:]


def test_every_epoch_has_every_task_once_in_another_order():
    source = ListSource(tasks_of(30), seed=7)
    epochs = [ids(source.take(30)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(ListSource(tasks_of(30), seed=8).take(30)) != epochs[0]


def test_a_finite_source_ends_and_stays_ended():
    source = ListSource(tasks_of(3), epochs=2)
    assert len(source.take(100)) == 6
    assert source.take(1) == []


def test_train_and_eval_streams_of_one_seed_share_no_task():
    splits = [
        {task.id.split("-")[0] for task in GeneratedSource(make, seed=0, split=split).take(2000)}
        for split in ("train", "eval")
    ]
    assert len(splits[0]) == len(splits[1]) == 2000 and not splits[0] & splits[1]


def test_a_mixture_keeps_its_proportions_and_names_the_component():
    mixture = MixtureSource(
        {"a": GeneratedSource(make, seed=1), "b": GeneratedSource(make, seed=2)},
        weights={"a": 3, "b": 1},
        seed=0,
    )
    share = sum(task.source == "a" for task in mixture.take(2000)) / 2000
    assert share == pytest.approx(0.75, abs=0.04)  # 4 standard errors of 2000 draws


def test_a_mixture_ends_with_its_last_component():
    mixture = MixtureSource(
        {name: ListSource(tasks_of(n, name), epochs=1) for name, n in (("a", 3), ("b", 8))},
        weights={"a": 5, "b": 1},
    )
    drawn = mixture.take(100)
    assert sorted(ids(drawn)) == sorted(ids(tasks_of(3, "a") + tasks_of(8, "b")))


@pytest.mark.parametrize(
    ("saved", "other"),
    [
        (ListSource(tasks_of(3)), ListSource(tasks_of(4))),
        (ListSource(tasks_of(3), seed=1), ListSource(tasks_of(3), seed=2)),
        (GeneratedSource(make, split="eval"), GeneratedSource(make, split="train")),
        (GeneratedSource(make, seed=1), GeneratedSource(make, seed=2)),
    ],
)
def test_a_state_of_another_source_is_refused(saved, other):
    with pytest.raises(CheckpointError, match="from="):
        other.load_state_dict(saved.state_dict())


def test_seeds_depend_on_every_part_and_fit_into_63_bits():
    parts = [("a", 1), ("a", 2), ("b", 1), ("a1",), ("a", "1"), ("a", 1, 0), (1, "a")]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("run", 0, 17) == 3109953715977018084  # the same on every machine


def test_an_unknown_number_of_epochs_is_refused():
    with pytest.raises(ConfigError, match="epochs=0"):
        ListSource(tasks_of(2), epochs=0)


# -- the user's own data ----------------------------------------------------------------------


def test_a_file_of_questions_and_messages_becomes_tasks(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": 7, "question": "2 + 2?", "answer": "4"}\r\n'
        b"\r\n"
        b'{"messages": [{"role": "user", "content": "hi"}], "level": 3}\n'
    )
    first, second = read_tasks(path)
    assert first == Task(id="7", payload={"question": "2 + 2?", "answer": "4"})
    (other := tmp_path / "other.jsonl").write_bytes(path.read_bytes().splitlines()[-1])
    assert read_tasks(other) == [second]  # on whichever line of whichever file
    assert second.payload["level"] == 3
    source = ListSource(read_tasks(path), seed=1)
    assert Counter(ids(itertools.islice(source, 4))) == {"7": 2, second.id: 2}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"{", "not a JSON object"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"question": NaN}', "NaN.*JSON"),
        (b'{"question": "\xff"}', "UTF-8"),
        (b'{"question": ""}', "`messages`.*`question`"),
        (b'{"answer": "4"}', r"\['answer'\]"),
        (b'{"id": "", "question": "q"}', "id must be text"),
        (b'{"id": "one", "question": "q"}', r"'one'.*line 1\b"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": ["hi"]}', r"message 0\b"),
        (b'{"messages": [{"role": "robot"}]}', r"message 0\b.*'robot'"),
        (b'{"messages": [{"role": "user", "text": "hi"}]}', r"\['text'\]"),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
            r"message 0: tool_calls\[0\].*`name`",
        ),
        (b"[" * 100_000, "not a JSON object"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(tmp_path, line, text):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"id": "one", "question": "q"}\n' + line + b"\n")
    with pytest.raises(DataError, match=text) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        list(read_jsonl(tmp_path / "none.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="has no task"):
        read_tasks(empty)
