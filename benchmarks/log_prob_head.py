"""Log-probs over a large vocabulary, forward and backward: time and memory beside other functions.

T hidden states of width 1024 and a head of V ids, float32, one thread; a gradient by the log-probs
alone. Ours gives the entropy too. Peers: log_softmax and gather of all logits ("naive"); TRL's
selective_log_softmax; verl's FusedLinearForPPO. A peer that is not installed is left out.

Seconds are processor time, MiB the peak above the memory before, gradients included: see
sink_attention.py. The weight's gradient alone takes 4 x 1024 x V bytes.

    python benchmarks/log_prob_head.py [--tokens T] [--vocab V] [--rounds N]
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from measuring import TRAINERS, Row, best_alone, listed, main, note, require_proc, row, usage

import torch

from lockstep.ops.base import Ops

Tensor = torch.Tensor
WIDTH = 1024


def naive(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.t(), -1).gather(1, ids[:, None])[:, 0]


def by_trl() -> Callable[..., Tensor]:
    sys.path.append(str(TRAINERS))
    from trl.trainer.utils import selective_log_softmax

    return lambda hidden, weight, ids: selective_log_softmax(hidden @ weight.t(), ids)


def by_verl() -> Callable[..., Tensor]:
    """The file is run alone: the package brings Ray with it."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise ImportError("verl is not installed (pip install --no-deps verl)")
    path = Path(spec.origin).parent / "utils" / "experimental" / "torch_functional.py"
    fused = runpy.run_path(str(path))["FusedLinearForPPO"]()
    return lambda hidden, weight, ids: fused(hidden[None], weight, ids[None])[0][0]


SIDES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "ours": lambda: lambda hidden, weight, ids: Ops().log_probs(hidden, weight, ids)[0],
    "naive": lambda: naive,
    "trl": by_trl,
    "verl": by_verl,
}
"""Side -> what makes its function of [T, D] hidden states, a [V, D] head and [T] ids."""


def measure(num_tokens: int, vocab_size: int, side: str) -> dict[str, float]:
    """One pass after a small one. Runs in a process of its own."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    upstream = torch.randn(num_tokens, generator=g)
    function = SIDES[side]()

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


def is_installed(side: str) -> bool:
    try:
        SIDES[side]()
    except ImportError as error:
        note(f"{side}: left out, {error}")
        return False
    return True


def compare(
    *,
    tokens: int = 4096,
    vocab: int = 131072,
    rounds: int = 1,
    only: tuple[str, ...] = ("naive", "trl", "verl"),
) -> Iterator[Row]:
    """only: the peers."""
    require_proc()
    sides = [side for side in ("ours", *only) if is_installed(side)]
    found = best_alone(rounds, sides, measure, tokens, vocab)
    for side, figures in found.items():
        note(f"{side:6} {listed(figures)}")
    how = f"{tokens} tokens, {vocab} ids, width {WIDTH}, forward and backward, one thread"
    ours = found.pop("ours")
    for peer, theirs in found.items():
        for name, unit in (("seconds", "CPU s"), ("mib", "MiB")):
            yield row(f"log-prob head, ours/{peer}/{name}", ours[name], theirs[name], unit, how=how)


if __name__ == "__main__":
    main(compare, short={"tokens": 512, "vocab": 32768})
