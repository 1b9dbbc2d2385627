"""Datums against what was drawn: a dialogue of two turns, whole and with one defect at a time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.causes import CAUSES
from lockstep.tinker.provenance import Drawn, DrawnIndex, trace_datum
from lockstep.tinker.requests import Datum, Span

PROMPT, REPLY, TOOL, SECOND = 8, 10, 5, 7


def drawn(prompt, length, *, seed, version):
    rng = np.random.default_rng(seed)
    return Drawn(
        prompt_ids=np.asarray(prompt, np.int32),
        token_ids=rng.integers(100, 1000, length).astype(np.int32),
        logprobs=rng.uniform(-9, -0.01, length).astype(np.float32),
        versions=np.full(length, version, np.int32),
    )


def make_sequences():
    rng = np.random.default_rng(0)
    first = drawn(rng.integers(0, 100, PROMPT), REPLY, seed=1, version=3)
    tool = rng.integers(0, 100, TOOL)
    before = np.concatenate([first.prompt_ids, first.token_ids, tool])
    return {
        "other": drawn(first.prompt_ids, REPLY, seed=7, version=3),
        "one": first,
        "two": drawn(before, SECOND, seed=2, version=4),
    }


SEQUENCES = make_sequences()
ONE, TWO = SEQUENCES["one"], SEQUENCES["two"]
FIRST = PROMPT - 1  # target of the first sampled token
SECOND_AT = len(TWO.prompt_ids) - 1
TOKENS = np.concatenate([TWO.prompt_ids, TWO.token_ids])


def make_datum(tokens=TOKENS, *, has_spans=True, second_at=SECOND_AT, **changes):
    """The dialogue as a client makes it. changes: name -> function of the array in place."""
    count = len(tokens) - 1
    inputs = {
        "target_tokens": np.asarray(tokens[1:], np.int64),
        "logprobs": np.zeros(count, np.float32),
        "advantages": np.zeros(count, np.float32),
    }
    for begin, sequence in ((FIRST, ONE), (second_at, TWO)):
        size = max(0, min(len(sequence.token_ids), count - begin))
        inputs["logprobs"][begin : begin + size] = sequence.logprobs[:size]
        inputs["advantages"][begin : begin + size] = 0.5
    datum = Datum(token_ids=np.asarray(tokens[:-1], np.int32), inputs=inputs)
    if has_spans:
        datum = replace(datum, **spans())
    for name, change in changes.items():
        change(datum.token_ids if name == "token_ids" else inputs[name])
    return datum


def spans(*, first=REPLY, second=SECOND):
    def tiles(skipped, last):
        return (
            Span(kind="prompt", sequence_id="one", offset=skipped, length=PROMPT - skipped),
            Span(kind="sampled", sequence_id="one", offset=0, length=first),
            Span(kind="prompt", sequence_id="two", offset=PROMPT + REPLY, length=TOOL),
            Span(kind="sampled", sequence_id="two", offset=0, length=last),
        )

    return {"input_spans": tiles(0, second - 1), "loss_spans": tiles(1, second)}


def index_of(sequences=SEQUENCES, **settings):
    index = DrawnIndex(**settings)
    for name, sequence in sequences.items():
        index.add(name, sequence.prompt_ids)
    return index


def trace(datum, sequences=SEQUENCES):
    return trace_datum(5, datum, sequences.get, index=index_of(sequences))


@pytest.mark.parametrize("has_spans", [True, False])
def test_a_datum_of_what_was_drawn_says_which_version_drew_each_target(has_spans):
    found = trace(make_datum(has_spans=has_spans))
    assert (found.status, found.cause, found.text) == ("drawn", "", "")
    wanted = np.full(len(TOKENS) - 1, -1)
    wanted[FIRST : FIRST + REPLY] = 3
    wanted[SECOND_AT:] = 4
    assert np.array_equal(found.versions, wanted)


def overwrite(array, value, where):
    array[where] = value


def of_reply(function):
    """Changes the first reply's values in place."""

    def change(array):
        array[FIRST : FIRST + REPLY] = function(array[FIRST : FIRST + REPLY])

    return change


