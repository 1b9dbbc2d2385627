"""Log-probs over a large vocabulary, forward and backward: time and memory beside other functions.

T hidden states of width 1024 and a head of V ids, float32, one thread; a gradient by the log-probs
alone. Ours gives the entropy too. Peers: log_softmax and gather of all logits ("naive"); TRL's
selective_log_softmax, whose code for a CPU is read out of its file; verl's FusedLinearForPPO. A
peer that is not installed is left out, with the reason.

Seconds are processor time, MiB the peak above the memory before, gradients included: see
sink_attention.py. The weight's gradient alone takes 4 x 1024 x V bytes.

    python benchmarks/log_prob_head.py [--tokens T] [--vocab V] [--rounds N] [--trl DIR]
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring import Row, alone, best, in_turn, main, note, require_proc, row, usage

import torch
import torch.nn.functional as F

from lockstep.ops.base import Ops

Tensor = torch.Tensor
WIDTH = 1024
PEERS = ("naive", "trl", "verl")


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


def measure(side: str, num_tokens: int, vocab_size: int, trl: str) -> dict[str, float]:
    """One pass after a small one. Runs in a process of its own."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    upstream = torch.randn(num_tokens, generator=g)
    function = function_of(side, trl)

    def once(num_tokens: int, vocab_size: int) -> dict[str, float]:
        hidden = torch.randn(num_tokens, WIDTH, generator=g).requires_grad_()
        weight = (torch.randn(vocab_size, WIDTH, generator=g) * WIDTH**-0.5).requires_grad_()
        ids = torch.randint(vocab_size, (num_tokens,), generator=g)
        out: list[Tensor] = []

        def run() -> None:
            out.append(function(hidden, weight, ids))
            out[0].backward(upstream[:num_tokens])

        found = usage(run)
        assert hidden.grad is not None and weight.grad is not None, "both were asked for"
        return found | {
            "logprobs": float(out[0].detach().double().sum()),
            "grad_hidden": float(hidden.grad.norm()),
            "grad_weight": float(weight.grad.norm()),
        }

    once(min(64, num_tokens), 512)
    return once(num_tokens, vocab_size)


def available(side: str, trl: str) -> bool:
    try:
        function_of(side, trl)
    except (LookupError, ImportError) as error:
        note(f"{side}: left out, {error}")
        return False
    return True


def compare(
    *,
    tokens: int = 4096,
    vocab: int = 131072,
    rounds: int = 1,
    only: tuple[str, ...] = PEERS,
    trl: str = "",
) -> Iterator[Row]:
    """only: the peers. trl: directory of an unpacked wheel of TRL."""
    require_proc()
    sides = {
        side: partial(alone, measure, side, tokens, vocab, trl)
        for side in ("ours", *only)
        if available(side, trl)
    }
    found = {side: best(runs) for side, runs in in_turn(rounds, sides).items()}
    for side, figures in found.items():
        note(f"{side:6} {'  '.join(f'{name} {x:.6g}' for name, x in figures.items())}")
    how = f"{tokens} tokens, {vocab} ids, width {WIDTH}, forward and backward, one thread"
    ours = found.pop("ours")
    for peer, theirs in found.items():
        for name, unit in (("seconds", "CPU s"), ("mib", "MiB")):
            yield row(f"log-prob head, ours/{peer}/{name}", ours[name], theirs[name], unit, how=how)


if __name__ == "__main__":
    main(compare, short={"tokens": 512, "vocab": 32768})
