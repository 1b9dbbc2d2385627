"""Each fact: two records that contradict each other are found in their rows, and nothing else."""

import numpy as np
import pytest
from array_dumps import TURNS, ArrayDump, make_rows

import lockstep
from lockstep.doctor.facts.engine import compare
from lockstep.doctor.facts.physical import contradictions
from lockstep.doctor.facts.structure import after_stop, missing_stop, stop_ids
from lockstep.doctor.findings import Setting
from lockstep.doctor.rows import Rows
from lockstep.renderers.chatml import ChatMLRenderer
from lockstep.renderers.config import ChatMLConfig
from lockstep.testing.tokenizers import byte_tokenizer
from lockstep.types import Message, ToolCall

TOKENIZER = byte_tokenizer(merges=[("l", "o"), ("lo", "w")])
RENDERER = ChatMLRenderer(TOKENIZER, ChatMLConfig(has_empty_thinking=False))
STOP = RENDERER.stop_ids[0]


class Dump(ArrayDump):
    """All columns of the rows."""

    @property
    def has(self):
        return self.rows.has


def proved(rows, **facts):
    """Cause -> rows that prove it."""
    found = lockstep.diagnose(Dump(rows, **facts), renderer=RENDERER)
    out = {}
    for cause, finding in found.causes:
        assert found.certainty_of(cause, finding)[0] == "proved", (cause.name, finding.measured)
        out[cause.name] = {piece.row for piece in finding.evidence}
    return out


def at(row, begin, end, num=120):
    return slice(row * num + begin, row * num + end)


def changed(rows, name, where, value):
    values = getattr(rows, name).copy()
    values[where] = value
    return rows.with_(**{name: values})


ROWS = make_rows(12).with_(messages=None, rewards=None)


def test_sound_rows_prove_nothing():
    assert proved(ROWS) == {}


@pytest.mark.parametrize(
    ("name", "where", "value", "cause"),
    [
        ("rollout_logprobs", at(3, 20, 22), np.nan, "nonfinite"),
        ("trainer_logprobs", at(3, 20, 21), -np.inf, "nonfinite"),
        ("rollout_logprobs", at(3, 20, 21), 0.5, "positive"),
        ("rollout_logprobs", at(3, 10, 50), 0.0, "fillers"),
        ("rollout_logprobs", at(3, 10, 50), -7.25, "clamped"),
        ("loss_mask", at(3, 50, 70), True, "observation_trained"),
        ("loss_mask", at(3, 6, 10), True, "boundary"),
        ("loss_mask", at(3, 10, 13), False, "boundary"),
        ("loss_mask", at(3, 48, 50), False, "missing_final"),
    ],
)
def test_numbers_and_masks(name, where, value, cause):
    rows = changed(ROWS, name, where, value).with_(is_sampled=ROWS.loss_mask)
    if cause == "clamped":
        rows = changed(rows, "trainer_logprobs", where, -9 - np.arange(40) / 10)
    if name == "loss_mask" and value:  # log-probs of both sides, as a program computes them
        for column in ("rollout_logprobs", "trainer_logprobs"):
            rows = changed(rows, column, where, -1.0 - np.arange(where.stop - where.start) / 100)
    assert proved(rows) == {cause: {"row-3"}}


def test_a_row_that_the_trainer_did_not_score_has_no_number_of_it():
    rows = changed(ROWS, "trainer_logprobs", at(3, 0, 120), np.nan)
    assert proved(rows) == {"nonfinite": {"row-3"}}  # it has NaN
    assert proved(rows.with_(trainer_version=np.where(np.arange(12) == 3, -1, 0))) == {}
    lacks = tuple(frozenset({"trainer_logprobs"} if at == 3 else ()) for at in range(len(rows)))
    rows = rows.with_(absent=lacks)
    assert proved(rows) == {}
    assert lockstep.diagnose(Dump(rows)).notes == [
        "1 of 12 rows, not scored by the trainer, are not compared"
    ]


@pytest.mark.parametrize("digits", [0, 1, 2, 3])
def test_rounded_numbers_are_on_a_grid_and_the_repair_rounds_the_other_side(digits):
    rows = ROWS.with_(rollout_logprobs=np.round(ROWS.rollout_logprobs, digits))
    assert set(proved(rows)) == {"quantised"}


