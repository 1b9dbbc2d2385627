"""The routers' load-balancing loss against transformers' own, with `output_router_logits`."""

import numpy as np
import pytest
import torch
from trained_pairs import NUM_LAYERS, SHAPE, gradients_by_hf_name, make_pair

from lockstep.objectives.losses import supervised_loss
from lockstep.types import Sample

AUX = {"router_aux_loss_coef": 0.5}
THEIRS = {"shape": AUX | {"output_router_logits": True}, "is_moved": False}


def make_rows():
    """Rows that train every token except the first; two begin alike."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, SHAPE["vocab_size"], n).astype(np.int32) for n in (7, 40, 23, 31)]
    ids[3][:12] = ids[2][:12]
    return [
        Sample(
            id=f"{i}/0",
            token_ids=row,
            loss_mask=np.arange(len(row)) > 0,
            columns={"weights": (np.arange(len(row)) > 0).astype(np.float32)},
        )
        for i, row in enumerate(ids)
    ]


def their_loss(model, rows):
    """(whole loss, load-balancing loss): padded rows, without each row's last token, which we do
    not feed since it predicts nothing."""
    longest = max(map(len, rows)) - 1
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        size = len(row) - 1
        ids[i, :size] = torch.from_numpy(row.token_ids[:-1])
        labels[i, :size] = torch.from_numpy(row.token_ids[1:])
        mask[i, :size] = 1
    out = model(ids, attention_mask=mask, labels=labels, shift_labels=labels, use_cache=False)
    return out.loss, out.aux_loss.detach()


KINDS = ["gpt_oss", "qwen3_moe", "qwen3_moe unnormalized", "qwen3_moe with a dense layer"]


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_of_the_loss_equal_transformers(kind, recompute, tmp_path):
    model, trainer = make_pair(kind, tmp_path, **THEIRS, **AUX, recompute=recompute)
    rows = make_rows()
    loss, aux = their_loss(model, rows)
    loss.backward()
    metrics = trainer.forward_backward(rows, supervised_loss)
    # float32 sums over 200 tokens, of numbers up to 4, in another order
    assert metrics["train/router_aux_loss"] == pytest.approx(float(aux), rel=1e-6)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: ours for name, ours in gradients_by_hf_name(trainer).items() if name in theirs}
    routers = [name for name in found if "router" in name or "mlp.gate.weight" in name]
    num_routed = NUM_LAYERS - (kind == "qwen3_moe with a dense layer")
    assert len(routers) == num_routed * (2 if kind == "gpt_oss" else 1)
    for name, ours in found.items():
        limit = 1e-6 if name in routers else 1e-5
        assert float((ours - theirs[name]).abs().max()) < limit, name


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_each_micro_batch_counts_by_its_trained_tokens(kind, tmp_path):
    model, trainer = make_pair(kind, tmp_path, **THEIRS, **AUX, max_tokens_per_microbatch=40)
    rows = make_rows()
    parts = [[rows[i] for i in batch.rows] for batch in trainer.pack(rows)]
    assert len(parts) > 1
    sizes = [sum(row.num_trained for row in part) for part in parts]
    with torch.no_grad():
        wanted = sum(
            float(their_loss(model, part)[1]) * size / sum(sizes)
            for part, size in zip(parts, sizes, strict=True)
        )
    metrics = trainer.forward_backward(rows, supervised_loss)
    assert metrics["train/router_aux_loss"] == pytest.approx(wanted, rel=1e-6)
    assert abs(wanted - float(their_loss(model, rows)[1])) > 1e-3, "a product of means, no sum"
