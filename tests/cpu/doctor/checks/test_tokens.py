"""What the checks of ids, masks and places say of sound rows, and of each defect."""

import numpy as np
import pytest
from made_dialogues import (
    PAD_ID,
    RENDERERS,
    Made,
    causes,
    dialogues,
    examined,
    hit,
    rows_of,
    setting_of,
    share_of,
)

from lockstep.doctor.checks.base import Setting

FAMILIES = ("chatml", "harmony")
KNOWN = pytest.mark.parametrize("is_known", [True, False], ids=["renderer", "rows alone"])
SAMPLED = pytest.mark.parametrize("is_sampled", [True, False], ids=["sampled", "mask alone"])
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def setting(family: str, is_known: bool) -> Setting:
    return setting_of(family) if is_known else Setting()


# -- sound rows ------------------------------------------------------------------------------------


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("noise", [1e-6, 0.02])
def test_sound_rows_have_no_cause(family, is_known, is_sampled, noise):
    for seed in range(3):
        rows = rows_of(
            dialogues(family, noise=noise, seed=seed), is_sampled=is_sampled, engine=True
        )
        assert causes(rows, setting(family, is_known)) == []


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_few_sound_rows_have_no_cause(family, is_known, is_sampled, num_rows):
    for seed in range(4):
        made = dialogues(family, num_rows, noise=0.02, seed=seed)
        rows = rows_of(made, is_sampled=is_sampled, engine=seed % 2 == 0, trainer=seed % 3 > 0)
        assert causes(rows, setting(family, is_known)) == []


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("limit", [8, 40])
def test_replies_that_a_limit_cuts_off_are_sound(family, is_known, is_sampled, limit):
    made = dialogues(family, max_turn_tokens=limit)
    assert causes(rows_of(made, is_sampled=is_sampled), setting(family, is_known)) == []


@FAMILY
@SAMPLED
def test_rows_that_are_cut_at_a_budget_of_the_row_are_sound(family, is_sampled):
    made = [row.take(range(min(len(row.ids), 150))) for row in dialogues(family, 60)]
    assert causes(rows_of(made, is_sampled=is_sampled), setting_of(family)) == []


@FAMILY
def test_tokens_that_were_certain_are_sound(family):
    def certain(row: Made) -> Made:
        row.rollout = [0.0 if lp > -1e-5 else lp for lp in row.rollout]
        return row

    assert causes(rows_of(hit(dialogues(family, noise=0.02), certain))) == []


# -- the end of a turn -----------------------------------------------------------------------------


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("count", [1, 5])
def test_lost_final_tokens_are_found(family, is_known, is_sampled, share, count):
    def lose(row: Made) -> Made:
        return row.take(range(len(row.ids) - count))

    rows = rows_of(hit(dialogues(family, 60), lose, share), is_sampled=is_sampled)
    said = causes(rows, setting(family, is_known))
    if is_known or share < 1:
        assert said == ["missing_final"]
    else:  # which id would have ended the last turns cannot be learnt where none has it
        assert said in ([], ["missing_final"])


@FAMILY
def test_what_the_engine_answered_beyond_the_row_is_proof(family):
    made = hit(dialogues(family, 20), lambda row: row.take(range(len(row.ids) - 2)), 0.05)
    finding = next(
        f for f in examined(rows_of(made, engine=True)).findings if f.cause == "missing_final"
    )
    assert finding.verdict == "differs" and finding.figures["tokens_cut_off"] == 2
    assert finding.evidence[0].expected_ids[-1] in RENDERERS[family].stop_ids


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_tokens_behind_a_stop_are_found(family, is_known, is_sampled, share):
    def go_on(row: Made) -> Made:
        begin, end = row.spans()[-1]
        return row.take([*range(end), *range(begin, min(begin + 4, end - 1))])

    made = hit(dialogues(family, 60), go_on, share)
    rows = rows_of(made, is_sampled=is_sampled)
    found = examined(rows, setting(family, is_known)).findings
    finding = next(f for f in found if f.check == "tokens/after_stop")
    if is_known:
        assert causes(rows, setting(family, is_known)) == ["after_stop"]
        assert finding.figures["turns_with_tokens_after_stop"] == round(share * 60)
    elif share < 1:
        assert finding.verdict in ("differs", "information", "consistent")


# -- masks -----------------------------------------------------------------------------------------


def train_behind_prompt(row: Made) -> Made:
    begin = row.spans()[0][0]
    row.mask = [i >= begin for i in range(len(row.ids))]
    row.rollout = [0.0 if np.isnan(lp) else lp for lp in row.rollout]
    row.trainer = [-2.0 if np.isnan(lp) else lp for lp in row.trainer]
    return row