def shift_left(array):
    array[FIRST:-1] = array[FIRST + 1 :].copy()


def shift_right(array):
    array[FIRST + 1 :] = array[FIRST:-1].copy()


# name -> (cause, first position, changes of the arrays)
DEFECTS = {
    "log-probs one early": ("shifted", FIRST, {"logprobs": shift_left}),
    "log-probs one late": ("shifted", FIRST + 1, {"logprobs": shift_right}),
    "probabilities": ("positive", FIRST, {"logprobs": of_reply(np.exp)}),
    "negated": ("positive", FIRST, {"logprobs": of_reply(np.negative)}),
    "log2": ("positive", FIRST, {"logprobs": of_reply(lambda x: x / np.log(2))}),
    "rounded": ("quantised", None, {"logprobs": of_reply(lambda x: np.round(x, 2))}),
    "clamped": ("clamped", None, {"logprobs": of_reply(lambda x: x.clip(-3))}),
    "zeros": ("fillers", FIRST, {"logprobs": of_reply(np.zeros_like)}),
    "one zero": ("fillers", FIRST + 4, {"logprobs": lambda x: overwrite(x, 0, FIRST + 4)}),
    "one bit": (
        "",
        FIRST + 6,
        {
            "logprobs": lambda x: overwrite(
                x, np.nextafter(x[FIRST + 6], np.float32(-99)), FIRST + 6
            )
        },
    ),
}


def test_targets_of_the_prompt_may_be_fillers():
    datum = make_datum(has_spans=True, target_tokens=lambda x: overwrite(x, 0, slice(0, FIRST)))
    assert trace(datum).status == "drawn"


@pytest.mark.parametrize("has_spans", [True, False])
@pytest.mark.parametrize("case", DEFECTS)
def test_log_probs_that_were_not_recorded_have_their_cause(case, has_spans):
    cause, position, changes = DEFECTS[case]
    found = trace(make_datum(has_spans=has_spans, **changes))
    assert (found.status, found.cause) == ("differs", cause), found.text
    assert position is None or found.position == position
    assert f"datum 5, target {found.position}: its log-prob is" in found.text
    assert not cause or CAUSES[cause].remedy in found.text


def test_other_log_probs_of_the_same_ids_may_be_of_another_server_unless_a_span_names_this_one():
    changes = {"logprobs": lambda x: overwrite(x, 0.7 * x, slice(None))}
    found = trace(make_datum(has_spans=False, **changes))
    assert (found.status, found.position) == ("foreign", FIRST)
    assert "one drew the same ids, but with other log-probs" in found.text
    found = trace(make_datum(has_spans=True, **changes))
    assert (found.status, found.cause, found.position) == ("differs", "", FIRST)


def test_a_log_prob_without_an_advantage_is_not_compared():
    def blank(array):
        array[FIRST + 2] = 0.0

    assert trace(make_datum(logprobs=blank, advantages=blank)).status == "drawn"


@pytest.mark.parametrize("has_spans", [True, False])
def test_ids_that_were_encoded_again_are_found_at_the_first_one(has_spans):
    tokens = TOKENS.copy()
    tokens[PROMPT + 3 : PROMPT + 5] = [7, 8]
    found = trace(make_datum(tokens, has_spans=has_spans))
    assert (found.cause, found.position) == ("reencoded", FIRST + 3)
    assert "it is 7, and " in found.text and f"{ONE.token_ids[3]}" in found.text


def test_a_rendered_history_is_no_longer_what_the_turn_was_drawn_after():
    tokens = TOKENS.copy()
    tokens[2] = 99_999
    found = trace(make_datum(tokens))
    assert (found.cause, found.position) == ("rerendered", 1)
    assert found.text.startswith("datum 5, target 1: it is 99999, and token 2 of the prompt of one")


