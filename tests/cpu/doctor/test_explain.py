"""The criterion: what explains the gap on rows that it was not fitted on, beyond chance."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from array_dumps import ArrayDump, make_rows

import lockstep
from lockstep.doctor.causes import CAUSES
from lockstep.doctor.examine import Sample, names
from lockstep.doctor.explain import (
    HYPOTHESES,
    Hypothesis,
    Prediction,
    View,
    explain,
    hypothesis,
    judge,
    repaired,
)
from lockstep.doctor.findings import Setting
from lockstep.errors import ConfigError
from lockstep.testing.tokenizers import byte_tokenizer


def causes(rows, **facts):
    found = lockstep.diagnose(ArrayDump(rows, **facts))
    return [cause.name for cause, _ in found.causes], found


def sampled(rows, values):
    return rows.with_(rollout_logprobs=np.where(rows.loss_mask, values, np.nan).astype(np.float32))


def test_a_defect_of_some_rows_has_the_share_of_their_gap_and_hits_only_them():
    named, found = causes(make_rows(40, shifted=range(12)))
    assert named == ["shifted"]
    (finding,) = [f for f in found.examination.findings if f.cause == "shifted"]
    assert finding.figures["hit_rows"] == 12
    assert {e.row for e in finding.evidence} <= {f"row-{i}" for i in range(12)}


def test_one_row_among_many_is_enough():
    assert causes(make_rows(40, shifted=[7]))[0] == ["shifted"]


@pytest.mark.parametrize("by", [1, -1, 2])
def test_an_offset_is_told_with_its_sign(by):
    rows = make_rows(12)
    at = np.flatnonzero(rows.loss_mask)
    values = rows.rollout_logprobs.copy()
    values[at] = np.roll(values[at], by)
    named, found = causes(rows.with_(rollout_logprobs=values))
    assert named == ["shifted"]
    assert f"moved by {-by:+d}" in found.causes[0][1].measured.replace("moved by +-", "moved by -")


def test_a_shift_shows_behind_what_a_model_scored():
    rows = make_rows(12)
    values = rows.rollout_logprobs.astype(float)
    above = np.where(rows.loss_mask, np.random.default_rng(0).normal(0, 1, rows.num_tokens), np.nan)
    at = np.flatnonzero(rows.loss_mask)
    values[at] = np.roll((values + above)[at], 1)
    view = View(rows=sampled(rows, values), setting=Setting())
    read = Prediction.of_side("sampler", view.sampler - above, "read", above=above)
    one = Hypothesis(name="h", cause="wrong_template", claim="", predict=lambda _: [read])
    left = repaired(view, replace(judge(view, one, [read]), hit=np.ones(12, bool)))
    np.testing.assert_array_equal(left.sampler, view.sampler)
    back = np.roll(left.sampler[at], -1)
    assert np.abs(left.trainer[at] - back)[:-1].max() < 0.2


@pytest.mark.parametrize("factor", [1 / np.log(2), 1 / np.log(10)])
def test_another_base_of_the_logs_is_no_temperature(factor):
    rows = make_rows(20)
    assert causes(sampled(rows, rows.rollout_logprobs * factor))[0] == ["positive"]


def test_rows_with_each_others_log_probs_are_exchanged():
    rows = make_rows(20)
    values = rows.rollout_logprobs.reshape(20, -1)[np.roll(np.arange(20), 1)].reshape(-1)
    assert causes(sampled(rows, values))[0] == ["exchanged_rows"]


def test_the_rest_is_explained_again_and_shares_add_up():
    rows = make_rows(40, shifted=range(20))
    values = rows.rollout_logprobs.copy()
    values[rows.row_of >= 28] /= np.float32(np.log(2))
    named, found = causes(rows.with_(rollout_logprobs=values))
    assert set(named) == {"shifted", "positive"}
    total = sum(found.share_of(name) for name in named)
    assert 0.9 < total + found.examination.unexplained_k2 < 1.1


def test_a_temperature_is_found_without_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (20 * 120, 30))
    drawn = (logits / 0.6 + rng.gumbel(size=logits.shape)).argmax(1)
    rows = make_rows(20)

    def logprob(temperature):
        scaled = logits / temperature
        return scaled[np.arange(len(drawn)), drawn] - np.log(np.exp(scaled).sum(1))

    rows = sampled(rows, logprob(0.6))
    trainer = np.where(rows.loss_mask, logprob(1.0), np.nan).astype(np.float32)
    assert causes(rows.with_(trainer_logprobs=trainer))[0] == ["processed"]


@pytest.mark.parametrize("std", [1e-3, 0.02, 0.5])
def test_noise_is_explained_by_nothing(std):
    rows = make_rows(40)
    noise = np.random.default_rng(1).normal(0, std, rows.num_tokens)
    named, found = causes(sampled(rows, np.minimum(rows.trainer_logprobs + noise, 0)))
    assert named == []
    assert found.outcome == ("differs" if std == 0.5 else "consistent")


def test_one_token_beyond_noise_is_explained_by_no_cut():
    rows = make_rows(1)
    rows.rollout_logprobs[75] = rows.trainer_logprobs[75] + 0.06
    assert causes(rows)[0] == []


def test_log_probs_of_other_tokens_are_explained_by_nothing_that_is_nearer_to_the_mean():
    rows = make_rows(40)
    values = -np.random.default_rng(3).exponential(1.0, rows.num_tokens)
    named, found = causes(sampled(rows, values))
    assert named == [] and found.headline.startswith("unexplained: k2 ")


def test_ids_of_other_spellings_are_aligned_with_their_log_probs():
    rows = make_rows(60)
    values = rows.rollout_logprobs.reshape(60, -1).copy()
    for row in values:
        for begin, end in ((10, 50), (70, 110)):
            row[begin + 12 : end - 1] = row[begin + 13 : end]  # one token less from here on
    assert causes(sampled(rows, values.reshape(-1)))[0][0] == "reencoded"


@pytest.mark.parametrize(("merges", "cause"), [((), "rerendered"), ((("e", "e"),), "reencoded")])
def test_a_row_with_more_ids_than_were_drawn_has_another_text_if_no_id_covers_two(merges, cause):
    rows = make_rows(60)
    tokenizer = byte_tokenizer(merges=list(merges))
    ids = np.full_like(rows.token_ids, tokenizer.encode("e")[0])
    values = rows.rollout_logprobs.reshape(60, -1).copy()
    for row in values:
        for begin, end in ((10, 50), (70, 110)):
            row[begin + 12 : end - 1] = row[begin + 13 : end]  # an id more than was drawn
    written = sampled(rows.with_(token_ids=ids), values.reshape(-1))
    view = View(rows=written, setting=Setting(tokenizer=tokenizer))
    (found,) = HYPOTHESES["hypotheses/respelled"].predict(view)
    assert (found.cause or "reencoded") == cause


def test_rows_that_are_moved_by_one_are_told_from_rows_of_other_spellings():
    rows = make_rows(60)
    values = rows.rollout_logprobs.reshape(60, -1).copy()
    for number, row in enumerate(values):
        for begin, end in ((10, 50), (70, 110)):
            if number % 3:
                row[begin + 12 : end - 1] = row[begin + 13 : end].copy()
            else:
                row[begin:end] = np.roll(row[begin:end], 1)
    named, _ = causes(sampled(rows, values.reshape(-1)))
    assert set(named) == {"shifted", "reencoded"}


def test_noise_on_the_logits_is_no_temperature():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (20 * 120, 30))
    drawn = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    noisy = logits + rng.normal(0, 1, logits.shape)

    def logprob(values):
        return values[np.arange(len(drawn)), drawn] - np.log(np.exp(values).sum(1))

    rows = sampled(make_rows(20), logprob(logits))
    trainer = np.where(rows.loss_mask, logprob(noisy), np.nan).astype(np.float32)
    assert causes(rows.with_(trainer_logprobs=trainer))[0] == []


def test_of_two_that_explain_the_same_the_one_with_fewer_fitted_numbers_is_named():
    rows = make_rows(20, shifted=range(20))
    shift = HYPOTHESES["hypotheses/shifted"]
    other = replace(shift, name="hypotheses/other", cause="fillers", fitted=5)
    view = View(rows=rows, setting=Setting(), scale=0.05)
    found = explain(view, [other, shift], is_enough=lambda view: False)
    assert found.causes[0][0].cause == "shifted" and found.rivals["shifted"] == ["fillers"]


def test_a_choice_of_many_predictions_that_predict_nothing_explains_nothing():
    rows = make_rows(30, shifted=range(30))
    drawn = -np.random.default_rng(7).exponential(1.0, (50, rows.num_tokens))
    random = [Prediction(text=str(n), sampler=one) for n, one in enumerate(drawn)]
    one = Hypothesis(name="random", cause="fillers", claim="", predict=lambda view: random)
    found = judge(View(rows=rows, setting=Setting(), scale=0.05), one, random)
    assert found is not None and not found.is_beyond_chance


def test_a_hypothesis_that_fails_says_so_and_the_others_go_on():
    @hypothesis("broken", cause="fillers", claim="nothing")
    def broken(view):
        raise ValueError("a bug")

    try:
        named, found = causes(make_rows(20, shifted=range(6)))
    finally:
        del HYPOTHESES["hypotheses/broken"]
    assert named == ["shifted"]
    (finding,) = [f for f in found.examination.findings if f.check == "hypotheses/broken"]
    assert finding.verdict == "not_checkable" and "ValueError: a bug" in finding.measured


def test_of_causes_that_explain_the_same_the_first_is_told():
    view = View(rows=make_rows(20, shifted=range(6)), setting=Setting(), scale=0.05)
    told = [Prediction(text=name, sampler=view.sampler, cause=name) for name in list(CAUSES)[:12]]
    one = Hypothesis(name="many", cause="shifted", claim="", predict=lambda view: told)
    tried = explain(view, [one], is_enough=lambda view: False).tried["many"]
    assert tried.prediction.text == told[0].text


def test_the_sample_is_bounded_and_keeps_neighbours():
    sample = Sample(max_tokens=2000)
    for chunk in ArrayDump(make_rows(200), chunk=50).chunks():
        sample.add(chunk)
    rows = sample.rows()
    assert rows.num_tokens <= 2000
    numbers = [int(name.removeprefix("row-")) for name in rows.row_ids]
    assert sum(b - a == 1 for a, b in pairwise(numbers)) >= len(numbers) // 2


def test_every_cause_of_a_hypothesis_is_known_and_names_are_unique():
    assert all(one.cause in CAUSES for one in HYPOTHESES.values())
    assert len(names()) == len(set(names()))
    with pytest.raises(ConfigError, match="'nameless'"):
        hypothesis("nameless", cause="nameless", claim="")(lambda view: [])


def test_the_hypothesis_of_the_page_in_a_file_of_its_own_names_its_cause(tmp_path):
    import re
    from pathlib import Path

    page = Path(__file__).parents[3] / "docs" / "doctor-causes.md"
    section = page.read_text().split("## A hypothesis of your own")[1]
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", section, re.S)[1])
    rows = make_rows(20)
    values = np.where(rows.loss_mask, rows.rollout_logprobs - 0.5, np.nan).astype(np.float32)
    from lockstep.doctor.inputs.native import write_rows

    write_rows(tmp_path / "rows.parquet", [rows.with_(rollout_logprobs=values, messages=None)])
    command = [sys.executable, "-m", "lockstep.cli", "doctor", str(tmp_path / "rows.parquet")]
    done = subprocess.run(
        [*command, "--json", "--plugin", str(tmp_path / "mine.py")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (found, *_) = json.loads(done.stdout)["causes"]
    assert found["cause"] == "constant_offset" and found["share_k2"] > 0.9


def test_a_hypothesis_that_never_ends_is_cut_off_and_said(monkeypatch):
    def endless(view):
        while True:
            np.sort(np.random.default_rng(0).random(1 << 18))
            yield Prediction(text="the same again", sampler=view.sampler)

    one = Hypothesis(name="hypotheses/endless", cause="shifted", claim="ends", predict=endless)
    monkeypatch.setitem(HYPOTHESES, one.name, one)
    monkeypatch.setattr("lockstep.doctor.explain.SECONDS", 0.1)
    named, found = causes(make_rows(40, shifted=range(12)))
    (finding,) = [f for f in found.examination.findings if f.check == one.name]
    assert "not all was tried in time" in finding.measured and named == ["shifted"]
