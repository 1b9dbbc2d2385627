"""Load of experts over an update."""

import numpy as np
import pytest
import torch
from tiny_training import make_rows, make_trainer, set_rollout

from lockstep.models.moe import Routing
from lockstep.objectives.config import PPOClip
from lockstep.objectives.losses import make_loss
from lockstep.training.expert_load import load_metrics

LOSS = make_loss(PPOClip())


def grouped_rows(num_groups=3, group_size=3):
    """Rows of groups that begin with the same prompt."""
    rows = make_rows([23] * num_groups * group_size, seed=3)
    for i, row in enumerate(rows):
        row.token_ids[:5] = rows[i // group_size * group_size].token_ids[:5]
    return rows


def with_logprobs(trainer, rows):
    trainer.forward(set_rollout(trainer, rows))
    return rows


def alone(trainer, rows):
    """Every row by itself: [rows' tokens, L, A] experts and per layer [tokens, E] probabilities."""
    chosen, probs, hooks = [], [[], []], []
    for layer, block in enumerate(trainer.model.layers):
        original = block.mlp.router_logits

        def keep(x, ops, original=original, layer=layer):
            logits = original(x, ops)
            probs[layer].append(logits.softmax(-1))
            return logits

        block.mlp.router_logits = keep
        hooks.append((block.mlp, original))
    for row in rows:
        (batch,) = trainer.pack([row])
        routing = Routing()
        trainer.model(batch.ids, batch.positions, batch.context, routing)
        chosen.append(routing.stacked())
    for mlp, _ in hooks:
        del mlp.router_logits
    return torch.cat(chosen), [torch.cat(p) for p in probs]


def test_metrics_of_loads_made_by_hand():
    counts = np.array([[4.0, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]])
    found = load_metrics(counts)
    assert found["moe/load_max"] == 4.0 and found["moe/unused_experts"] == 5 / 12
    by_layer = [found[f"moe/load_cv/{i}"] for i in range(3)]
    np.testing.assert_allclose(by_layer, [0.0, np.sqrt(3), 1.0])
    assert found["moe/load_cv"] == pytest.approx(np.mean(by_layer))


@pytest.mark.parametrize("max_tokens", [24, 60, 10_000])
def test_the_load_is_that_of_every_row_by_itself_whatever_the_micro_batches(tmp_path, max_tokens):
    trainer = make_trainer(tmp_path, "gpt_oss", max_tokens_per_microbatch=max_tokens)
    rows = with_logprobs(trainer, grouped_rows())
    metrics = trainer.forward_backward(rows, LOSS)
    chosen, _ = alone(trainer, rows)
    counts = np.stack([np.bincount(chosen[:, i].flatten(), minlength=4) for i in range(2)])
    wanted = load_metrics(counts.astype(np.float64))
    assert {k: v for k, v in metrics.items() if k.startswith("moe/")} == wanted
    assert len(wanted) == 5


def test_a_dense_model_reports_no_load(tmp_path):
    trainer = make_trainer(tmp_path, "qwen3")
    metrics = trainer.forward_backward(with_logprobs(trainer, grouped_rows()), LOSS)
    assert not [name for name in metrics if name.startswith("moe/")]
