"""The losses of Tinker's API against plain loops in float64, and what they refuse."""

import math

import numpy as np
import pytest
import torch
from datums import make_datum, policy_datum

from lockstep.objectives.losses import TokenBatch
from lockstep.tinker.losses import LOSSES, Sums, loss_of
from lockstep.tinker.requests import TinkerError

ROWS = (5, 8)

# A central difference of step h is wrong by h^2 / 6 of the third derivative and by 2^-53 / h of the
# value: below 1e-12 and 2e-10 for values and derivatives of up to some ten, with h = 1e-6.
STEP, TOLERANCE = 1e-6, 2e-9


def make_batch(seed=0):
    """Two datums in float64, their ratios spread from .6 to 1.6, or far for CISPO's upper bound."""
    g = torch.Generator().manual_seed(seed)
    count = sum(ROWS)
    sampled = -3 * torch.rand(count, generator=g, dtype=torch.float64) - 2
    gap = torch.linspace(-0.5, 0.5, count, dtype=torch.float64)
    gap[3] = 1.7
    columns = {
        "logprobs": sampled,
        "advantages": torch.randn(count, generator=g, dtype=torch.float64),
        "weights": torch.rand(count, generator=g, dtype=torch.float64),
        "sequence_ratio_mask": (torch.rand(count, generator=g) < 0.6).double(),
    }
    columns["advantages"][2] = 0.0
    columns["weights"][2] = 0.0
    return sampled + gap[torch.randperm(count, generator=g)], columns


def run(name, logprobs, columns, **config):
    totals = Sums()
    tokens = TokenBatch(
        logprobs=logprobs,
        entropy=torch.ones_like(logprobs),
        columns=columns,
        row=torch.tensor([0] * ROWS[0] + [1] * ROWS[1]),
        num_rows=2,
    )
    return loss_of(name, config).summed(tokens, {}, totals), totals.to_metrics()


def loop(name, logprobs, at, columns, low=None, high=None, beta=0.05):
    """The published formula, token by token. at: where the gradient is taken: stopped values."""
    lo, hi = (0.0, 4.0) if name == "cispo" else (0.8, 1.2)
    total, count = 0.0, len(logprobs)
    for t in range(count):
        lp, stopped, q = logprobs[t].item(), at[t].item(), columns["logprobs"][t].item()
        a, w = columns["advantages"][t].item(), columns["weights"][t].item()
        bottom = lo if low is None else (low if isinstance(low, float) else low[t].item())
        top = hi if high is None else (high if isinstance(high, float) else high[t].item())
        ratio = math.exp(lp - q)
        if name == "gspo":
            first, last = (0, ROWS[0]) if t < ROWS[0] else (ROWS[0], count)
            inside = [i for i in range(first, last) if columns["sequence_ratio_mask"][i]]
            gaps = [at[i].item() - columns["logprobs"][i].item() for i in inside]
            ratio = math.exp(sum(gaps) / len(gaps)) * math.exp(lp - stopped)
        if name == "cross_entropy":
            total += -lp * w
        elif name == "importance_sampling":
            total += -ratio * a
        elif name == "cispo":
            total += -min(max(math.exp(stopped - q), bottom), top) * lp * a
        elif name == "dro":
            total += -(lp * a - beta / 2 * (lp - q) ** 2)
        else:
            total += -min(ratio * a, min(max(ratio, bottom), top) * a)
    return total


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("seed", range(4))
def test_a_loss_is_the_published_sum_and_its_gradient_is_that_of_the_formula(name, seed):
    logprobs, columns = make_batch(seed)
    live = logprobs.clone().requires_grad_()
    loss, metrics = run(name, live, columns)
    assert loss.item() == pytest.approx(loop(name, logprobs, logprobs, columns), rel=1e-12)
    assert metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-12)
    loss.backward()
    for t in range(len(logprobs)):
        ends = []
        for sign in (1, -1):
            moved = logprobs.clone()
            moved[t] += sign * STEP
            ends.append(loop(name, moved, logprobs, columns))
        assert live.grad[t].item() == pytest.approx(
            (ends[0] - ends[1]) / (2 * STEP), abs=TOLERANCE, rel=1e-7
        )


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_bounds_are_numbers_on_the_ratio_or_one_of_each_token(name):
    logprobs, columns = make_batch()
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
    loss, _ = run(name, logprobs, columns, **config)
    wanted = loop(name, logprobs, logprobs, columns, 0.9, 1.05)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    low = torch.linspace(0.5, 0.99, len(logprobs), dtype=torch.float64)
    columns["clip_low_threshold"] = low
    loss, _ = run(name, logprobs, columns, **config)
    wanted = loop(name, logprobs, logprobs, columns, low, 1.05)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)