@pytest.mark.parametrize("has_spans", [True, False])
def test_a_stop_token_that_was_dropped_is_a_cut_end(has_spans):
    """Without spans the reply runs into what follows it, which is not trained."""
    at = FIRST + REPLY - 1
    tokens = np.delete(TOKENS, at + 1)[: at + 1 + TOOL]
    datum = make_datum(
        tokens, has_spans=False, advantages=lambda x: overwrite(x, 0, slice(at, None))
    )
    if has_spans:
        claimed = (
            Span(kind="prompt", sequence_id="one", offset=1, length=PROMPT - 1),
            Span(kind="sampled", sequence_id="one", offset=0, length=REPLY - 1),
            Span(kind="prompt", sequence_id="two", offset=PROMPT + REPLY, length=TOOL - 1),
        )
        datum = replace(datum, loss_spans=claimed)
    found = trace(datum)
    assert (found.cause, found.position) == ("missing_final", at), found.text


@pytest.mark.parametrize("has_spans", [True, False])
def test_a_row_that_ends_before_its_reply_has_a_cut_end(has_spans):
    datum = make_datum(TOKENS[:-2], has_spans=False)
    if has_spans:
        datum = replace(datum, **spans(second=SECOND - 2))
    found = trace(datum)
    assert (found.cause, found.position) == ("missing_final", len(datum) - 1)
    assert "two drew 2 more tokens" in found.text


def test_more_tokens_than_were_drawn_come_after_the_stop():
    tokens = np.concatenate([TOKENS, [5, 6]])
    datum = make_datum(tokens, has_spans=False)
    found = trace(replace(datum, **spans(second=SECOND + 2)))
    assert (found.cause, found.position) == ("after_stop", len(TOKENS) - 1)
    assert "has only 7 tokens" in found.text


def test_targets_that_were_not_shifted_are_at_the_wrong_place():
    datum = make_datum()
    datum.inputs["target_tokens"][:] = datum.token_ids
    found = trace(datum)
    assert (found.status, found.cause, found.position) == ("differs", "boundary", 0)
    assert "the ids were taken 1 earlier" in found.text


def test_a_prompt_that_is_there_twice_is_named():
    tokens = np.concatenate([ONE.prompt_ids, ONE.prompt_ids, ONE.token_ids])
    count = len(tokens) - 1
    inputs = {
        "target_tokens": tokens[1:].astype(np.int64),
        "logprobs": np.concatenate([np.zeros(2 * PROMPT - 1), ONE.logprobs]).astype(np.float32),
        "advantages": np.concatenate([np.zeros(2 * PROMPT - 1), np.ones(REPLY)]),
    }
    sampled = Span(kind="sampled", sequence_id="one", offset=0, length=REPLY)
    twice = Span(kind="prompt", sequence_id="one", offset=0, length=PROMPT)
    loss_spans = (replace(twice, offset=1, length=PROMPT - 1), twice, sampled)
    datum = Datum(token_ids=tokens[:-1], inputs=inputs, loss_spans=loss_spans)
    assert count == sum(span.length for span in loss_spans)
    found = trace(datum)
    assert (found.cause, found.position) == ("duplicated_prompt", 2 * PROMPT - 1)


def test_a_trained_token_of_the_prompt_was_not_sampled():
    found = trace(make_datum(advantages=lambda x: overwrite(x, 1.0, SECOND_AT - 2)))
    assert (found.cause, found.position) == ("observation_trained", SECOND_AT - 2)


def test_a_reply_under_another_prompt_is_told_for_policy_losses_alone():
    """Distillation trains sampled tokens after other prompts, by their weights."""
    tokens = np.concatenate([[1, 2, 3], ONE.token_ids])
    blank = np.zeros(2, np.float32)
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1)}
    spans_of = (
        Span(kind="prompt", sequence_id="short", offset=1, length=2),
        Span(kind="sampled", sequence_id="one", offset=0, length=REPLY),
    )
    datum = Datum(token_ids=tokens[:-1].astype(np.int32), inputs=inputs, loss_spans=spans_of)
    short = replace(ONE, prompt_ids=np.array([1, 2, 3], np.int32))
    sequences = SEQUENCES | {"short": short}
    assert trace(datum, sequences).status == "drawn"
    inputs["logprobs"] = np.concatenate([blank, ONE.logprobs])
    inputs["advantages"] = np.concatenate([blank, np.ones(REPLY, np.float32)])
    assert trace(datum, sequences).cause in ("rerendered", "boundary")


