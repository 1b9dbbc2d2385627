"""Compiles the CUDA backend's kernels for GPUs that need not be there, and prints what came out.

A script: kernels are compiled or interpreted, for the whole of a process. One JSON line on stdout:
instance -> {"shared": bytes of shared memory, "instructions": the tensor cores' ones, sorted}.
"""

import json
import re

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from lockstep.ops import cuda_kernels as kernels

ALIGNED = [["tt.divisibility", kernels.POINTER_ALIGNMENT]]
SIZES = {"M", "N", "size", "first", "Q", "position_step", "P", "page_size", "window"}


def compiled(kernel, capability, dtype, constants, **options):
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
        elif name in ("tokens", "positions", "pages", "places"):
            signature[name], attributes[(index,)] = "*i64", ALIGNED
        elif name in SIZES or name.endswith("step"):
            signature[name] = "i32"
        elif name in ("eps", "scale", "alpha", "limit", "temperature"):
            signature[name] = "fp32"
        else:
            wide = name in ("lse", "cos", "sin")
            signature[name], attributes[(index,)] = "*fp32" if wide else f"*{dtype}", ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    done = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S*?\.(m\d+n\d+k\d+)", done.asm["ptx"])
    return {"shared": done.metadata.shared, "instructions": sorted(set(found))}


def gemm(tile, capability, dtype):
    shape = {"K": 200, "ROWS": tile.rows, "OUTPUTS": tile.outputs, "DEPTH": tile.depth}
    if capability == 80:
        shape["places"] = None  # dense; the other ones are grouped by expert
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compiled(kernels._gemm_kernel, capability, dtype, shape, **options)


def attention(tile, capability, dtype, *, width=128):
    shape = {"G": 2, "R": 5, "D": width, "WIDTH": width, "ROWS": tile.rows, "KEYS": tile.keys}
    options = {"num_warps": 4, "num_stages": 2}
    return compiled(kernels._attention_kernel, capability, dtype, shape, **options)


def main():
    found = {}
    for capability in (80, 90):
        for name, tile in (("decode", kernels.DECODE_TILE), ("training", kernels.TRAINING_TILE)):
            found[f"gemm {name} {capability}"] = gemm(tile, capability, "bf16")
        two_byte = attention(kernels.TWO_BYTE_ATTENTION, capability, "bf16")
        found[f"attention two-byte {capability}"] = two_byte
    found["gemm float32 80"] = gemm(kernels.FLOAT32_TILE, 80, "fp32")
    found["attention float32 80"] = attention(kernels.FLOAT32_ATTENTION, 80, "fp32", width=16)
    others = {
        kernels._rms_norm_kernel: {"NUM_WEIGHTS": 6, "D": 100, "ROWS": 32, "WIDTH": 128},
        kernels._log_softmax_kernel: {"kept": None, "V": 5001, "BLOCK": kernels.VOCABULARY_BLOCK},
        kernels._swiglu_kernel: {"IS_CLAMPED": True, "F": 300, "BLOCK": kernels.ELEMENTS},
        kernels._rope_kernel: {"H": 6, "D": 64, "BLOCK": kernels.ELEMENTS},
        kernels._combine_kernel: {"A": 4, "D": 100, "BLOCK": kernels.ELEMENTS},
    }
    for kernel, shape in others.items():
        found[kernel.__name__] = compiled(kernel, 90, "bf16", shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
