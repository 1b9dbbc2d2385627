"""Weights of a trainer on a GPU, in a process that shares the card: CUDA IPC."""

import multiprocessing

import pytest
import torch

from lockstep.engines import weight_link
from lockstep.engines.weight_link import WeightSender, receive

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding": torch.randn(3001, 700, generator=generator).bfloat16(),
        "norm": torch.randn(7, generator=generator),
    }


def take(invitation):
    found = dict(receive(rank=0, device=DEVICE, **invitation))
    return all(torch.equal(found[name].cpu(), x) for name, x in tensors().items())


def test_tensors_arrive_bit_for_bit_in_another_process_of_the_card(monkeypatch):
    monkeypatch.setattr(weight_link, "GPU_BUCKET", 1 << 20)  # several, and a tensor over their edge
    link = WeightSender(num_workers=1, host="localhost", is_same_host=True)
    assert link.invitation["way"] == "cuda_ipc"
    on_gpu = {name: x.to(DEVICE) for name, x in tensors().items()}
    with multiprocessing.get_context("spawn").Pool(1) as process:
        taken = process.apply_async(take, (link.invitation,))
        link.send(on_gpu.items(), has_failed=taken.ready)
        assert taken.get(60)
    link.close()
