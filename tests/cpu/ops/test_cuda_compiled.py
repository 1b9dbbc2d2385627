"""The CUDA backend where there is no GPU: its kernels compile, and it says what is missing."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.errors import MissingExtraError

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="pip install 'lockstep-rl[cuda]'"
)
HOPPER_SHARED = 227 << 10  # bytes that one program may have
AMPERE_SHARED = 99 << 10  # of the smaller chips: consumer cards


def run(tmp_path, *arguments):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env
    )


@needs_triton
def test_both_tiles_of_a_product_are_chains_of_one_instruction(tmp_path):
    """What `cuda_kernels.Tile` promises: an instruction of the same rows and depth."""
    done = run(tmp_path, Path(__file__).with_name("compile_cuda_kernels.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    instructions = {name: entry["instructions"] for name, entry in found.items()}
    assert instructions["gemm decode 80"] == instructions["gemm training 80"] == ["m16n8k16"]
    assert instructions["gemm decode 90"] == ["m64n32k16"]
    assert instructions["gemm training 90"] == ["m64n128k16"]
    assert instructions["gemm float32 80"] == instructions["attention float32 80"] == []
    for name, entry in found.items():
        limit = HOPPER_SHARED if name.endswith("90") else AMPERE_SHARED
        assert entry["shared"] <= limit, name


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_what_to_choose(tmp_path):
    done = run(tmp_path, "-c", "from lockstep.ops.cuda import CudaOps; CudaOps()")
    assert "ConfigError: CudaOps needs a GPU, and torch sees none. On a CPU the" in done.stderr


def test_an_installation_without_triton_is_told_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lockstep.ops.cuda_kernels", raising=False)
    with pytest.raises(MissingExtraError, match=r"needs the package 'triton'.*lockstep-rl\[cuda\]"):
        importlib.import_module("lockstep.ops.cuda_kernels")
