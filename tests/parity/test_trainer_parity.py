"""The trainer's packed log-probs and policy gradient against transformers, row by row."""

import pytest
import torch
from trained_pairs import (
    check_log_probs,
    gradients_by_hf_name,
    make_pair,
    make_rows,
    ratio_and_advantages,
)

from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import make_loss


def their_logprobs(model, row):
    ids = torch.from_numpy(row.token_ids).long()[None]
    logp = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return logp.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(row.loss_mask[1:])]


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_packed_log_probs_and_the_ppo_gradient_equal_transformers(kind, tmp_path):
    model, trainer = make_pair(kind, tmp_path, max_tokens_per_microbatch=64)
    rows = make_rows([7, 40, 23, 31, 12])
    check_log_probs(trainer, rows, lambda row: their_logprobs(model, row))
    trainer.forward_backward(rows, make_loss(PPOClip()))
    losses = []
    for row in rows:
        ratio, advantages = ratio_and_advantages(row, their_logprobs(model, row))
        losses.append(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
    torch.cat(losses).mean().backward()
    theirs = dict(model.named_parameters())
    for name, ours in gradients_by_hf_name(trainer).items():
        wanted = theirs[name].grad
        assert float((ours - wanted).norm()) <= 2e-5 * float(wanted.norm()) + 1e-8, name