def test_numbers_of_bfloat16_are_told():
    bits = ROWS.rollout_logprobs.view(np.uint32) & np.uint32(0xFFFF0000)
    assert set(proved(ROWS.with_(rollout_logprobs=bits.view(np.float32)))) == {"quantised"}


def test_certain_tokens_of_both_sides_are_no_fillers():
    rows = changed(ROWS, "rollout_logprobs", at(3, 10, 50), 0.0)
    assert proved(changed(rows, "trainer_logprobs", at(3, 10, 50), -1e-7)) == {}


def test_zeros_of_a_turn_are_fillers_beside_tokens_that_are_nearly_certain():
    certain = np.random.default_rng(0).random(ROWS.num_tokens) < 0.4
    rows = changed(
        changed(ROWS, "rollout_logprobs", certain, -1e-4), "trainer_logprobs", certain, -2e-4
    )
    assert proved(rows) == {}
    assert proved(changed(rows, "rollout_logprobs", at(3, 10, 50), 0.0)) == {"fillers": {"row-3"}}


def test_zeros_of_a_temperature_near_0_are_no_fillers_and_zeros_without_it_are():
    same = np.random.default_rng(0).random(ROWS.num_tokens) < 0.5
    cold = np.where(same, 0.0, 0.2 * ROWS.rollout_logprobs).astype(np.float32)
    filled = changed(ROWS, "rollout_logprobs", same, 0.0)
    assert "fillers" not in proved(ROWS.with_(rollout_logprobs=cold))
    assert set(proved(filled)) == {"fillers"}
    for facts in ({"temperature": 0.01}, {"temperature": 0.0}, {"top_k": 1}):
        assert "fillers" not in proved(filled, **facts)


def test_certain_tokens_that_a_shift_moves_are_no_proof_of_fillers():
    certain = np.random.default_rng(0).random(ROWS.num_tokens) < 0.3
    rows = changed(ROWS, "rollout_logprobs", certain, 0.0)
    rows = changed(rows, "trainer_logprobs", certain, 0.0)
    values = rows.rollout_logprobs.reshape(12, -1).copy()
    for begin, end in TURNS:  # the last one stands twice
        values[:, begin : end - 1] = values[:, begin + 1 : end].copy()
        values[:, end - 2 : end] = 0.0
    found = lockstep.diagnose(Dump(rows.with_(rollout_logprobs=values.reshape(-1))))
    assert found.causes[0][0].name == "shifted"
    sure = {cause.name: found.certainty_of(cause, f)[0] for cause, f in found.causes}
    assert sure.get("fillers") != "proved"


def test_an_id_that_stands_inside_of_replies_is_no_stop_id():
    ids = np.where(ROWS.token_ids == 46, 45, ROWS.token_ids).reshape(12, -1)
    for begin, end in TURNS:
        ids[:, [begin + 9, end - 1]] = 46
    rows = ROWS.with_(token_ids=ids.reshape(-1))
    assert not len(stop_ids(rows, Setting())[0])
    ids[:, [begin + 9 for begin, _ in TURNS]] = 47
    assert stop_ids(ROWS.with_(token_ids=ids.reshape(-1)), Setting())[0].tolist() == [46]


@pytest.mark.parametrize(("gap", "cause"), [(5.0, "observation_trained"), (0.0, "after_stop")])
def test_tokens_after_a_stop_are_observations_where_the_trainer_denies_them(gap, cause):
    ids = np.where(ROWS.token_ids == 46, 45, ROWS.token_ids)
    ids[at(3, 30, 31)] = 46
    rows = ROWS.with_(token_ids=ids, turn=None)
    after = at(3, 31, 50)
    rows = changed(rows, "rollout_logprobs", after, rows.trainer_logprobs[after] + gap)
    (found,) = after_stop(rows, Setting(stop_ids=frozenset({46})))
    assert found.cause == cause and list(found.begin) == [3 * 120 + 31]
    padded = changed(rows, "token_ids", after, 9)  # no observation, whatever the trainer says
    (found,) = after_stop(padded, Setting(stop_ids=frozenset({46}), pad_id=9))
    assert found.cause == "after_stop"


