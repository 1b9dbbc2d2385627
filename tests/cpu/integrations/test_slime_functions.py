"""slime 0.3.1 and miles 0.1: functions with the signatures of their arguments, on batches made like
theirs. No part of either trainer is installed; `megatron` and the scoring are stand-ins."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from lockstep.correction import Correction, Layout
from lockstep.correction import correct as correct_rows
from lockstep.errors import AlignmentError, CapabilityError, ConfigError
from lockstep.integrations import common, slime

LENGTHS = [4, 2, 5]


@pytest.fixture(autouse=True)
def lockstep(monkeypatch):
    """Sets the variable, and forgets earlier warnings."""
    common.check_version.cache_clear()
    common.say_once.cache_clear()
    common.watch_of.cache_clear()
    return lambda words: monkeypatch.setenv("LOCKSTEP", words)


def columns(seed, scale=0.5):
    g = torch.Generator().manual_seed(seed)
    return [-scale * torch.rand(n, generator=g) - 0.1 for n in LENGTHS]


def masks():
    found = [torch.ones(n, dtype=torch.int32) for n in LENGTHS]
    found[0][1] = 0
    return found


def tis_arguments(**changed):
    """The keyword arguments of slime/backends/megatron_utils/loss.py, policy_loss_function."""
    given = {
        "args": SimpleNamespace(tis_clip=2.0, tis_clip_low=0.0),
        "pg_loss": torch.cat(columns(3)).requires_grad_(),
        "train_log_probs": columns(1, 2.0),
        "rollout_log_probs": columns(2, 2.0),
        "loss_masks": masks(),
        "total_lengths": [n + 3 for n in LENGTHS],
        "response_lengths": LENGTHS,
    }
    return given | changed


def test_the_tis_function_weighs_each_tokens_loss_and_masks_what_is_rejected(lockstep):
    lockstep("correction=icepop correction.limits=0.7,1.3")
    given = tis_arguments()
    loss, kept, figures = slime.correct(**given)
    layout = Layout.packed(LENGTHS, torch.cat(given["loss_masks"]))
    old, rollout = torch.cat(given["train_log_probs"]), torch.cat(given["rollout_log_probs"])
    expected = correct_rows(old, rollout, Correction.icepop(0.7, 1.3), layout=layout)
    assert 0 < int(expected.keep.sum()) < 10, "some are rejected"
    assert torch.equal(loss.detach(), given["pg_loss"].detach() * expected.weights)
    assert loss.requires_grad and [len(mask) for mask in kept] == LENGTHS
    assert torch.cat(kept).tolist() == expected.keep.int().tolist()
    assert kept[0].dtype == torch.int32
    assert {name: values.shape for name, values in figures.items()} == dict.fromkeys(
        ("tis", "mismatch_k1", "mismatch_k3", "kept"), loss.shape
    )


def test_a_token_that_is_not_finite_reaches_no_sum(lockstep):
    lockstep("correction=tis")
    given = tis_arguments()
    given["train_log_probs"][1][0] = given["pg_loss"].detach()[4] = float("nan")
    loss, kept, _ = slime.correct(**given)
    assert loss.isfinite().all() and kept[1].tolist() == [0, 1]


def test_miles_passes_more_arguments_which_are_not_read(lockstep):
    lockstep("correction=tis")
    given = tis_arguments(parallel_state=object(), max_seq_lens=None)
    assert torch.equal(slime.correct(**given)[0], slime.correct(**tis_arguments())[0])


def test_a_part_of_a_row_is_left_alone_and_said_once_unless_strict(lockstep, caplog):
    lockstep("correction=tis")
    given = tis_arguments(train_log_probs=[values[:1] for values in columns(1)])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loss, kept, figures = slime.correct(**given)
    assert loss is given["pg_loss"] and kept is given["loss_masks"] and figures == {}
    [said] = [r.getMessage() for r in caplog.records if "goes on" in r.getMessage()]
    assert "context parallelism" in said and "[1, 1, 1], loss_masks [4, 2, 5]" in said
    lockstep("correction=tis strict=true")
    with pytest.raises(AlignmentError, match="context parallelism"):
        slime.correct(**given)


def test_a_correction_of_the_whole_batch_is_refused(lockstep):
    lockstep("correction=mis")
    with pytest.raises(ConfigError, match=r"correction\.normalize=false"):
        slime.correct(**tis_arguments())
    for words in ("", "correction=bypass", "correction=tis correction.kl_penalty_coef=0.1"):
        lockstep(words)
        with pytest.raises(ConfigError, match="expected weights or rules for slime's own loss"):
            slime.correct(**tis_arguments())
    for words in ("correction=averaged", "objective.aggregate=sequence_mean"):
        lockstep(words)
        with pytest.raises(ConfigError, match=r"scores no reply again|settings of its own"):
            slime.correct(**tis_arguments())
    lockstep("correction=nonsense")
    with pytest.raises(ConfigError, match="nonsense"):
        slime.correct(**tis_arguments())
    lockstep("objective.kl_coef=0.1")
    with pytest.raises(ConfigError, match="settings of its own"):
        slime.correct(**tis_arguments())


def scoring(logprobs, entropy):
    def get_log_probs_and_entropy(
        logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False
    ):
        return None, {"log_probs": logprobs} | ({"entropy": entropy} if with_entropy else {})

    return SimpleNamespace(get_log_probs_and_entropy=get_log_probs_and_entropy)


def test_the_custom_loss_is_the_objectives_and_is_averaged_by_the_trainer(lockstep, monkeypatch):
    lockstep("correction=bypass objective=reinforce")
    logprobs = [values.requires_grad_() for values in columns(1)]
    monkeypatch.setitem(sys.modules, slime.SCORING["slime"], scoring(logprobs, columns(6)))
    batch = {
        "unconcat_tokens": [], "total_lengths": [], "response_lengths": LENGTHS,
        "advantages": columns(4), "loss_masks": masks(), "rollout_log_probs": columns(2),
        "log_probs": columns(5),
    }  # fmt: skip
    mean = lambda values: values.sum() / 10  # noqa: E731 - as of `sum_of_sample_mean`
    args = SimpleNamespace(entropy_coef=0.0)
    loss, figures = slime.loss(args, batch, torch.zeros(1), mean)
    flat, mask = torch.cat(logprobs), torch.cat(masks())
    expected = (-torch.cat(batch["advantages"]) * flat * mask).sum() / 10
    assert torch.allclose(loss, expected) and float(figures["pg_loss"]) == float(loss.detach())
    loss.backward()
    assert logprobs[0].grad[1] == 0, "a token of a tool"
    args.entropy_coef = 0.5
    with_entropy, _ = slime.loss(args, batch, torch.zeros(1), mean)
    assert torch.allclose(with_entropy, expected - 0.5 * torch.cat(columns(6)).sum() / 10)
    with pytest.raises(ConfigError, match="rollout_log_probs"):
        slime.loss(args, {**batch, "rollout_log_probs": None}, torch.zeros(1), mean)


def test_a_missing_hook_is_named_with_the_version_that_has_it(lockstep, monkeypatch):
    lockstep("")
    monkeypatch.setitem(sys.modules, slime.SCORING["slime"], SimpleNamespace())
    with pytest.raises(CapabilityError, match=r"get_log_probs_and_entropy; version 0\.3\.1"):
        slime.loss(SimpleNamespace(entropy_coef=0), {}, torch.zeros(1), torch.sum)


def test_the_watch_looks_at_the_rank_with_log_probs(lockstep, monkeypatch, tmp_path):
    lockstep(f"watch={tmp_path}")
    place = SimpleNamespace(
        is_pipeline_last_stage=lambda: True, get_tensor_model_parallel_rank=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(mpu=place))
    shard = {
        "partition": [0, 1, 2], "tokens": [torch.arange(5, 6 + n) for n in LENGTHS],
        "total_lengths": [n + 1 for n in LENGTHS], "response_lengths": LENGTHS,
        "loss_masks": masks(), "rollout_log_probs": columns(1), "log_probs": columns(1),
        "raw_reward": [0.0, 1.0, 0.0],
    }  # fmt: skip
    slime.watch(None, 3, shard)
    watching = common.watch_of(str(tmp_path), "")
    assert len(watching._latest) == 3 and watching.facts.trainer == "slime"
    place.is_pipeline_last_stage = lambda: False
    slime.watch(None, 4, None or shard)
    assert watching._latest.steps.tolist() == [3] * 3


def test_miles_hands_over_no_batch_and_the_watch_says_so(lockstep, caplog):
    lockstep("watch=somewhere")
    with caplog.at_level(logging.WARNING):
        slime.watch(SimpleNamespace())
    assert "miles 0.1 hands over no batch" in caplog.text and "goes on" in caplog.text
    lockstep("")
    with pytest.raises(ConfigError, match="watch=/data/doctor"):
        slime.watch(SimpleNamespace())


def test_the_variable_is_read_once_for_each_text_and_not_for_each_micro_batch(lockstep):
    lockstep("correction=tis")
    first = common.Settings.read()
    assert common.Settings.read() is first
    lockstep("correction=icepop")
    assert common.Settings.read().correction.bound == "mask"
    with pytest.raises(ConfigError, match="advantage"):  # slime computes its own
        common.Settings.read("advantage=rloo")


def test_another_version_is_said_once(monkeypatch, caplog, lockstep):
    monkeypatch.setattr(common, "version", lambda package: "0.4.0")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            common.check_version("slime", "0.3.1")
        common.check_version("slime", "0.4")
    assert caplog.text.count("slime 0.4.0 is installed; tested with 0.3.1") == 1
