"""The CUDA backend where there is no GPU: it says what is missing."""

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from lockstep.errors import MissingExtraError

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="pip install 'lockstep-rl[cuda]'"
)


def run(tmp_path, *arguments):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env
    )


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_what_to_choose(tmp_path):
    done = run(tmp_path, "-c", "from lockstep.ops.cuda import CudaOps; CudaOps()")
    assert "ConfigError: CudaOps needs a GPU, and torch sees none. On a CPU the" in done.stderr


def test_an_installation_without_triton_is_told_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lockstep.ops.cuda_kernels", raising=False)
    with pytest.raises(MissingExtraError, match=r"'triton'.*lockstep-rl\[cuda\]"):
        importlib.import_module("lockstep.ops.cuda_kernels")