@pytest.mark.parametrize(("later", "cause"), [(49, "boundary"), (None, "after_stop")])
def test_a_mask_that_begins_with_the_stop_id_of_the_prompt_begins_too_early(later, cause):
    """Without another stop id it is an empty reply, and tokens after it."""
    ids = np.where(ROWS.token_ids == 46, 45, ROWS.token_ids)
    ids[at(3, 10, 11)] = 46
    if later:
        ids[at(3, later, later + 1)] = 46
    (found,) = after_stop(ROWS.with_(token_ids=ids), Setting(stop_ids=frozenset({46})))
    assert (found.cause, found.begin[0] - 3 * 120) == (cause, 10 if later else 11)


def test_a_filler_at_an_observation_is_a_trained_observation():
    """Facts about masks come before those about numbers, in whatever order they are imported."""
    between = (ROWS.position >= 50) & (ROWS.position < 70)
    mask = ROWS.loss_mask.copy()
    mask[between] = True
    rows = ROWS.with_(loss_mask=mask, is_sampled=ROWS.turn >= 0)
    for side in ("rollout_logprobs", "trainer_logprobs"):
        rows = changed(rows, side, between, 0.0 if side == "rollout_logprobs" else -3.0)
    assert set(proved(rows)) == {"observation_trained"}


def test_a_first_update_that_begins_with_a_kl():
    def told(**metrics):
        steps = tuple({"mismatch/k1": 1e-3, "mismatch/k2": 1e-3, **metrics} for _ in range(3))
        return contradictions(Setting(step_metrics=steps)).cause

    assert told(**{"train/approx_kl/0": 0.02}) == "uneven_old_logprobs"
    assert told(**{"train/approx_kl/0": 1e-7}) == told(**{"train/approx_kl/0": 1e-3}) == ""
    assert told(**{"train/approx_kl/0": 0.02, "mismatch/k3": -1.0}) == "unphysical"


def test_probabilities_are_told_in_all_rows():
    rows = ROWS.with_(rollout_logprobs=np.exp(ROWS.rollout_logprobs))
    assert set(proved(rows)) == {"positive"}


@pytest.mark.parametrize("length", [-3, 500, 14])
def test_a_prompt_length_that_cannot_be(length):
    lengths = np.full(12, 10)
    lengths[5] = length
    assert proved(ROWS.with_(prompt_lengths=lengths)) == {"boundary": {"row-5"}}
    assert proved(ROWS.with_(prompt_lengths=np.full(12, 10))) == {}


def test_versions_that_no_trainer_had_and_too_old_ones():
    version = np.where(ROWS.loss_mask, 5, -1).astype(np.int32)
    rows = ROWS.with_(policy_version=version, trainer_version=np.full(12, 5))
    assert proved(rows, max_staleness=0) == {}
    assert proved(changed(rows, "policy_version", at(3, 10, 50), 6)) == {"late_version": {"row-3"}}
    old = changed(rows, "policy_version", at(3, 10, 50), 2)
    assert proved(old, max_staleness=1) == {"stale": {"row-3"}}


def test_advantages_one_token_off():
    own = np.where(ROWS.loss_mask, 0.5, 0.0).astype(np.float32)
    assert proved(ROWS.with_(advantages=own)) == {}
    assert set(proved(ROWS.with_(advantages=np.roll(own, 1)))) == {"late_advantages"}


def test_an_expert_twice_is_a_filler():
    routes = np.tile(np.array([[[0, 3], [1, 2]]], np.int16), (ROWS.num_tokens, 1, 1))
    assert proved(ROWS.with_(routed_experts=routes)) == {}
    filled = changed(ROWS.with_(routed_experts=routes), "routed_experts", at(3, 0, 60), 0)
    assert proved(filled) == {"zero_routes": {"row-3"}}


# -- the engine's ids -----------------------------------------------------------------------------


def with_engine(rows=ROWS, replies=lambda row, ids: ids, prompts=lambda row, ids: ids):
    parts = [rows.token_ids[tokens] for tokens in rows.slices]
    engine = tuple(tuple(replies(r, ids[b:e]) for b, e in TURNS) for r, ids in enumerate(parts))
    sent = tuple((prompts(r, ids[: TURNS[0][0]]),) for r, ids in enumerate(parts))
    return rows.with_(engine_ids=engine, engine_prompt_ids=sent)


