"""The studies go on where they stopped, and the verdicts on claims follow their figures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

PROOFS = Path(__file__).parents[2] / "docs" / "proof"
sys.path.append(str(PROOFS))

claims = pytest.importorskip("claims", reason="scipy and matplotlib come with the extra dev")
studies = claims.studies

LOW, HIGH = [0.50, 0.52, 0.51, 0.49, 0.53], [0.90, 0.92, 0.91, 0.89, 0.93]
WILD = [0.1, 0.9, 0.5, 0.3, 0.8]


def test_an_effect_is_seen_in_part_refuted_or_not_tested():
    assert claims.is_higher(HIGH, LOW, by=0.4) == "reproduces"
    assert claims.is_higher(HIGH, LOW, by=0.9) == "in part"  # less than half of what is claimed
    assert claims.is_higher(LOW, LOW, by=0.4) == "does not"
    assert claims.is_higher(LOW, HIGH, by=0.4) == "does not"
    assert claims.is_higher(WILD, LOW, by=0.4) == "not tested"
    assert claims.is_higher(HIGH, LOW[:1], by=0.4) == "not tested"  # one seed has no spread


def test_likeness_needs_power_as_well():
    assert claims.are_alike(LOW, LOW, within=0.1) == "reproduces"
    assert claims.are_alike(LOW, HIGH, within=0.1) == "does not"
    assert claims.are_alike(WILD, LOW, within=0.1) == "not tested"


def test_most_runs_do_it_or_do_not():
    assert claims.mostly(5, 5) == "reproduces"
    assert claims.mostly(0, 5) == "does not"
    assert claims.mostly(4, 4) == "not tested"  # four of four are chance in one of sixteen
    assert claims.mostly(0, 0) == "not tested"


def test_several_claims_are_as_good_as_the_worst_of_them():
    assert claims.worst("reproduces", "reproduces") == "reproduces"
    assert claims.worst("reproduces", "does not") == "in part"
    assert claims.worst("reproduces", "not tested") == "not tested"


def test_runs_that_never_learn_collapse_too():
    assert studies.collapse_step([0.3] * 30) is None
    assert studies.collapse_step([0.3] + [-0.3] * 30) == 9
    assert studies.collapse_step([0.3] * 20 + [0.9] * 20 + [0.0] * 20) == 42
    assert studies.collapse_step([0.3] * 20 + [0.9] * 20 + [0.8] * 20) is None


def test_every_verdict_on_the_page_follows_from_the_stored_figures():
    stored = json.loads((PROOFS / "claims.json").read_text())
    assert claims.judged(stored["figures"]) == stored["claims"]


def test_every_document_has_its_claims_and_every_claim_its_command():
    assert set(claims.CLAIMS) == set(claims.DOCUMENTS)
    every = [claim for _, claim in claims.every_claim()]
    assert len({claim.text for claim in every}) == len(every)
    import claim_measures

    for claim in every:
        assert set(claim.study.split()) <= set(studies.STUDIES)
        assert not claim.measure or callable(getattr(claim_measures, claim.measure))
        if not claim.command:
            ours, verdict = claim.judge({})
            assert verdict == "not tested" and len(ours) > 20  # it says what is missing


def test_a_verdict_that_changes_fails_and_leaves_the_file(monkeypatch, tmp_path, capsys):
    def judge(_):
        return "1", verdict

    verdict = "reproduces"
    one = claims.Claim(text="It is so", theirs="1", judge=judge)
    monkeypatch.setattr(claims, "CLAIMS", {"slime": (one,)})
    monkeypatch.setattr(claims, "RESULTS", tmp_path / "claims.json")
    monkeypatch.setattr(sys, "argv", ["claims.py", "--quick"])
    assert claims.main() == 0
    verdict = "does not"
    assert claims.main() == 1
    assert "It is so: reproduces before, does not now" in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "claims.json").read_text())["claims"][0]["verdict"] == "reproduces"
    )


@pytest.fixture
def small_study(monkeypatch, tmp_path):
    small = replace(
        studies.STUDIES["moe"],
        settings=("steps=2", "groups_per_step=1", "group_size=2", "evaluation=none"),
        conditions={"sound": ()},
        arms={"recomputed": studies.BASELINE, "rollout": ("correction=bypass",)},
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
