"""Corrections where the log-probs are: the host copies nothing, and waits only for metrics."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from remote_tensors import DEVICE, RemoteDevice

from lockstep.correction import Correction, Layout, Rule, TokenFacts, correct, kl, measure
from lockstep.correction.averaging import average_logprobs
from lockstep.errors import AlignmentError

RULES = (
    Rule(stat="ratio", low=0.213, high=4.7),
    Rule(stat="k1", aggregation="mean", low=-0.613, high=0.613, label="k1"),
    Rule(stat="k2", aggregation="sum", high=31.3),
    Rule(stat="k3", aggregation="mean", high=0.413),
    Rule(stat="prob_diff", aggregation="max", high=0.713),
    Rule.veto_prob(3e-6),
    Rule.veto_ratio(0.00513),
    Rule.opsm(0.0613),
)
PENALTY = {"kl_penalty_coef": 0.1, "kl_penalty_form": "advantage", "kl_penalty_clip": 0.8}
CORRECTIONS = {
    "none": Correction(),
    "rules": Correction(anchor="recomputed", reject=RULES),
    "penalty": Correction(anchor="recomputed", **PENALTY),
    **{
        f"{level} {bound} {normalize}": Correction(
            anchor="recomputed",
            level=level,
            bound=bound,
            limits=(0.0 if bound == "truncate" else 0.313, 1.913),
            normalize=normalize,
            reject=RULES[:2],
        )
        for level in ("token", "sequence", "geometric")
        for bound in ("truncate", "clip", "mask")
        for normalize in (False, True)
    },
}
"""Every level, bound and kind of rule; normalised and not; with a penalty."""


def make_batch(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shape = (7, 40)
    mask = torch.arange(40) < torch.tensor([[40], [0], [1], [17], [33], [20], [8]])
    old = -4 * torch.rand(shape, generator=g)
    new = (old + torch.linspace(0, 0.7, 7)[:, None] * torch.randn(shape, generator=g)).clamp(max=0)
    new[0, 3], old[4, 4], new[5, 5], new[~mask] = torch.nan, torch.nan, -torch.inf, 7.5
    facts = TokenFacts(
        advantages=torch.randn(shape, generator=g),
        ages=torch.randint(0, 5, shape, generator=g),
        turns=torch.randint(0, 9, shape, generator=g),
        kinds=torch.randint(0, 2, shape, generator=g),
    )
    return new.to(dtype), old.to(dtype), mask, facts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_device_gives_the_hosts_values_without_a_copy_and_its_metrics_in_one(name, dtype):
    new, old, mask, facts = make_batch(dtype)
    expected = correct(new, old, CORRECTIONS[name], layout=mask, facts=facts)
    with RemoteDevice() as device:
        facts = TokenFacts(**{k: v if v is None else device.put(v) for k, v in vars(facts).items()})
        found = correct(
            device.put(new), device.put(old), CORRECTIONS[name],
            layout=device.put(mask), facts=facts,
        )  # fmt: skip
        for total in (found.denominator_tokens, found.denominator_rows):
            assert total.device == DEVICE
        assert not device.waits
        metrics = found.to_metrics()
        assert device.waits.total() == 1
    for part in ("weights", "keep", "penalty"):
        theirs, ours = getattr(expected, part), getattr(found, part)
        assert (theirs is None) == (ours is None)
        if ours is not None:
            torch.testing.assert_close(device.numbers(ours), theirs, rtol=1e-6, atol=1e-7)
    assert metrics == pytest.approx(expected.to_metrics(), rel=1e-9, abs=1e-12)


def test_packed_rows_pieces_and_the_gap_alone_wait_for_nothing_either():
    new, old, mask, _ = make_batch()
    layout = Layout.packed(mask.sum(1))
    expected = measure(new[mask], old[mask], layout=layout).to_metrics()
    with RemoteDevice() as device:
        report = measure(device.put(new[mask]), device.put(old[mask]), layout=layout)
        assert not device.waits
        assert report.merge(report).to_metrics()["mismatch/k3"] == pytest.approx(
            expected["mismatch/k3"]
        )
        d, _ = kl.log_ratio(device.put(new), device.put(old), device.put(mask))
        for values in (kl.k1(d), kl.k2(d), kl.k3(d), kl.pull(d, d, coef=1.0, clip=0.5)):
            assert values.device == DEVICE
        kl.penalty(device.put(new), device.put(old), mask=device.put(mask))
        average_logprobs(device.put(torch.stack([new, old])[:, 0]))
        assert device.waits.total() == 1


def test_a_device_counts_log_probs_above_0_and_its_metrics_raise():
    with RemoteDevice() as device:
        found = correct(
            device.put(torch.tensor([-1.0, 0.25])), device.put(torch.tensor([-1.0, -2.0])),
            Correction.tis(),
        )  # fmt: skip
        with pytest.raises(AlignmentError, match="1 log-probs are above 1e-06"):
            found.to_metrics()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_arrays_give_arrays(name):
    new, old, mask, facts = make_batch()
    expected = correct(new, old, CORRECTIONS[name], layout=mask, facts=facts)
    facts = TokenFacts(**{k: v if v is None else v.numpy() for k, v in vars(facts).items()})
    found = correct(new.numpy(), old.numpy(), CORRECTIONS[name], layout=mask.numpy(), facts=facts)
    for field in fields(expected):
        theirs, ours = getattr(expected, field.name), getattr(found, field.name)
        if isinstance(theirs, torch.Tensor):
            assert isinstance(ours, np.ndarray)
            np.testing.assert_array_equal(ours, theirs.numpy())
    assert found.to_metrics() == expected.to_metrics()


def test_arrays_may_be_masks_of_layouts_and_columns_of_the_gap():
    new, old, mask, _ = make_batch()
    expected = measure(new, old, layout=mask).to_metrics()
    found = measure(new.numpy(), old.numpy(), layout=Layout.padded(mask.numpy()))
    assert found.to_metrics() == expected
