"""The self-test of the CUDA backend's kernels, in Triton's interpreter: the contract starts."""

import pytest
from full_counts import PROOF
from interpreted_kernels import cuda
from tiny_configs import tiny_config

from lockstep.models.decoder import Decoder
from lockstep.ops import selftest

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"  # numpy's, of 0 / 0 in rows of a tile that are not stored
)


@pytest.mark.parametrize("defect", ["", "tile", *["rotated"] * PROOF])
def test_the_self_test_proves_the_kernels_and_finds_a_defect(defect, monkeypatch):
    """A defect in what a sampler's steps alone compute. With one tile for all, the last is gone."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, value in (("GPU_ROW_LENGTHS", (66, 9)), ("ROW_COUNTS", (1, 65)), ("MANY_ROWS", 75)):
        monkeypatch.setattr(selftest, name, value)
    monkeypatch.setattr(cuda, "LIBRARY_ROWS", (512,))
    monkeypatch.setattr(cuda, "LIBRARY_OUTPUTS", 0)
    product, write, ops = cuda.kernels.gemm, cuda.kernels.rotate_and_write, cuda.CudaOps()

    def gemm(x, weight, bias, tiles, **settings):
        out = product(x, weight, bias, tiles, **settings)
        is_hit = defect == "tile" and len(set(tiles)) > 1 and len(x) <= 64
        return out * (1 + 2.0**-22) if is_hit else out

    def rotate(*inputs):
        return write(*inputs) * (1 + 2.0**-22) if defect == "rotated" else write(*inputs)

    monkeypatch.setattr(cuda.kernels, "gemm", gemm)
    monkeypatch.setattr(cuda.kernels, "rotate_and_write", rotate)
    shape = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    config = tiny_config("qwen3", vocab_size=40, windows=(None,), **shape)
    model = Decoder(config)
    model.init_weights(std=0.2, seed=0)
    proof = selftest.prove(model, ops=ops)
    assert proof.failure.startswith("rotary_attention" if defect == "rotated" else ""), proof
    assert proof.is_kept == (defect != "rotated"), proof.failure
    assert proof.num_checks > 20
    assert (len(set(ops.tiles)) == 1) == (defect == "tile")
    assert model.ops is not ops
