"""Compiles instances of Triton kernels for a chip that need not be there; reads what they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
ALIGNED = [["tt.divisibility", 16]]
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def resources(
    kernel: JITFunction, bound: dict[str, Any], options: dict[str, Any], capability: int
) -> dict[str, Any]:
    """registers of a thread, spilled bytes of a thread, shared bytes of a program, and the shapes
    of the tensor cores' instructions. bound: arguments by name. capability: 90 is Hopper."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, (parameter, (name, value)) in enumerate(
        zip(kernel.params, bound.items(), strict=True)
    ):
        if parameter.is_constexpr or value is None:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = ALIGNED
        elif hasattr(value, "block_shape"):
            block = ", ".join(str(size) for size in value.block_shape)
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{block}]>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[(index,)] = "constexpr", value
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    done = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    shapes = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\S*?\.(m\d+n\d+k\d+)", done.asm["ptx"])
    if "tcgen05.mma" in done.asm["ptx"]:
        shapes.append("tcgen05")
    return {
        "registers": int(found[1]),
        "spilled": int(found[2]),
        "shared": done.metadata.shared,
        "instructions": sorted(set(shapes)),
    }
