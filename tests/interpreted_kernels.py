"""The CUDA backend in Triton's interpreter, for machines without a GPU; skips elsewhere. Its matrix
products are in one order on every machine.

Triton's own are numpy's, and so the BLAS's: their order depends on the processor and on the tile's
shape, and bfloat16 is multiplied as integers. Here each output is one sum over k, one after the
other, in the dtype of the accumulator, as of a chain of one instruction.
"""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("pip install 'lockstep-rl[cuda]'", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the kernels are compiled here: tests/gpu", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined
    import triton.language as tl
    from triton.runtime import interpreter

    from lockstep.ops import cuda
    from lockstep.ops.invariant import InvariantOps


def numbers(handle):
    """The values of a handle; two-byte floats, which are kept as bits, in float32."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right, total = numbers(a), numbers(b), d.data.copy()
    product = np.empty_like(total)
    for k in np.flatnonzero(left.any(0)):  # adding zeros changes nothing
        np.multiply(left[:, k, None], right[None, k], out=product)
        total += product
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = create_dot
# A CPU's sigmoid depends on the place among the others; that of a GPU does not.
cuda.CudaOps.sigmoid = InvariantOps.sigmoid
