"""Settings of the correction: presets, what follows from them, what is refused; without torch."""

import subprocess
import sys

import pytest

import lockstep.correction
from lockstep.config import resolve
from lockstep.correction import Correction, Rule
from lockstep.errors import ConfigError
from lockstep.recipes import find_recipe

RECIPE = find_recipe("quickstart")


def of_command_line(*overrides):
    return resolve(RECIPE, overrides).correction


# -- presets --------------------------------------------------------------------------------------

RATIO, VETO = Rule(stat="ratio", aggregation="level"), Rule.veto_ratio(1e-4)


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("bypass", {"anchor": "rollout"}),
        ("decoupled", {"anchor": "recomputed", "level": "token", "limits": (0, 5)}),
        ("tis", {"anchor": "recomputed", "level": "token", "limits": (0, 2)}),
        ("mis", {"anchor": "recomputed", "level": "token", "limits": (0, 2), "normalize": True,
                 "reject": (RATIO, VETO)}),
        ("icepop", {"anchor": "recomputed", "level": "token", "bound": "mask",
                    "limits": (0.5, 5)}),
        ("geometric_mask", {"anchor": "recomputed", "reject": (
            Rule(stat="ratio", aggregation="mean", low=0.99, high=1.01),)}),
        ("on_policy", {"anchor": "on_policy"}),
        ("averaged", {"anchor": "rollout", "rescorings": 8}),
    ],
)  # fmt: skip
def test_a_preset_is_what_the_literature_calls_by_its_name(preset, settings):
    expected = Correction(**settings)
    assert getattr(Correction, preset)() == Correction.PRESETS[preset]() == expected
    assert of_command_line(f"correction={preset}") == expected


def test_every_preset_is_in_the_table():
    made = {
        name for name, member in vars(Correction).items()
        if isinstance(member, classmethod) and not name.startswith("_")
    }  # fmt: skip
    assert made == set(Correction.PRESETS)


def test_the_default_is_the_bypass_where_both_sides_are_one_decoder_and_mis_elsewhere():
    assert RECIPE.correction is None
    assert Correction() == Correction.bypass() == RECIPE.chosen_correction
    assert resolve(RECIPE, ["engine.replicas=2"]).chosen_correction == Correction.bypass()
    for words in (["engine.dtype=bfloat16"], ["max_staleness=1"], ["engine=vllm"]):
        assert resolve(RECIPE, words).chosen_correction == Correction.mis()
        given = resolve(RECIPE, [*words, "correction=bypass"])
        assert given.chosen_correction == Correction.bypass()


@pytest.mark.parametrize(
    ("level", "aggregation"), [("token", "token"), ("sequence", "sum"), ("geometric", "mean")]
)
def test_masked_importance_sampling_rejects_by_what_it_weighs(level, aggregation):
    found = Correction.mis(0.25, 4.0, level=level, veto=1e-3)
    assert found.level == level and found.limits == (0, 4.0) and found.is_normalized
    ratio, veto = found.rules
    assert (ratio.aggregation, ratio.low, ratio.high) == (aggregation, 0.25, 4.0)
    assert (veto.stat, veto.low, veto.is_sequence) == ("ratio", 1e-3, True)


def test_a_preset_can_be_changed_setting_by_setting():
    found = of_command_line("correction=tis", "correction.limits=0,5", "correction.normalize=true")
    assert found == Correction(anchor="recomputed", level="token", limits=(0, 5), normalize=True)
    assert of_command_line("correction=averaged", "correction.rescorings=3").rescorings == 3


def test_rules_are_given_as_json():
    found = of_command_line(
        'correction.reject=[{"stat":"k3","high":0.1},'
        '{"stat":"ratio","aggregation":"mean","low":0.99,"high":1.01,"label":"drift"}]'
    )
    assert found.reject == (
        Rule(stat="k3", high=0.1),
        Rule(stat="ratio", aggregation="mean", low=0.99, high=1.01, label="drift"),
    )


# -- what follows ---------------------------------------------------------------------------------


def test_sequence_weights_are_normalised_unless_said_otherwise():
    for level in ("sequence", "geometric"):
        assert Correction.tis(level=level).is_normalized
        assert not Correction(anchor="recomputed", level=level, normalize=False).is_normalized
    assert not Correction.tis().is_normalized
    assert not Correction(anchor="recomputed", level="token", normalize=False).is_normalized


@pytest.mark.parametrize(
    ("correction", "one_update", "two_updates"),
    [
        (Correction.bypass(), False, False),
        (Correction.averaged(), False, False),
        (Correction(reject=(RATIO,)), False, True),
        (Correction(reject=(RATIO,), denominator="kept"), True, True),
        (Correction(denominator="kept"), True, True),
        (Correction(kl_penalty_coef=0.01, kl_penalty_form="advantage"), True, True),
        (Correction(kl_penalty_coef=0.01, kl_penalty_form="loss"), False, True),
        (Correction.on_policy(), False, None),
        (Correction(anchor="on_policy", level="token"), False, None),
        (Correction(anchor="on_policy", level="token", normalize=True), True, None),
        (Correction(anchor="on_policy", level="geometric"), True, None),
        (Correction(anchor="recomputed"), True, True),
        (Correction.tis(), True, True),
        (Correction.mis(), True, True),
    ],
)
def test_a_forward_of_its_own_is_made_only_where_something_needs_it(
    correction, one_update, two_updates
):
    assert correction.needs_forward(num_updates=1) == one_update
    if two_updates is not None:
        assert correction.needs_forward(num_updates=2) == two_updates


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (Rule(stat="k3", high=1), "token_k3"),
        (Rule(stat="k3", high=1, aggregation="max"), "sequence_max_k3"),
        (Rule(stat="ratio", low=0.5, aggregation="mean"), "sequence_mean_ratio"),
        (Rule(stat="ratio", low=0.5, label="mine"), "mine"),
        (Rule.veto_prob(), "veto_prob"), (Rule.veto_ratio(), "veto_ratio"), (Rule.opsm(), "opsm"),
    ],
)  # fmt: skip
def test_a_rule_is_named_for_what_it_does(rule, name):
    assert rule.name == name


def test_rules_with_names_are_listed_by_commas():
    found = of_command_line("correction.reject=veto_prob,veto_ratio").reject
    assert found == (Rule.veto_prob(), Rule.veto_ratio())


def test_one_update_per_batch_is_all_that_on_policy_allows():
    Correction.on_policy().check_updates(1)
    Correction.bypass().check_updates(4)
    text = r"anchor=on_policy with trainer\.updates_per_batch=2.*Use updates_per_batch=1, or anchor"
    with pytest.raises(ConfigError, match=text):
        Correction.on_policy().check_updates(2)
    with pytest.raises(ConfigError, match=text):
        of_command_line("correction=on_policy", "trainer.updates_per_batch=2")


def test_nothing_of_this_needs_torch():
    script = (
        "import sys; from lockstep.correction import Correction, Rule\n"
        "from lockstep.config import resolve; from lockstep.recipes import find_recipe\n"
        "resolve(find_recipe('quickstart'), ['correction=mis'])\n"
        "try: resolve(find_recipe('quickstart'), ['correction.limits=3,1'])\n"
        "except Exception as error: assert 'Swapped' in str(error)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_name_that_the_package_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'lockstep\.correction'.*'correkt'"):
        lockstep.correction.correkt  # noqa: B018
