"""Log-probs over a large vocabulary, forward and backward: time and memory beside other functions.

T hidden states of width 1024 and a head of V ids, float32, one thread; a gradient by the log-probs
alone. Ours gives the entropy too. Peers: log_softmax and gather of all logits ("naive"); TRL's
selective_log_softmax, whose code for a CPU is read out of its file; verl's FusedLinearForPPO. A
peer that is not installed is left out, with the reason.

Seconds are processor time, MiB the peak above the memory before, gradients included: see
sink_attention.py. The weight's gradient alone takes 4 x 1024 x V bytes.

    python benchmarks/log_prob_head.py [--json] [--tokens T] [--vocab V] [--rounds N] [--trl DIR]
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from measuring import used_by
from sink_attention import best, measure

from lockstep.ops.base import Ops

NAME = "log_prob_head"
Tensor = torch.Tensor
WIDTH = 1024
SIDES = ("ours", "naive", "trl", "verl")


def naive(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.t(), -1).gather(1, ids[:, None])[:, 0]


def load_trl(directory: str) -> Callable[..., Tensor]:
    """`selective_log_softmax` of trl/trainer/utils.py, unchanged, without that file's imports: on a
    CPU without Triton it needs none. LookupError gives the reason if it cannot be read."""
    spec = None if directory else importlib.util.find_spec("trl")
    root = Path(directory) / "trl" if directory else Path(str(spec.origin)).parent if spec else None
    path = root / "trainer" / "utils.py" if root else None
    if path is None or not path.exists():
        raise LookupError("trl is not installed; --trl DIR names a directory with its package")
    tree = ast.parse(path.read_text())
    wanted = [n for n in tree.body if getattr(n, "name", "") == "selective_log_softmax"]
    if not wanted:
        raise LookupError(f"{path} has no selective_log_softmax")
    names: dict[str, Any] = {"torch": torch, "F": F, "is_triton_available": lambda: False}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), names)
    function = names["selective_log_softmax"]
    return lambda hidden, weight, ids: function(hidden @ weight.t(), ids)


def load_verl() -> Callable[..., Tensor]:
    """LookupError gives the reason. The file is loaded alone: the package brings Ray with it."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("verl is not installed (pip install --no-deps verl)")
    path = Path(spec.submodule_search_locations[0])
    path = path / "utils" / "experimental" / "torch_functional.py"
    found = importlib.util.spec_from_file_location("verl_torch_functional", path)
    if found is None or found.loader is None or not path.exists():
        raise LookupError(f"{path} does not exist")
    module: ModuleType = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    fused = module.FusedLinearForPPO()

    def run(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return fused(hidden[None], weight, ids[None])[0][0]

    return run


def function_of(side: str, trl: str) -> Callable[..., Tensor]:
    if side == "trl":
        return load_trl(trl)
    if side == "verl":
        return load_verl()
    if side == "naive":
        return naive

    def run(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return Ops().log_probs(hidden, weight, ids)[0]

    return run


def measure_here(side: str, num_tokens: int, vocab_size: int, trl: str) -> dict[str, float]:
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    upstream = torch.randn(num_tokens, generator=g)
    function = function_of(side, trl)
    found, checks = (0.0, 0.0), {}
    for tokens, vocab in ((64, 512), (num_tokens, vocab_size)):
        hidden = torch.randn(tokens, WIDTH, generator=g).requires_grad_()
        weight = (torch.randn(vocab, WIDTH, generator=g) * WIDTH**-0.5).requires_grad_()
        ids = torch.randint(vocab, (tokens,), generator=g)
        out: list[Tensor] = []

        def run(
            inputs: tuple[Tensor, ...] = (hidden, weight, ids), out: list[Tensor] = out
        ) -> None:
            out.append(function(*inputs))
            out[0].backward(upstream[: len(out[0])])

        found = used_by(run)
        assert hidden.grad is not None and weight.grad is not None, "both were asked for"
        checks = {
            "logprobs": float(out[0].detach().double().sum()),
            "grad_hidden": float(hidden.grad.norm()),
            "grad_weight": float(weight.grad.norm()),
        }
    return {"seconds": found[0], "mib": found[1]} | checks


def why_not(side: str, trl: str) -> str:
    try:
        function_of(side, trl)
    except (LookupError, ImportError) as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side; the best counts")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--trl", default="", metavar="DIR", help="an unpacked wheel of TRL")
    parser.add_argument("--here", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    T, V = options.tokens, options.vocab
    if options.here:
        print(json.dumps(measure_here(options.here, T, V, options.trl)))
        return
    found: dict[str, dict[str, float]] = {}
    for side in options.only:
        if reason := why_not(side, options.trl):
            print(f"{side}: left out, {reason}", flush=True)
            continue
        shape = ["--tokens", str(T), "--vocab", str(V), "--trl", options.trl]
        found[side] = best([measure(__file__, side, *shape) for _ in range(options.rounds)])
        if not options.json:
            told = "  ".join(f"{name} {value:.6g}" for name, value in found[side].items())
            print(f"{side:6} {told}", flush=True)
    how = f"{T} tokens, {V} ids, width {WIDTH}, forward and backward, one thread"
    parts = [
        {
            "name": f"ours/{peer}/{name}", "ours": round(found["ours"][name], 2),
            "peer": round(found[peer][name], 2), "unit": unit,
            "ratio": round(found[peer][name] / found["ours"][name], 2), "better": "lower",
            "how": f"{how}; ours beside {peer}",
        }
        for peer in ("naive", "trl", "verl") if peer in found and "ours" in found
        for name, unit in (("seconds", "CPU s"), ("mib", "MiB"))
    ]  # fmt: skip
    if not parts:
        print(json.dumps({"name": NAME, "skipped": "neither ours nor a peer was asked for"}))
        return
    print(json.dumps(parts[0] | {"name": NAME, "parts": parts}))


if __name__ == "__main__":
    main()