def test_what_no_known_sequence_drew_is_foreign_to_policy_losses():
    found = trace(make_datum(), {"one": ONE})
    assert (found.status, found.position) == ("foreign", SECOND_AT)
    assert "the sequence 'two' was not drawn here" in found.text
    assert (found.versions[FIRST : FIRST + REPLY] == 3).all()
    found = trace(make_datum(has_spans=False), {"one": ONE})
    assert found.status == "foreign" and f"target {SECOND_AT}: it is trained" in found.text
    for has_spans in (True, False):
        datum = make_datum(has_spans=has_spans)
        found = trace_datum(5, datum, {}.get, loss="cross_entropy", index=index_of({}))
        assert found.status == "unknown"


def test_a_reply_from_elsewhere_to_a_known_prompt_is_foreign_and_not_wrong():
    rng = np.random.default_rng(9)
    tokens = np.concatenate([ONE.prompt_ids, ONE.token_ids[:1], rng.integers(0, 100, 8)])
    datum = make_datum(tokens, has_spans=False)
    datum.inputs["logprobs"][FIRST:] = rng.uniform(-5, -1, 9)
    assert trace(datum).status == "foreign"


def test_datums_that_claim_nothing_are_not_judged():
    count = len(TOKENS) - 1
    weighted = {"target_tokens": TOKENS[1:].astype(np.int64), "weights": np.ones(count)}
    assert trace(Datum(token_ids=TOKENS[:-1], inputs=weighted)).status == "unknown"
    several = {"target_tokens": np.zeros((count, 3), np.int64)}
    assert trace(Datum(token_ids=TOKENS[:-1], inputs=several)).text == "targets are [N, K]"


def test_an_index_forgets_its_oldest_sequences():
    index = index_of(max_sequences=2)
    assert [names for _, names in index.find(TOKENS)] == [["one"], ["two"]]
    index = index_of(max_sequences=1)
    assert [(size, names) for size, names in index.find(TOKENS)] == [(SECOND_AT + 1, ["two"])]


def test_many_replies_to_one_prompt_are_told_apart():
    """Certain tokens have the log-prob 0.0, as observations have by custom."""
    sequences = dict(SEQUENCES)
    for at in range(300):
        reply = drawn(ONE.prompt_ids, REPLY, seed=100 + at % 5, version=at)
        sequences[f"r{at}"] = replace(reply, logprobs=np.where(at % 2, 0, reply.logprobs))
    sequences["short"] = replace(ONE, prompt_ids=TOKENS[:2], logprobs=np.zeros_like(ONE.logprobs))
    sequences["one"] = sequences.pop("one")
    found = trace(make_datum(has_spans=False), sequences)
    assert (found.status, found.versions[FIRST]) == ("drawn", 3)
    asked = []
    trace_datum(
        0,
        make_datum(has_spans=False),
        lambda name: asked.append(name) or sequences[name],
        index=index_of(sequences),
    )
    assert len(asked) < 5, "the latest are looked at first, and the right one ends the search"


def drawn_after(prompt, ids, version=0):
    """A reply whose log-probs are a function of what is before each token, and of the version."""
    whole = [*prompt, *ids]
    logprobs = [-1e-3 - hash((version, *whole[: len(prompt) + at])) % 999 for at in range(len(ids))]
    return Drawn(
        prompt_ids=np.array(prompt, np.int32),
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.full(len(ids), version, np.int32),
    )