def train_all(row: Made) -> Made:
    row.mask = [True] * len(row.ids)
    row.rollout = [0.0 if np.isnan(lp) else lp for lp in row.rollout]
    row.trainer = [-2.0 if np.isnan(lp) else lp for lp in row.trainer]
    return row


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("change", [train_behind_prompt, train_all])
def test_trained_observations_are_found_and_nothing_else(
    family, is_known, is_sampled, share, change
):
    rows = rows_of(hit(dialogues(family, 60), change, share), is_sampled=is_sampled)
    said = causes(rows, setting(family, is_known))
    if is_known or is_sampled or share < 1:
        assert said == ["observation_trained"]
        assert share_of(rows, "observation_trained", setting(family, is_known)) > 0.99


# -- fillers ---------------------------------------------------------------------------------------


def fill_some(value: float, every: int = 7):
    def change(row: Made) -> Made:
        at = [i for i, t in enumerate(row.turn) if t >= 0][::every]
        for i in at:
            row.rollout[i] = value
        return row

    return change


@FAMILY
@SAMPLED
@pytest.mark.parametrize("value", [0.0, -1.0, -9999.0])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_fillers_are_found_with_all_of_the_gap(family, is_sampled, value, share):
    made = hit(dialogues(family, 60, noise=0.02), fill_some(value), share)
    rows = rows_of(made, is_sampled=is_sampled)
    assert causes(rows, setting_of(family)) == ["fillers"]
    assert share_of(rows, "fillers", setting_of(family)) > 0.9


@FAMILY
def test_whole_turns_of_zeros_are_found_without_a_trainer(family):
    made = hit(dialogues(family, 40), fill_some(0.0, every=1), 0.2)
    assert causes(rows_of(made, trainer=False), setting_of(family)) == ["fillers"]


def test_other_weights_do_not_make_fillers_of_certain_tokens():
    rng = np.random.default_rng(0)

    def other(row: Made) -> Made:
        row.rollout = [0.0 if lp > -1e-6 else lp for lp in row.rollout]
        row.trainer = [lp + min(0.0, float(rng.normal(0, 1.0))) for lp in row.trainer]
        return row

    assert "fillers" not in causes(rows_of(hit(dialogues("chatml", 60), other)))


# -- places ----------------------------------------------------------------------------------------


def shift(offset: int):
    """Along the trained tokens of the row, over the borders of turns."""

    def change(row: Made) -> Made:
        at = [i for i, trained in enumerate(row.mask) if trained]
        old = [row.rollout[i] for i in at]
        for place, i in enumerate(at):
            source = place + offset
            row.rollout[i] = old[source] if 0 <= source < len(old) else 0.0
        return row

    return change


def shift_turns(offset: int):
    """Within each turn."""

    def change(row: Made) -> Made:
        for begin, end in row.spans():
            old = row.rollout[begin:end]
            for place in range(end - begin):
                source = place + offset
                row.rollout[begin + place] = old[source] if 0 <= source < len(old) else 0.0
        return row

    return change


def lose_one(row: Made) -> Made:
    """The log-prob of a token in the middle of the row: those behind it move up."""
    at = [i for i, trained in enumerate(row.mask) if trained]
    lost = len(at) // 3
    old = [row.rollout[i] for i in at]
    del old[lost]
    for i, lp in zip(at, [*old, 0.0], strict=True):
        row.rollout[i] = lp
    return row


@FAMILY
@SAMPLED
@pytest.mark.parametrize("noise", [1e-6, 0.05])
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize(
    "change", [shift(1), shift(-1), shift(2), shift(-7), shift_turns(1), shift_turns(-2)]
)
def test_shifted_logprobs_are_found_with_all_of_the_gap(family, is_sampled, noise, share, change):
    rows = rows_of(hit(dialogues(family, noise=noise), change, share), is_sampled=is_sampled)
    assert causes(rows) == ["shifted"]
    assert share_of(rows, "shifted") > (0.97 if noise < 1e-3 else 0.9)


@FAMILY
def test_a_lost_logprob_moves_all_that_follow_it(family):
    rows = rows_of(hit(dialogues(family, noise=0.02), lose_one, 0.5))
    finding = next(f for f in examined(rows).findings if f.check == "tokens/shifted")
    assert finding.verdict == "differs" and finding.figures["offset"] == 1
    assert finding.figures["from_middle"] >= 15
    assert share_of(rows, "shifted") > 0.9


@pytest.mark.parametrize("offset", [1, -2])
def test_short_rows_prove_a_shift_together(offset):
    rng = np.random.default_rng(0)
    made = []
    for number in range(60):
        true = (-rng.exponential(1.0, 5)).tolist()
        nan = [float("nan")] * 2
        lps = [*nan, *true]
        turn = [-1] * 2 + [0] * 5
        ids = [90, 91, *rng.integers(0, 50, 5).tolist()]
        made.append(Made(f"s{number}", ids, turn, lps, list(lps), [t >= 0 for t in turn]))
    rows = rows_of(hit(made, shift(offset), 0.5))
    assert "shifted" in causes(rows)


