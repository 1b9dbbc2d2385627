"""The studies go on where they stopped, and the verdicts on claims follow their figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.recipes.methods import METHODS

PROOFS = Path(__file__).parents[2] / "docs" / "proof"
sys.path.append(str(PROOFS))

claims = pytest.importorskip("claims", reason="scipy and matplotlib come with the extra dev")
studies = claims.studies

LOW, HIGH = [0.50, 0.52, 0.51, 0.49, 0.53], [0.90, 0.92, 0.91, 0.89, 0.93]
WILD = [0.1, 0.9, 0.5, 0.3, 0.8]


def judge(a, b, **rule):
    """(text, verdict) of a comparison of two measured figures."""
    measured = {"m": {"found": {"a": a, "b": b}}}
    sides = {"a": "measured/m/a", "b": b if isinstance(b, float) else "measured/m/b"}
    return claims.Comparison(of="reward", **sides, **rule).judge(measured)


def test_the_interval_is_students_two_sided_one():
    # 2.776 is the 97.5 % point of Student's t with four degrees of freedom; s = 0.0158 of LOW.
    low, high = claims.interval(LOW)
    assert low == pytest.approx(0.51 - 2.776 * 0.015811 / 5**0.5, abs=1e-5)
    assert high == pytest.approx(0.51 + 2.776 * 0.015811 / 5**0.5, abs=1e-5)


def test_an_effect_reproduces_is_the_opposite_or_absent_or_not_decided():
    assert judge(HIGH, LOW)[1] == "reproduces"
    assert judge(LOW, HIGH)[1] == "opposite"
    assert judge([0.53, 0.51, 0.50, 0.52, 0.49], LOW)[1] == "no difference beyond 0.1"
    assert judge(WILD, LOW)[1] == "not decided"
    # Above 0 and yet too small to matter.
    assert judge([0.55, 0.57, 0.56, 0.54, 0.58], LOW)[1] == "no difference beyond 0.1"


def test_one_sided_significance_is_not_enough():
    """Student's t of these differences is 2.35: beyond the one-sided limit of 2.13, within the
    two-sided one of 2.78."""
    a = [0.4 + each for each in (-0.5, -0.2, 0.0, 0.2, 0.5)]
    assert judge(a, [0.0] * 5)[1] == "not decided"


def test_likeness_needs_an_interval_within_the_limit():
    assert judge([0.53, 0.51, 0.50, 0.52, 0.49], LOW, is_alike=True)[1] == "reproduces"
    assert judge(LOW, HIGH, is_alike=True)[1] == "differs"
    assert judge(WILD, LOW, is_alike=True)[1] == "not decided"
    assert judge([0.0] * 5, 0.0, is_alike=True, within=0.0)[1] == "reproduces"
    assert judge([0.0, 0.0, 0.0, 0.0, 1.0], 0.0, is_alike=True, within=0.0)[1] == "not decided"


def test_a_ratio_is_judged_on_its_logarithm():
    text, verdict = judge([2.0, 2.2, 1.8, 2.1, 1.9], [1.0] * 5, ratio=True)
    assert verdict == "reproduces" and "ratio 1.8 .. 2.2" in text
    assert judge([1.0, 1.1, 0.9, 1.0, 1.0], [1.0] * 5, ratio=True)[1] == (
        "no difference beyond a factor of 1.25"
    )


def test_few_seeds_are_told_and_one_seed_decides_nothing():
    assert judge(HIGH[:3], LOW)[1] == "reproduces (too few seeds: 3)"
    assert judge(HIGH[:1], LOW) == ("reward: 0.9 and 0.5", "not decided (too few seeds: 1)")
    assert judge([1e-16], 0.0, is_alike=True, within=1e-12, exact=True)[1] == "reproduces"
    assert judge([], LOW) == ("reward: not run", "not decided")


def test_counts_of_runs_are_judged_by_fishers_test():
    assert claims.verdict_of_counts([1.0] * 5, [0.0] * 5) == "reproduces"  # p is 0.008
    assert claims.verdict_of_counts([0.0] * 5, [1.0] * 5) == "opposite"
    assert claims.verdict_of_counts([1.0] * 4 + [0.0], [0.0] * 5) == "reproduces"  # p is 0.048
    assert claims.verdict_of_counts([1.0] * 3, [0.0] * 3) == "not decided"  # p is 0.1


def test_runs_that_never_learn_collapse_too():
    assert studies.collapse_step([0.3] * 30) is None
    assert studies.collapse_step([0.3] + [-0.3] * 30) == 9
    assert studies.collapse_step([0.3] * 20 + [0.9] * 20 + [0.0] * 20) == 42
    assert studies.collapse_step([0.3] * 20 + [0.9] * 20 + [0.8] * 20) is None


def test_every_verdict_on_the_page_follows_from_the_stored_figures():
    stored = json.loads((PROOFS / "claims.json").read_text())
    assert set(stored["figures"]) == set(claims.measures())
    assert claims.judged(stored["figures"]) == stored["claims"]


def test_every_document_has_its_claims_and_every_comparison_its_figures():
    import claim_measures

    stored = json.loads((PROOFS / "claims.json").read_text())["figures"]
    every = claims.read_claims()
    assert all(callable(getattr(claim_measures, name)) for name in claims.measures())
    for claim in every:
        assert claim.compare or len(claim.why) > 20  # it says what is missing
        for each in claim.compare:
            assert not each.judge(stored)[0].endswith("not run"), each.of


def test_a_verdict_that_changes_fails_and_leaves_the_file(monkeypatch, tmp_path, capsys):
    found = tmp_path / "claims.json"
    found.write_text(json.dumps({"claims": [], "figures": {}}))
    (tmp_path / "claims.toml").write_text(
        '[slime."It is so"]\ntheirs = "1"\n'
        'compare = [{ of = "it", a = "measured/contract/unequal", b = 0.0 }]\n'
    )
    monkeypatch.setattr(claims, "CLAIMS", tmp_path / "claims.toml")
    monkeypatch.setattr(claims, "RESULTS", found)
    monkeypatch.setattr(sys, "argv", ["claims.py", "--quick"])
    for values, status in (([1.0] * 5, 0), ([0.0] * 5, 1)):
        monkeypatch.setattr(
            claims, "measure", lambda _, v=values: {"contract": {"found": {"unequal": v}}}
        )
        assert claims.main() == status
    assert "It is so: ['reproduces'] before, ['no difference beyond 0.1'] now" in (
        capsys.readouterr().out
    )
    assert json.loads(found.read_text())["claims"][0]["verdicts"] == ["reproduces"]


def test_the_study_of_methods_has_all_published_methods():
    assert set(METHODS) <= set(studies.STUDIES["methods"].arms)


@pytest.fixture
def small_study(monkeypatch, tmp_path):
    small = replace(
        studies.STUDIES["moe"],
        settings=("steps=2", "groups_per_step=1", "group_size=2", "evaluation=none"),
        conditions={"sound": ()},
        arms={"recomputed": studies.words_of("@baseline"), "rollout": ("correction=bypass",)},
    )
    monkeypatch.setitem(studies.STUDIES, "moe", small)
    monkeypatch.setattr(studies, "RESULTS", tmp_path / "studies.json")
    monkeypatch.setattr(studies, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(studies, "PLOTS", tmp_path)
    return small


def test_a_study_goes_on_from_its_results_and_runs_a_changed_arm_anew(
    small_study, monkeypatch, capsys
):
    def lines():
        return [line for line in capsys.readouterr().out.splitlines() if "seed" in line]

    studies.run_all("moe", list(small_study.conditions), ["recomputed"], [0], jobs=1)
    assert len(lines()) == 1
    studies.run_all("moe", list(small_study.conditions), list(small_study.arms), [0], jobs=1)
    assert [line.partition(",")[0] for line in lines()] == ["moe: sound"]  # the other arm alone
    found = studies.read_results()["studies"]["moe"]["conditions"]["sound"]
    assert [list(arm["seeds"]) for arm in found.values()] == [["0"], ["0"]]
    assert studies.draw("moe") == studies.PLOTS / "moe.png"

    changed = replace(small_study, arms=small_study.arms | {"rollout": ("correction=tis",)})
    monkeypatch.setitem(studies.STUDIES, "moe", changed)
    assert studies.stored(studies.read_results(), "moe", "sound", "rollout")["seeds"] == {}
    assert studies.stored(studies.read_results(), "moe", "sound", "recomputed")["seeds"]