def test_cispo_bounds_the_ratio_above_alone_unless_it_is_told_otherwise():
    logprobs, columns = make_batch()
    assert (logprobs - columns["logprobs"]).exp().max() > 4
    _, metrics = run("cispo", logprobs, columns)
    num_live = int((columns["advantages"] != 0).sum())
    assert metrics["clip_fraction:mean"] == pytest.approx(1 / num_live)
    assert metrics["tokens:sum"] == num_live


def test_dro_takes_beta():
    logprobs, columns = make_batch()
    loss, _ = run("dro", logprobs, columns, beta=0.7)
    wanted = loop("dro", logprobs, logprobs, columns, beta=0.7)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)


def test_metrics_have_one_colon_and_a_reduction_that_the_client_knows():
    logprobs, columns = make_batch()
    known = {"mean", "sum", "min", "max", "slack", "hash2", "unique"}
    for name in LOSSES:
        _, metrics = run(name, logprobs, columns)
        assert "loss:sum" in metrics
        assert all(m.count(":") == 1 and m.split(":")[1] in known for m in metrics), metrics


def test_ratios_and_kl_are_measured_where_tokens_have_a_gradient():
    logprobs, columns = make_batch()
    columns["logprobs"][2] = 0.0  # a prompt's placeholder: its advantage is 0
    _, metrics = run("importance_sampling", logprobs, columns)
    live = columns["advantages"] != 0
    gap = (logprobs - columns["logprobs"])[live].float().double()
    assert metrics["ratio:max"] == pytest.approx(gap.exp().max().item(), rel=1e-6)
    assert metrics["ratio:mean"] == pytest.approx(gap.exp().mean().item(), rel=1e-6)
    assert metrics["kl_sample_train_v1:mean"] == pytest.approx(-gap.mean().item(), rel=1e-6)
    assert metrics["kl_sample_train_v2:mean"] == pytest.approx(
        gap.square().mean().item() / 2, rel=1e-6
    )


def test_equal_log_probs_have_a_kl_of_exactly_zero():
    logprobs, columns = make_batch()
    columns["logprobs"] = logprobs.clone()
    _, metrics = run("ppo", logprobs, columns)
    assert metrics["kl_sample_train_v1:mean"] == metrics["kl_sample_train_v2:mean"] == 0.0
    assert metrics["ratio:mean"] == metrics["ratio:max"] == 1.0


REFUSED = {
    "an unknown setting": ("ppo", {"clip": 0.2}, "no setting 'clip'.*clip_low_threshold"),
    "a setting of another loss": ("dro", {"clip_low_threshold": 0.2}, "settings are: beta"),
    "a text": ("dro", {"beta": "high"}, "'high'; expected a number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_not_offered_is_refused_by_name(case):
    name, config, sentence = REFUSED[case]
    with pytest.raises(TinkerError, match=sentence) as raised:
        loss_of(name, config)
    assert raised.value.status == 422


BAD_DATUMS = {
    "no log-probs": (policy_datum(), "logprobs", None, "is missing, and the loss ppo reads it"),
    "targets of two dims": (
        policy_datum(), "target_tokens", np.zeros((9, 2), int), r"\[9, 2\], .* one target a token",
    ),
    "a mask": (policy_datum(), "mask", np.zeros(9, np.float32), "does not read it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_DATUMS)
def test_a_datum_that_does_not_fit_is_refused_with_its_number_and_field(case):
    datum, name, values, sentence = BAD_DATUMS[case]
    inputs = {k: v for k, v in {**datum.inputs, name: values}.items() if v is not None}
    wrong = make_datum() if not inputs else type(datum)(token_ids=datum.token_ids, inputs=inputs)
    with pytest.raises(TinkerError, match=sentence) as raised:
        loss_of("ppo", {}).check(3, wrong)
    assert raised.value.status == 422
    assert f"datum 3, loss_fn_inputs['{name}']" in str(raised.value)