def test_rows_of_the_engines_ids_prove_nothing():
    assert proved(with_engine()) == {}


def test_a_mask_that_is_not_the_engines_reply():
    rows = changed(ROWS, "loss_mask", at(3, 50, 70), True).with_(turn=None, is_sampled=None)
    for column in ("rollout_logprobs", "trainer_logprobs"):
        rows = changed(rows, column, at(3, 50, 70), -1.0 - np.arange(20) / 100)
    rows = with_engine(rows)
    assert proved(rows) == {"observation_trained": {"row-3"}}


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (lambda ids: np.append(ids, STOP), "missing_final"),
        (lambda ids: ids[:-3], "after_stop"),
        (lambda ids: np.concatenate([ids[:4] + 1, ids]), "thinking_dropped"),
        (lambda ids: ids[::-1], "rerendered"),
    ],
)
def test_a_reply_that_the_row_does_not_hold(reply, cause):
    def replies(row, ids):
        return reply(ids).astype(np.int32) if row == 3 else ids

    found = proved(with_engine(replies=replies))
    assert found == {cause: {"row-3"}} or cause == "after_stop"  # it is found in the row, shorter


def test_the_same_text_in_other_ids_is_encoded_again_and_changed_text_is_changed():
    low = np.array(TOKENIZER.encode("lowly"), np.int32)
    spelt = np.array([*TOKENIZER.encode("l"), *TOKENIZER.encode("o"), *TOKENIZER.encode("w"),
                      *TOKENIZER.encode("ly")], np.int32)  # fmt: skip
    assert compare(low, spelt, TOKENIZER)[0] == "reencoded"
    longer = np.array(TOKENIZER.encode("lowly ones"), np.int32)
    assert compare(np.append(low, STOP), np.append(longer, STOP), TOKENIZER)[0] == "post_processed"


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        (lambda ids: ids[1:], "wrong_template"),
        (lambda ids: np.delete(ids, slice(2, 8)), "wrong_template"),
        (lambda ids: np.insert(ids, 3, [7] * 6), "dropped_images"),
    ],
)
def test_a_prompt_that_the_engine_was_not_sent(prompt, cause):
    rows = with_engine(prompts=lambda row, ids: prompt(ids) if row == 3 else ids)
    assert proved(rows) == {cause: {"row-3"}}


# -- dialogues ------------------------------------------------------------------------------------


def dialogue(number, *, thinking="", tool="The ship is low."):
    words = " ".join(np.random.default_rng(number).choice(["low", "slow", "flow", "glow"], 6))
    return [
        Message(role="user", content=f"Where is ship {number}?"),
        Message(role="assistant", thinking=thinking,
                tool_calls=(ToolCall(name="find", arguments=f'{{"q": {number}}}'),)),
        Message(role="tool", name="find", content=tool),
        Message(role="assistant", content=f"It is {words}, I am sure."),
    ]  # fmt: skip


def rows_of(dialogues, change=lambda number, ids, turn: (ids, turn), messages=None):
    """Rows of dialogues, both sides' log-probs from one function of the ids."""
    ids, turns = [], []
    for number, said in enumerate(dialogues):
        mine = list(RENDERER.render(said[:1]))
        turn = [-1] * len(mine)
        for n, (reply, after) in enumerate(((said[1], [said[2]]), (said[3], None))):
            drawn = list(RENDERER.render_reply(reply))
            mine, turn = mine + drawn, turn + [n] * len(drawn)
            if after:
                glue = list(RENDERER.extend(drawn, after))
                mine, turn = mine + glue, turn + [-1] * len(glue)
        mine, turn = change(number, np.array(mine, np.int32), np.array(turn, np.int32))
        ids.append(mine)
        turns.append(turn)
    turn = np.concatenate(turns)
    rng = np.random.default_rng(0)
    logprobs = np.where(turn >= 0, -rng.exponential(1.0, len(turn)), np.nan).astype(np.float32)
    return Rows(
        row_ids=tuple(f"row-{n}" for n in range(len(ids))),
        offsets=np.cumsum([0, *map(len, ids)]),
        token_ids=np.concatenate(ids),
        loss_mask=turn >= 0,
        turn=turn,
        is_sampled=turn >= 0,
        rollout_logprobs=logprobs,
        trainer_logprobs=logprobs.copy(),
        messages=tuple(map(tuple, messages or dialogues)),
    )


