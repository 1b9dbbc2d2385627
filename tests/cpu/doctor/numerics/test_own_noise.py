"""What is computed from the ids alone is the same after the very same ids; noise is not."""

import numpy as np
import pytest

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.numerics.compare import own_noise, variance_within

NUM_PROMPTS, COPIES, LENGTH = 6, 8, 20


def repeated(*, copies=COPIES):
    """Rows of NUM_PROMPTS prompts of one id, then ids that all rows share, `copies` times each."""
    row = np.arange(LENGTH)
    ids = [np.concatenate([[100 + prompt], row[1:]]) for prompt in range(NUM_PROMPTS)]
    num = NUM_PROMPTS * copies
    return Rows(
        row_ids=tuple(map(str, range(num))),
        offsets=np.arange(num + 1) * LENGTH,
        token_ids=np.concatenate([ids[i // copies] for i in range(num)]).astype(np.int32),
        loss_mask=np.tile(row > 0, num),
    )


def of_prompts(*, copies=COPIES, seed=0):
    """[N] one number of each prompt's tokens, the same in all copies."""
    values = np.random.default_rng(seed).normal(0, 1, (NUM_PROMPTS, 1, LENGTH))
    return np.broadcast_to(values, (NUM_PROMPTS, copies, LENGTH)).ravel().copy()


def of_noise(*, copies=COPIES, seed=1):
    return np.random.default_rng(seed).normal(0, 1, NUM_PROMPTS * copies * LENGTH)


@pytest.mark.parametrize(
    ("steady", "noise", "expected"),
    [(1.0, 0.0, 0.0), (0.0, 1.0, 1.0), (1.0, 1.0, 0.5), (1.0, 0.1, 0.01)],
)
def test_it_is_the_share_of_the_variance_that_differs_after_the_same_ids(steady, noise, expected):
    rows = repeated()
    d = steady * of_prompts() + noise * of_noise()
    found = own_noise(rows, d, np.ones(rows.num_tokens))
    assert found == pytest.approx(expected, abs=0.1 if 0 < expected < 0.5 else 0.12)
    if not noise:
        assert found == pytest.approx(0.0, abs=1e-12)


def test_it_is_in_units_of_the_spread():
    rows = repeated()
    spread = np.tile(np.linspace(0.01, 4.0, LENGTH), NUM_PROMPTS * COPIES)
    steady = of_prompts() * np.sqrt(spread)
    assert own_noise(rows, steady, spread) == pytest.approx(0.0, abs=1e-12)
    assert own_noise(rows, of_noise() * np.sqrt(spread), spread) == pytest.approx(1.0, abs=0.12)


def test_with_too_few_tokens_after_the_same_ids_nothing_is_known():
    alone = repeated(copies=1)
    assert np.isnan(own_noise(alone, of_noise(copies=1), np.ones(alone.num_tokens)))
    rows, none = repeated(), np.zeros(NUM_PROMPTS * COPIES * LENGTH)
    assert np.isnan(own_noise(rows, of_noise(), none))  # no spread
    assert np.isnan(own_noise(rows, none, none + 1.0))  # no deviation
    assert np.isnan(own_noise(rows, none + np.nan, none + 1.0))
    few = np.where(np.arange(rows.num_tokens) < 2 * LENGTH, of_noise(), np.nan)
    assert np.isnan(own_noise(rows, few, none + 1.0))


def test_noise_after_the_same_ids_is_noise_whatever_repeats_elsewhere():
    rows, spread = repeated(), np.ones(NUM_PROMPTS * COPIES * LENGTH)
    by_place = np.tile(np.random.default_rng(2).normal(0, 1, LENGTH), NUM_PROMPTS * COPIES)
    d = by_place + 0.9 * of_noise()
    assert 0.35 < own_noise(rows, d, spread) < 0.6
    assert variance_within(rows, d, spread, is_shared=False) == 1.0
    assert variance_within(rows, by_place, spread, is_shared=False) == pytest.approx(0.0, abs=1e-9)
    # Of another prompt: not the same after other ids, and no noise.
    assert variance_within(rows, of_prompts(), spread, is_shared=False) > 0.6