def datum_of(prompt, *turns, advantages=None):
    """A datum of turns: a reply, or ids that were observed."""
    ids, logprobs = list(prompt), [0.0] * len(prompt)
    for turn in turns:
        is_reply = isinstance(turn, Drawn)
        ids += turn.token_ids.tolist() if is_reply else turn
        logprobs += turn.logprobs.tolist() if is_reply else [0.0] * len(turn)
    inputs = {
        "target_tokens": np.array(ids[1:], np.int64),
        "logprobs": np.array(logprobs[1:], np.float32),
    }
    inputs["advantages"] = (inputs["logprobs"] != 0).astype(np.float32)
    if advantages is not None:
        inputs["advantages"] *= advantages
    return Datum(token_ids=np.array(ids[:-1], np.int32), inputs=inputs)


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    prompt=IDS,
    turns=st.lists(st.tuples(IDS, IDS, st.integers(0, 1)), min_size=1, max_size=3),
    others=st.lists(st.tuples(st.integers(0, 12), IDS, st.integers(0, 1)), max_size=12),
    is_before=st.booleans(),
    advantage=st.sampled_from([1.0, -1.0, 0.0]),
)
def test_rows_drawn_here_are_known_whatever_else_was_drawn(
    prompt, turns, others, is_before, advantage
):
    """Prompts and replies of two ids: they extend one another, begin and contain one another."""
    told, path, replies = [], list(prompt), {}
    for at, (ids, observed, version) in enumerate(turns):
        reply = replies[f"own{at}"] = drawn_after(path, ids, version)
        path += [*ids, *observed]
        told += [reply, observed]
    more = {
        f"other{at}": drawn_after(path[: 1 + size % len(path)], ids, version)
        for at, (size, ids, version) in enumerate(others)
    }
    sequences = more | replies if is_before else replies | more
    datum = datum_of(prompt, *told[:-1], advantages=advantage)
    found = trace(datum, sequences)
    assert found.status == "drawn", found.text
    is_sampled = datum.inputs["logprobs"] != 0
    expected = np.concatenate([turn.versions for turn in told if isinstance(turn, Drawn)])
    assert np.array_equal(found.versions[is_sampled], expected)
    datum.inputs["logprobs"][np.flatnonzero(is_sampled)[-1]] = -0.125
    assert advantage == 0 or trace(datum, sequences).status in ("differs", "foreign")


FULL = drawn_after([5, 17, 99], [1, 2, 3, 4, 5, 6])
SHORT = drawn_after([5, 17, 99], [1])


@pytest.mark.parametrize(
    "between",
    [
        [SHORT],
        [SHORT] * 300,
        [drawn_after([5, 17, 99], [1, 2, 3])],
        [drawn_after([5, 17, 99], [1, 2, 3, 4, 5, 6, 7])],
        [drawn_after([5, 17, 99], [1, 2, 3, 4, 5, 6], version=1)] * 300,
        [drawn_after([5, 17, 99, 1], [2]), drawn_after([5, 17, 99, 1, 2, 3], [4, 5, 6])],
        [drawn_after([5, 17], [99, 1, 2])],
        [FULL, SHORT, replace(FULL, logprobs=np.zeros_like(FULL.logprobs))],
        [replace(FULL, token_ids=FULL.token_ids[:0], logprobs=FULL.logprobs[:0])],
    ],
    ids=range(9),
)
def test_later_draws_do_not_hide_a_row(between):
    sequences = {"own": FULL, **{f"later{at}": reply for at, reply in enumerate(between)}}
    assert trace(datum_of([5, 17, 99], FULL), sequences).status == "drawn"


def test_a_reply_in_pieces_is_known_beside_a_longer_one():
    first, second = FULL, drawn_after([5, 17, 99, 1, 2, 3, 4, 5, 6], [7, 8])
    longer = drawn_after([5, 17, 99], [1, 2, 3, 4, 5, 6, 7, 8, 9])
    sequences = {"first": first, "second": second, "longer": longer}
    assert trace(datum_of([5, 17, 99], first, second), sequences).status == "drawn"
    observed = trace(datum_of([5, 17, 99], first, [7, 9], second), {"longer": longer, "one": first})
    assert (observed.versions >= 0).sum() == len(first.token_ids), "7 and 9 were not sampled here"


def test_a_row_that_was_cut_is_told_so_beside_a_shorter_reply():
    cut = datum_of([5, 17, 99], drawn_after([5, 17, 99], [1, 2, 3, 4]))
    assert trace(cut, {"own": FULL, "later": SHORT}).cause == "missing_final"