DIALOGUES = [dialogue(n) for n in range(12)]


def test_sound_dialogues_prove_nothing():
    assert proved(rows_of(DIALOGUES)) == {}


def without(number, ids, turn, *, which):
    if number != 3:
        return ids, turn
    kept = np.ones(len(ids), bool)
    kept[which(ids, turn)] = False
    return ids[kept], turn[kept]


@pytest.mark.parametrize(
    ("which", "cause"),
    [
        (lambda ids, turn: [np.flatnonzero(turn == 0)[-1]], "missing_final"),
        (lambda ids, turn: np.flatnonzero(turn == 1)[-8:-1], "post_processed"),
    ],
)
def test_replies_that_lost_their_end_or_their_words(which, cause):
    rows = rows_of(DIALOGUES, lambda *row: without(*row, which=which))
    assert proved(rows) == {cause: {"row-3"}}


@pytest.mark.parametrize(("renderer", "places"), [(RENDERER, 12), (None, 0)])
def test_a_template_tells_that_no_reply_has_its_end(renderer, places):
    """Rows without any stop id: they may be of another program, if no template is known."""
    rows = rows_of(DIALOGUES, lambda _, ids, turn: (ids[ids != STOP], turn[ids != STOP]))
    setting = Setting(stop_ids=frozenset({STOP}), renderer=renderer)
    found = [c for c in missing_stop(rows, setting) if c.cause == "missing_final"]
    assert [len(c.begin) for c in found] == [places] * bool(places)


@pytest.mark.parametrize("name", ["", "inside", "engine", "unusual"])
def test_a_reply_that_ends_with_a_stop_string_has_its_end(name):
    """A control token in the text after a reply shows a template, which has a stop id there."""
    ids = np.where(ROWS.token_ids == 46, 45, ROWS.token_ids)
    ids.reshape(12, -1)[:, 3] = 46  # the prompt's
    if name == "unusual":
        ids.reshape(12, -1)[1:, 49] = ids.reshape(12, -1)[1:, 109] = 46
    elif name:
        ids.reshape(12, -1)[:, 60] = 46
    rows = ROWS.with_(token_ids=ids, finish_reasons=("stop",) * 12)
    rows = with_engine(rows) if name == "engine" else rows
    found = list(missing_stop(rows, Setting(stop_ids=frozenset({46}))))
    expected = {"inside": [("shown", 12)], "unusual": [("fit", 2)]}.get(name, [])
    assert [(one.basis, len(one.begin)) for one in found] == expected


def test_tokens_after_a_stop():
    def more(number, ids, turn):
        extra = [] if number != 3 else TOKENIZER.encode("and more")
        turn = np.append(turn, [1] * len(extra)).astype(np.int32)
        return np.append(ids, extra).astype(np.int32), turn

    assert proved(rows_of(DIALOGUES, more)) == {"after_stop": {"row-3"}}


def test_a_control_token_that_a_tools_text_spells():
    name = TOKENIZER.control_name(STOP)
    dialogues = [dialogue(n, tool=f"low {name} flow" if n == 3 else "low") for n in range(12)]
    assert proved(rows_of(dialogues)) == {}

    def injected(number, ids, turn):
        if number != 3:
            return ids, turn
        spelt = TOKENIZER.encode(name)
        [begin] = [i for i in range(len(ids)) if ids[i : i + len(spelt)].tolist() == spelt]
        keep = np.r_[0 : begin + 1, begin + len(spelt) : len(ids)]
        ids = ids.copy()
        ids[begin] = STOP
        return ids[keep], turn[keep]

    assert proved(rows_of(dialogues, injected)) == {"injected_control": {"row-3"}}


def test_thinking_that_an_earlier_reply_lost():
    dialogues = [dialogue(n, thinking="I must find this ship.") for n in range(12)]
    assert proved(rows_of(dialogues)) == {}
    bare = [dialogue(n) for n in range(12)]
    assert set(proved(rows_of(bare, messages=dialogues))) == {"thinking_dropped"}


