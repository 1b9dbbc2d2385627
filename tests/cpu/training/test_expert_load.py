"""Load of experts over an update, and the auxiliary loss that evens it out."""

import numpy as np
import pytest
import torch
from tiny_training import make_rows, make_trainer, set_rollout

from lockstep.correction.config import Correction, Rule
from lockstep.errors import ConfigError
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


def aux_by_autograd(trainer, rows):
    chosen, probs = alone(trainer, rows)
    total = 0.0
    for layer in range(2):
        share = torch.bincount(chosen[:, layer].flatten(), minlength=4).double()
        total = total + 4 * (share / share.sum() * probs[layer].mean(0)).sum() / 2
    return total


def gradients(trainer):
    found = {n: p.grad.double() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return found or {n: g.double() for n, g in trainer.optimizer.gradients().items()}


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("max_tokens", [24, 60, 10_000])
def test_the_auxiliary_loss_adds_its_gradient_whatever_the_micro_batches(
    tmp_path, max_tokens, recompute
):
    rows, found = grouped_rows(), []
    for coef in (0.0, 0.5):
        trainer = make_trainer(
            tmp_path, "gpt_oss", max_tokens_per_microbatch=max_tokens, router_aux_coef=coef,
            recompute=recompute, dtype=torch.float64,
        )  # fmt: skip
        metrics = trainer.forward_backward(with_logprobs(trainer, rows), LOSS)
        found.append(gradients(trainer))
    other = make_trainer(tmp_path, "gpt_oss", dtype=torch.float64)
    aux = aux_by_autograd(other, rows)
    (0.5 * aux).backward()
    assert metrics["moe/aux_loss"] == pytest.approx(float(aux), rel=1e-6)
    for name, parameter in other.model.named_parameters():
        if parameter.grad is not None:
            added = found[1][name] - found[0][name]
            torch.testing.assert_close(added, parameter.grad.double(), rtol=1e-5, atol=1e-7)
    router = "layers.0.mlp.router.weight"
    assert (found[1][router] - found[0][router]).abs().max() > 1e-4


def test_rows_that_are_all_rejected_pull_at_the_routers_all_the_same(tmp_path):
    """In a micro-batch of their own as beside others; but they alone make no update."""
    correction, found = Correction(reject=(Rule(stat="k1", low=-5.0),)), []
    for max_tokens in (24, 10_000):
        trainer = make_trainer(
            tmp_path, "gpt_oss", max_tokens_per_microbatch=max_tokens, router_aux_coef=0.5,
            dtype=torch.float64,
        )  # fmt: skip
        rows = with_logprobs(trainer, grouped_rows())
        for row in rows[:4]:
            row.set("rollout_logprobs", row.columns["rollout_logprobs"] - 10)
        metrics = trainer.forward_backward(rows, LOSS, correction=correction)
        assert metrics["tokens/trained"] == sum(row.num_trained for row in rows[4:])
        found.append((metrics["moe/aux_loss"], gradients(trainer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-4, atol=1e-7)
    trainer.optimizer.zero_gradients()
    trainer.optim_step()
    trainer.forward_backward(rows[:4], LOSS, correction=correction)
    assert (
        trainer.optim_step()["train/skipped_updates"] == 1 and "all rejected" in trainer.last_skip
    )


@pytest.mark.parametrize(
    ("settings", "is_replaying", "num_forwards"),
    [
        ({"router_aux_coef": 0.0}, False, 1),
        ({"router_aux_coef": 0.1}, False, 2),  # one that counts
        ({"router_aux_coef": 0.1, "routing_replay": "recompute"}, False, 2),  # that one counts
        ({"router_aux_coef": 0.1, "routing_replay": "rollout"}, True, 1),  # known before
    ],
)
def test_a_forward_is_made_to_count_only_where_nothing_else_has(
    tmp_path, settings, is_replaying, num_forwards
):
    trainer = make_trainer(tmp_path, "gpt_oss", **settings)
    rows = grouped_rows()
    if is_replaying:
        for row in rows:
            routes = np.zeros((len(row), 2, 2), np.int16)
            routes[..., 1] = 3
            row.set("routed_experts", routes)
    rows = set_rollout(trainer, rows)
    calls = []
    trainer.model.register_forward_hook(lambda *_: calls.append(1))
    metrics = trainer.update(rows, PPOClip(), Correction.bypass())
    assert len(calls) == num_forwards
    assert ("moe/aux_loss" in metrics) == (settings["router_aux_coef"] > 0)
    if is_replaying:
        assert metrics["moe/load_max"] == 2.0 and metrics["moe/unused_experts"] == 0.5


def test_a_forward_before_the_update_counts_for_it(tmp_path):
    trainer = make_trainer(tmp_path, "gpt_oss", router_aux_coef=0.1)
    rows = set_rollout(trainer, grouped_rows())
    calls = []
    trainer.model.register_forward_hook(lambda *_: calls.append(1))
    trainer.update(rows, PPOClip(), Correction.decoupled())
    assert len(calls) == 2  # old log-probs, and the training forward


def test_a_dense_model_has_no_routers_to_balance(tmp_path):
    with pytest.raises(ConfigError, match=r"router_aux_coef=0\.1 needs .* routers.*qwen3"):
        make_trainer(tmp_path, "qwen3", router_aux_coef=0.1)
    with pytest.raises(ConfigError, match=r"router_aux_coef=-1 must be .* at least 0"):
        make_trainer(tmp_path, "gpt_oss", router_aux_coef=-1)


def test_a_dense_model_reports_no_load(tmp_path):
    trainer = make_trainer(tmp_path, "qwen3")
    metrics = trainer.forward_backward(with_logprobs(trainer, grouped_rows()), LOSS)
    assert not [name for name in metrics if name.startswith("moe/")]
