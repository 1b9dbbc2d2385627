"""What is written comes back equal, part by part and only as far as it is asked for."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_counts import PROOF
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import (
    assert_same,
    failed_trajectory,
    groups,
    rows_with_trainer_values,
    trajectory,
)

from lockstep.errors import AlignmentError, DataError
from lockstep.store.trajectories import (
    find_text,
    read_part,
    read_row,
    read_summaries,
    to_groups,
    write_part,
)
from lockstep.types import Group, Message, Ragged, Task, Trajectory


def test_every_field_of_a_forest_survives_the_round_trip(tmp_path):
    written = groups()
    written[0].trajectories.append(failed_trajectory())
    write_part(tmp_path / "p.parquet", written, step=7)
    records = list(read_part(tmp_path / "p.parquet"))
    assert_same(written, to_groups(records))
    assert {r.step for r in records} == {7}
    assert all(value is None for r in records for value in r.trainer_logprobs)


@st.composite
def forests(draw):
    """Random forests: random parents, ids, log-probs, texts and versions."""
    out = Trajectory(id=draw(st.text(st.characters(codec="utf-8"), max_size=8)))
    out.observe([draw(st.integers(0, 2**31 - 1))])
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.integers(0, len(out.segments) - 1))
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
        if draw(st.booleans()):
            logprobs = draw(
                st.lists(st.floats(-(2.0**99), 0, width=32), min_size=len(ids), max_size=len(ids))
            )
            leaf = out.record(
                ids,
                logprobs=logprobs,
                parent=parent,
                prompt_ids=out.path_ids(parent),
                policy_version=draw(st.integers(0, 2**40)),
                finish_reason=draw(st.sampled_from(["stop", "length", "abort", "weight_update"])),
                support=draw(st.sampled_from([None, Ragged.of([[7, i] for i in ids])])),
            )
            out.rewards[leaf] = draw(st.floats(allow_nan=False))
        else:
            text = draw(st.text(max_size=20))
            out.observe(ids, parent=parent, messages=[Message(role="user", content=text)])
    return out


@settings(max_examples=300 if PROOF else 15, deadline=None)
@given(st.lists(st.lists(forests(), max_size=3), max_size=3))
def test_any_forest_survives_the_round_trip(tmp_path_factory, forest_lists):
    written = []
    for index, forest_list in enumerate(forest_lists):
        for position, forest in enumerate(forest_list):
            forest.id = f"{index}/{position}/{forest.id}"
        if forest_list:
            written.append(Group(task=Task(id=str(index)), trajectories=forest_list))
    path = tmp_path_factory.mktemp("part") / "p.parquet"
    write_part(path, written, step=0)
    assert_same(written, to_groups(read_part(path)))


def test_the_trainers_logprobs_stand_beside_the_segments_that_it_trained(tmp_path):
    written = groups(1, 1)
    rows = rows_with_trainer_values(written, gap=0.5)
    assert len(rows) == 2, "the shared call stands in two rows and is trained in the first"
    rows[1].columns["old_logprobs"][:] -= 0.25
    write_part(tmp_path / "p.parquet", written, step=0, samples=rows)
    (record,) = read_part(tmp_path / "p.parquet")
    t = record.trajectory
    assert [v is None for v in record.trainer_logprobs] == [True, False, True, False, False]
    for index, gap in ((1, 0.5), (3, 0.5), (4, 0.25)):
        expected = t.segments[index].logprobs + np.float32(gap)
        np.testing.assert_allclose(record.trainer_logprobs[index], expected, atol=1e-6)
        assert record.trainer_logprobs[index].dtype == np.float32
    assert record.advantages[4].tolist() == [np.float32(t.rewards[4])] * 2
    assert record.importance_weights[4].tolist() == [1.5] * 2
    assert record.importance_weights[0] is None
    (summary,) = read_summaries(tmp_path / "p.parquet")
    assert summary.max_abs_logprob_diff == pytest.approx(0.5)
    assert (summary.num_turns, summary.num_tokens, summary.num_sampled_tokens) == (3, 12, 8)
    assert summary.reward == pytest.approx(t.reward)


def test_a_trajectory_that_was_not_trained_has_no_difference(tmp_path):
    write_part(tmp_path / "p.parquet", groups(1, 1), step=0)
    assert read_summaries(tmp_path / "p.parquet")[0].max_abs_logprob_diff is None


def test_one_trajectory_is_read_from_the_middle_of_a_part(tmp_path):
    written = [
        Group(task=Task(id="a"), trajectories=[trajectory(str(i), seed=i) for i in range(70)])
    ]
    write_part(tmp_path / "p.parquet", written, step=0)
    for index in (0, 31, 32, 69):
        record = read_row(tmp_path / "p.parquet", index)
        assert_same(written[0].trajectories[index], record.trajectory)


def test_a_row_of_another_step_is_refused(tmp_path):
    written = groups(1, 1)
    (row, *_) = rows_with_trainer_values(groups(2, 1)[1:])
    with pytest.raises(AlignmentError, match=r"row '1-0/\d'"):
        write_part(tmp_path / "p.parquet", written, step=0, samples=[row])


def test_a_row_of_another_length_is_refused(tmp_path):
    written = groups(1, 1)
    (row, *_) = rows_with_trainer_values(written)
    row.token_ids = row.token_ids[:-1]
    with pytest.raises(AlignmentError, match=r"\b9\b.*10"):
        write_part(tmp_path / "p.parquet", written, step=0, samples=[row])


def test_two_trajectories_of_one_id_are_refused(tmp_path):
    written = [Group(task=Task(id="a"), trajectories=[trajectory("x"), trajectory("x", seed=1)])]
    with pytest.raises(DataError, match="'x'"):
        write_part(tmp_path / "p.parquet", written, step=0)


def test_a_torn_part_is_named(tmp_path):
    path = tmp_path / "p.parquet"
    write_part(path, groups(1, 1), step=0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"p\.parquet"):
        list(read_part(path))


def test_a_trajectory_that_cannot_be_read_does_not_take_the_others(tmp_path, caplog):
    path, written = tmp_path / "p.parquet", groups(2, 2)
    (bad, *_) = written[0].trajectories[1].segments[0].messages
    object.__setattr__(bad, "role", "robot")  # as versions of before stored it
    write_part(path, written, step=0)
    everyone = [t.id for group in written for t in group.trajectories]
    assert [r.trajectory.id for r in read_part(path)] == [everyone[0], *everyone[2:]]
    where = f"{path}, row 1, trajectory {everyone[1]}: cannot be read: "
    assert caplog.text.count(where) == 1 and "robot" in caplog.text
    assert read_row(path, 2).trajectory.id == everyone[2]
    with pytest.raises(DataError, match=re.escape(where)):
        read_row(path, 1)
    assert find_text(path, "who?") == (list(range(4)), 4)


def test_changed_bytes_are_found_by_their_checksum(tmp_path):
    path = tmp_path / "p.parquet"
    write_part(path, groups(2, 4), step=0)
    whole = path.read_bytes()
    written = [repr(r) for r in read_part(path)]
    refused = unnoticed = 0
    for place in np.random.default_rng(0).choice(len(whole), 400, replace=False):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        try:
            unnoticed += [repr(r) for r in read_part(path)] != written
        except DataError as error:
            assert str(error).startswith(str(path))
            refused += 1
    assert refused > 200
    assert unnoticed <= 4  # Parquet has no checksum of a page's header


def test_a_part_of_a_later_schema_is_refused(tmp_path):
    path = tmp_path / "p.parquet"
    write_part(path, groups(1, 1), step=0)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"lockstep.trajectories": "99"}), path)
    with pytest.raises(DataError, match="99"):
        list(read_part(path))
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DataError, match="schema version"):
        read_summaries(path)


def test_a_part_of_the_first_schema_has_no_support(tmp_path):
    written = [Group(task=Task(id="a"), trajectories=[trajectory("x", is_rich=False)])]
    write_part(tmp_path / "now.parquet", written, step=0)
    rows = pq.read_table(tmp_path / "now.parquet").to_pylist()
    for segment in (s for row in rows for s in row["segments"]):
        del segment["support_ids"], segment["support_sizes"]
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"lockstep.trajectories": "1"})
    pq.write_table(table, tmp_path / "first.parquet")
    assert_same(written, to_groups(read_part(tmp_path / "first.parquet")))


def test_only_deltas_are_stored(tmp_path):
    """128 turns cost about 16 times what 8 turns cost, not 256 times."""

    def size(num_turns: int) -> int:
        t = Trajectory(id="long")
        at = t.observe(range(50))
        for turn in range(num_turns):
            at = t.record(
                np.arange(50) + 50 * turn, logprobs=-np.random.default_rng(turn).random(50),
                parent=at, prompt_ids=t.path_ids(at),
            )  # fmt: skip
        path = tmp_path / f"{num_turns}.parquet"
        write_part(path, [Group(task=Task(id="a"), trajectories=[t])], step=0)
        return path.stat().st_size

    assert size(128) < 16 * size(8)


def test_the_samplers_own_numbers_are_not_taken_for_the_trainers(tmp_path):
    written = groups(1, 1)
    rows = rows_with_trainer_values(written)
    for row in rows:
        row.set("old_logprobs", row.columns["rollout_logprobs"])
    write_part(tmp_path / "a.parquet", written, step=0, samples=rows)
    assert read_summaries(tmp_path / "a.parquet")[0].max_abs_logprob_diff is None
    for row in rows:
        row.set("logprobs", row.columns["rollout_logprobs"] - np.float32(0.5))
    write_part(tmp_path / "b.parquet", written, step=0, samples=rows)
    assert read_summaries(tmp_path / "b.parquet")[0].max_abs_logprob_diff == pytest.approx(0.5)
    (record,) = read_part(tmp_path / "b.parquet")
    assert record.advantages[1] is not None, "advantages do not depend on it"