def test_short_rows_prove_no_shift_that_long_rows_deny():
    rng = np.random.default_rng(0)
    short, long = [], []
    for number, length in [*((n, 5) for n in range(30)), *((n, 30) for n in range(30, 60))]:
        true = (-rng.exponential(1.0, length)).tolist()
        ids = [90, 91, *rng.integers(0, 50, length).tolist()]
        lps, turn = [float("nan")] * 2 + true, [-1] * 2 + [0] * length
        near = [lp - float(rng.uniform(0.04, 0.12)) for lp in lps]
        row = Made(f"s{number}", ids, turn, lps, near, [t >= 0 for t in turn])
        (short if length == 5 else long).append(row)

    def other(row: Made) -> Made:
        row.trainer = [min(lp + float(rng.normal(0, 1.0)), 0.0) for lp in row.trainer]
        return row

    moved = hit(short, shift(-2), 1.0)
    assert "shifted" in causes(rows_of(moved))
    assert "shifted" not in causes(rows_of([*moved, *hit(long, other)]))


@FAMILY
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("std", [0.1, 0.5, 2.0])
def test_other_weights_are_no_shift(family, seed, std):
    rng = np.random.default_rng(seed)

    def other(row: Made) -> Made:
        row.trainer = [min(lp + float(rng.normal(0, std)), 0.0) for lp in row.trainer]
        return row

    assert "shifted" not in causes(rows_of(hit(dialogues(family, 80, seed=seed), other)))


@pytest.mark.parametrize("seed", range(3))
def test_log_probs_of_another_model_altogether_are_no_shift(seed):
    rng = np.random.default_rng(seed)

    def other(row: Made) -> Made:
        row.trainer = (-rng.exponential(0.8, len(row.ids))).tolist()
        return row

    assert "shifted" not in causes(rows_of(hit(dialogues("chatml", 80, seed=seed), other)))


@FAMILY
def test_a_shift_beside_other_weights_is_found_with_its_share(family):
    rng = np.random.default_rng(0)

    def other(row: Made) -> Made:
        row.trainer = [min(lp + float(rng.normal(0, 0.2)), 0.0) for lp in row.trainer]
        return row

    both = rows_of(hit(hit(dialogues(family, 80), other), shift(1), 0.5))
    alone = rows_of(hit(dialogues(family, 80), other))
    left = (both.gap[~np.isnan(both.gap)] ** 2).sum() * (1 - share_of(both, "shifted"))
    assert left == pytest.approx((alone.gap[~np.isnan(alone.gap)] ** 2).sum(), rel=0.2)


# -- borders, and what stands between --------------------------------------------------------------


def too_early(row: Made) -> Made:
    begin = row.spans()[0][0]
    for i in range(begin - 3, begin):
        row.mask[i], row.rollout[i], row.trainer[i] = True, -1.0, -1.0
    row.prompt_length = begin - 3
    return row


def too_late(row: Made) -> Made:
    begin = row.spans()[0][0]
    for i in range(begin, begin + 3):
        row.mask[i], row.turn[i] = False, -1
        row.rollout[i] = row.trainer[i] = float("nan")
    row.prompt_length = begin + 3
    return row


def subtracted(row: Made) -> Made:
    """The last reply is not in the row, and the prompt is what is left without all replies."""
    cut = row.spans()[-1][0]
    replies = [lp for lp, t in zip(row.rollout, row.turn, strict=True) if t >= 0]
    length = cut - len(replies)
    out = row.take(range(cut))
    begin = max(length, 1)
    out.rollout = [float("nan")] * begin + replies[begin - length :][: cut - begin]
    out.trainer = [-1.0] * cut
    out.turn = [-1] * begin + [0] * (cut - begin)
    out.mask = [t >= 0 for t in out.turn]
    out.prompt_length = length
    return out


@FAMILY
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("change", [too_early, too_late, subtracted])
def test_a_border_at_the_wrong_place_is_found(family, share, change):
    rows = rows_of(hit(dialogues(family), change, share), engine=True)
    assert causes(rows, setting_of(family))[0] == "boundary"
    assert set(causes(rows, setting_of(family))) <= {"boundary", "missing_final"}


@FAMILY
@SAMPLED
def test_a_border_too_early_is_found_without_the_engines_answer(family, is_sampled):
    rows = rows_of(hit(dialogues(family), too_early, 0.5), is_sampled=is_sampled)
    rows = rows.with_(prompt_lengths=None)
    assert causes(rows, setting_of(family)) == ["boundary"]


def disturb(row: Made, begin: int) -> Made:
    """The trainer computes other numbers from here on."""
    rng = np.random.default_rng(len(row.ids))
    row.trainer = [
        min(lp + float(rng.normal(0, 0.5)), 0.0) if i >= begin else lp
        for i, lp in enumerate(row.trainer)
    ]
    return row


