"""Rows that are split over ranks: the same loss, gradient and weights as whole ones. gloo."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lockstep.correction.layout import Layout
from lockstep.objectives.aggregation import aggregate
from lockstep.objectives.losses import gspo

RANKS, ROWS, WIDTH = 2, 3, 6


def batch():
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, WIDTH, generator=g)
    logprobs = old + 0.05 * torch.randn(ROWS, WIDTH, generator=g)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0]]).bool()
    return logprobs, old, torch.tensor([[1.0], [-2.0], [0.5]]).expand(ROWS, WIDTH), mask


def loss_of(logprobs, old, advantages, mask, group=None):
    leaf = logprobs.clone().requires_grad_()
    layout = Layout.padded(mask, group=group)
    out = gspo(leaf, old, advantages, layout, clip=(0.02, 0.02))
    value = aggregate(out.loss, layout, how="sequence_mean")
    value.backward()
    return value.detach(), leaf.grad, out.mean["clip_fraction"]


def on_rank(rank, store, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    half = slice(rank * WIDTH // RANKS, (rank + 1) * WIDTH // RANKS)
    found = loss_of(*(x[:, half] for x in batch()), group=dist.group.WORLD)
    queue.put((rank, [x.tolist() for x in found]))
    dist.destroy_process_group()


def test_gspo_of_split_rows_is_that_of_whole_rows(tmp_path):
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=on_rank, args=(r, tmp_path / "store", queue)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    parts = [part for _, part in sorted(queue.get(timeout=120) for _ in ranks)]
    for rank in ranks:
        rank.join()
    value, gradient, is_clipped = loss_of(*batch())
    assert abs(sum(part[0] for part in parts) - value) < 1e-6 * abs(value)
    joined = torch.cat([torch.tensor(part[1]) for part in parts], 1)
    torch.testing.assert_close(joined, gradient, rtol=1e-6, atol=0)
    assert torch.cat([torch.tensor(part[2]) for part in parts], 1).equal(is_clipped)
    assert is_clipped.any() and not is_clipped[batch()[3]].all()
