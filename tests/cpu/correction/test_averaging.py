"""The behaviour policy from several scorings: the mean, its variance, the noise of two sides."""

import math

import pytest
import torch

from lockstep.correction.averaging import average_logprobs
from lockstep.errors import AlignmentError

NAN, INF = math.nan, math.inf


def logs(*rows):
    return torch.tensor(rows).log()


def test_the_mean_is_of_probabilities_and_not_of_their_logs():
    scorings = logs([0.1, 0.5], [0.3, 0.5], [0.8, 0.2])
    found = average_logprobs(scorings)
    assert average_logprobs([*scorings.numpy()]).logprobs.tolist() == found.logprobs.tolist()
    assert found.logprobs.exp().tolist() == pytest.approx([0.4, 0.4], rel=1e-6)
    assert found.logprobs.dtype == torch.float32 and found.sampling_bias is None
    assert bool((found.logprobs > scorings.mean(0)).all()), "Jensen"


def test_a_mean_of_improbable_tokens_does_not_underflow():
    scorings = torch.tensor([[-1000.0], [-1000.0 + math.log(3)]])
    assert average_logprobs(scorings).logprobs.item() == pytest.approx(
        -1000 + math.log(2), abs=1e-4
    )


def test_the_variance_is_between_scorings_and_unbiased():
    found = average_logprobs(torch.tensor([[-1.0, -2.0], [-2.0, -2.0], [-3.0, -2.0]]))
    assert found.variance.tolist() == [1.0, 0.0] and found.variance.dtype == torch.float64
    assert average_logprobs(torch.tensor([[-1.0]])).variance.isnan().all()


def test_a_list_of_scorings_is_a_stack_of_them():
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.5])]
    assert torch.equal(
        average_logprobs(rows).logprobs, average_logprobs(torch.stack(rows)).logprobs
    )


def test_the_sampling_pass_is_not_averaged_and_its_bias_is_told():
    scorings, sampled = logs([0.2], [0.4]), logs([0.6])[0]
    without = average_logprobs(scorings, rollout_logprobs=sampled)
    assert without.logprobs.exp().item() == pytest.approx(0.3, rel=1e-6)
    assert without.sampling_bias.item() == pytest.approx(math.log(0.6 / 0.3), rel=1e-6)


def test_what_was_drawn_is_overrated_by_the_pass_that_drew_it():
    """Noise on the logits, a draw from them, and fresh noise: the bias has the sign it is said to
    have, and the average is closer to the mean probability than one scoring is."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 8, generator=g)

    def noisy():
        return torch.log_softmax(logits + 0.5 * torch.randn(4000, 8, generator=g), -1)

    draw = noisy()
    tokens = torch.multinomial(draw.exp(), 1, generator=g)
    sampled = draw.gather(1, tokens)[:, 0]
    scorings = torch.stack([noisy().gather(1, tokens)[:, 0] for _ in range(16)])
    found = average_logprobs(scorings, rollout_logprobs=sampled)
    # of order var(noise) = 0.25; 4000 tokens leave a standard error of 0.01
    assert float(found.sampling_bias.mean()) > 0.05
    exact = torch.stack([noisy().gather(1, tokens)[:, 0] for _ in range(256)]).logsumexp(0)
    exact = exact - math.log(256)
    error = (found.logprobs - exact).square().mean()
    assert float(error) < float((scorings[0] - exact).square().mean()) / 8


def test_equal_scorings_are_their_own_average_and_do_not_vary():
    same = torch.tensor([[-1.0, -2.0]] * 3)
    found = average_logprobs(same)
    assert torch.equal(found.logprobs, same[0]) and not found.variance.any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_token_with_a_scoring_that_is_not_finite_has_no_estimate(bad):
    found = average_logprobs(
        torch.tensor([[-1.0, -1.0], [bad, -2.0]]), rollout_logprobs=torch.tensor([-1.0, -1.0])
    )
    for values in (found.logprobs, found.variance, found.sampling_bias):
        assert values.isnan().tolist() == [True, False]
    within = average_logprobs(
        torch.tensor([[-1.0, -1.0], [-2.0, -2.0]]), rollout_logprobs=torch.tensor([bad, -1.0])
    )
    assert within.sampling_bias.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"scorings": torch.zeros(3)}, r"\[3\].*\[scorings, tokens\]"),
        ({"scorings": torch.zeros(0, 3)}, r"\[0, 3\]"),
        ({"scorings": torch.zeros(2, 3), "rollout_logprobs": torch.zeros(2)},
         r"rollout_logprobs have the shape \[2\], each scoring \[3\]"),
    ],
)  # fmt: skip
def test_scorings_that_do_not_fit_are_refused(arguments, text):
    with pytest.raises(AlignmentError, match=text):
        average_logprobs(**arguments)