def pad_inside(row: Made) -> Made:
    begin = row.spans()[0][0]
    return disturb(row.insert(begin, [PAD_ID] * 8), begin)


def pad_left(row: Made) -> Made:
    return disturb(row.insert(0, [PAD_ID] * 8), 0)


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("change", [pad_inside, pad_left])
def test_padding_in_rows_is_found_with_its_gap(family, is_known, is_sampled, share, change):
    rows = rows_of(hit(dialogues(family), change, share), is_sampled=is_sampled)
    rows = rows.with_(prompt_lengths=None)
    assert causes(rows, setting(family, is_known)) == ["padding"]
    assert share_of(rows, "padding", setting(family, is_known)) > 0.95


@FAMILY
@KNOWN
def test_padding_behind_rows_is_said_and_no_cause(family, is_known):
    known = Setting(pad_id=PAD_ID) if not is_known else setting_of(family)
    made = [row.insert(len(row.ids), [PAD_ID] * 5) for row in dialogues(family)]
    found = {f.check: f.verdict for f in examined(rows_of(made), known).findings}
    assert found["tokens/padding"] == "information"
    assert causes(rows_of(made), known) == []


def test_a_stop_id_that_also_pads_is_no_padding_at_the_end_of_a_turn():
    known = setting_of("chatml")
    stop = RENDERERS["chatml"].stop_ids[0]
    known = Setting(renderer=known.renderer, stop_ids=known.stop_ids, pad_id=stop)
    assert causes(rows_of(dialogues("chatml")), known) == []


def prompt_again(row: Made) -> Made:
    begin = row.spans()[-1][0]
    prompt = row.ids[: row.spans()[0][0]]
    return disturb(row.insert(begin, prompt), begin)


@FAMILY
@KNOWN
@SAMPLED
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_prompt_that_stands_twice_is_found_with_its_gap(family, is_known, is_sampled, share):
    rows = rows_of(hit(dialogues(family), prompt_again, share), is_sampled=is_sampled)
    rows = rows.with_(prompt_lengths=None)
    assert causes(rows, setting(family, is_known)) == ["duplicated_prompt"]
    assert share_of(rows, "duplicated_prompt", setting(family, is_known)) > 0.7


def test_a_user_who_says_the_same_twice_is_no_duplicate():
    from lockstep.types import Message

    renderer = RENDERERS["chatml"]
    say = Message(role="user", content="the house of the moon is as old as this man")
    made = []
    for row in dialogues("chatml", 12, max_turns=1):
        first = renderer.render([say])
        reply = row.ids[row.spans()[0][0] :]
        ids = [*first, *reply, *renderer.extend(reply, [say]), *reply]
        turn = [*[-1] * len(first), *[0] * len(reply)]
        turn += [*[-1] * (len(ids) - len(turn) - len(reply)), *[1] * len(reply)]
        lps = [-0.1 * (i % 7) if t >= 0 else float("nan") for i, t in enumerate(turn)]
        made.append(Made(row.name, ids, turn, lps, list(lps), [t >= 0 for t in turn], len(first)))
    assert "duplicated_prompt" not in causes(rows_of(made), setting_of("chatml"))


def drop_separators(row: Made) -> Made:
    """The line break behind each <|im_end|> that was sampled."""
    lost = {end for _, end in row.spans() if end < len(row.ids)}
    out = row.take([i for i in range(len(row.ids)) if i not in lost])
    return disturb(out, min(lost)) if lost else out


@KNOWN
@SAMPLED
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_lost_separators_are_found_with_their_gap(is_known, is_sampled, share):
    rows = rows_of(hit(dialogues("chatml"), drop_separators, share), is_sampled=is_sampled)
    assert causes(rows, setting("chatml", is_known)) == ["dropped_separator"]
    assert share_of(rows, "dropped_separator", setting("chatml", is_known)) > 0.95


# -- several at once -------------------------------------------------------------------------------


@FAMILY
@pytest.mark.parametrize(
    "changes, expected",
    [
        ((shift(1), train_behind_prompt), {"shifted", "observation_trained"}),
        ((fill_some(0.0), pad_inside), {"fillers", "padding"}),
        ((shift(1), prompt_again), {"shifted", "duplicated_prompt"}),
        ((fill_some(-1.0), too_early), {"fillers", "boundary"}),
    ],
)
def test_two_defects_in_different_rows_are_both_named(family, changes, expected):
    made = dialogues(family, 80, noise=0.01)
    made = [*hit(made[:40], changes[0], 0.7), *hit(made[40:], changes[1], 0.7)]
    rows = rows_of(made).with_(prompt_lengths=None)
    assert set(causes(rows, setting_of(family))) == expected
