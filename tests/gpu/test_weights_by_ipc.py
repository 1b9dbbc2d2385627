"""Weights of a trainer on a GPU, in a process that shares the card: CUDA IPC."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch

from lockstep.engines import weight_link
from lockstep.engines.weight_link import WeightSender

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "embedding": torch.randn(3001, 700, generator=generator).bfloat16(),
        "norm": torch.randn(7, generator=generator),
    }


RECEIVER = """
import hashlib, json, sys, torch
from lockstep.engines.weight_link import WeightReceiver, _as_bytes
invitation, load = json.loads(sys.stdin.readline())
found = WeightReceiver(invitation, rank=0, device=torch.device("cuda", 0)).tensors(**load)
print(json.dumps({n: hashlib.sha256(_as_bytes(x.cpu()).numpy()).hexdigest() for n, x in found}))
"""


def test_tensors_arrive_bit_for_bit_in_another_process_of_the_card(monkeypatch):
    monkeypatch.setattr(weight_link, "GPU_BUCKET", 1 << 20)  # several, and a tensor over their edge
    link = WeightSender(num_workers=1, host="localhost", is_same_host=True)
    load = link.open_load()
    assert load["way"] == "cuda_ipc"
    on_gpu = {name: x.to(DEVICE) for name, x in tensors().items()}
    command = [sys.executable, "-c", RECEIVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as worker:
        worker.stdin.write(json.dumps([link.invitation, load]) + "\n")
        worker.stdin.flush()
        link.send(on_gpu.items(), has_failed=lambda: worker.poll() is not None)
        found = json.loads(worker.stdout.readline())
    link.close()
    wanted = {name: weight_link._as_bytes(x).numpy() for name, x in tensors().items()}
    assert found == {name: hashlib.sha256(x).hexdigest() for name, x in wanted.items()}