def test_equal_ids_that_both_sides_read_are_no_padding():
    """Places of an image, or blanks of a table, where nobody says which id is padding."""
    ids = ROWS.token_ids.reshape(12, -1).copy()
    ids[:, 51:69] = 9
    rows = ROWS.with_(token_ids=ids.reshape(-1))
    assert proved(rows) == {}
    far = rows.trainer_logprobs - np.where(rows.row_of == 3, 0.3 * (rows.position % 3), 0)
    found = lockstep.diagnose(Dump(rows.with_(trainer_logprobs=far.astype(np.float32))))
    sure = {cause.name: found.certainty_of(cause, f)[0] for cause, f in found.causes}
    assert sure.get("padding") != "proved"


def test_padding_and_prompts_that_stand_twice():
    def changed(number, ids, turn, front):
        if number != 3:
            return ids, turn
        new = front(ids, int(np.argmax(turn >= 0)))
        return np.r_[new, ids].astype(np.int32), np.r_[np.full(len(new), -1), turn].astype(np.int32)

    twice = rows_of(DIALOGUES, lambda *row: changed(*row, front=lambda ids, size: ids[:size]))
    assert proved(twice) == {"duplicated_prompt": {"row-3"}}
    padded = rows_of(DIALOGUES, lambda *row: changed(*row, front=lambda ids, size: [9] * 12))
    sent = tuple((padded.token_ids[t][: first - t.start],) for t, ((first, _), *_) in zip(
        padded.slices, padded.replies, strict=True))  # fmt: skip
    drawn = tuple(tuple(padded.token_ids[b:e] for b, e in one) for one in padded.replies)
    told = (*sent[:3], (sent[3][0][12:],), *sent[4:])
    for rows in (padded, padded.with_(engine_ids=drawn, engine_prompt_ids=told)):
        assert proved(rows, pad_id=9) == {}, "both sides ignored it"
        other = rows.trainer_logprobs - np.where(rows.row_of == 3, 0.3 * (rows.position % 3), 0)
        rows = rows.with_(trainer_logprobs=other.astype(np.float32))
        assert proved(rows, pad_id=9) == {"padding": {"row-3"}}


def test_a_calls_id_and_the_spelling_of_its_arguments_are_no_difference():
    other = [
        [m if not m.tool_calls else Message(role="assistant", tool_calls=(
            ToolCall(name="find", arguments=f'{{ "q":{n} }}', id="call-77"),)) for m in said]
        for n, said in enumerate(DIALOGUES)
    ]  # fmt: skip
    assert proved(rows_of(DIALOGUES, messages=other)) == {}


def test_messages_of_other_rows_are_not_judged():
    said = Message(role="assistant", content="nothing of the sort, ever, at all")
    strange = [[Message(role="user", content="completely unrelated question " * 3), said]] * 12
    found = lockstep.diagnose(Dump(rows_of(DIALOGUES, messages=strange)), renderer=RENDERER)
    assert found.outcome == "not_judged" and "of other rows" in found.headline


# -- nothing is compared ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_logprobs": np.full(1440, np.nan, np.float32)},
        {"loss_mask": np.zeros(1440, bool)},
        {"loss_mask": ~ROWS.loss_mask, "turn": None},
    ],
)
def test_where_nothing_is_compared_nothing_is_consistent(changes):
    found = lockstep.diagnose(Dump(ROWS.with_(is_sampled=None, turn=None).with_(**changes)))
    assert found.outcome == "not_judged" and "nothing is compared" in found.headline
    assert found.next_steps


def test_a_stop_id_that_is_lost_hides_nothing_else_from_a_model():
    ids = np.where(ROWS.token_ids == 46, 45, ROWS.token_ids)
    ids[ROWS.spans.end[ROWS.spans.is_last] - 1] = ids.reshape(12, -1)[:, 60] = 46
    for model, reaches_on in ((object(), False), (None, True)):
        setting = Setting(stop_ids=frozenset({46}), model=model)
        (found,) = missing_stop(ROWS.with_(token_ids=ids), setting)
        assert found.cause == "missing_final" and found.reaches_on is reaches_on
