"""Bytes that a delta link sends for an update of SmolLM2-135M, beside the bytes of all weights.

Reinforcement learning of sums with all weights in bfloat16, whose masters are float32, at several
learning rates. The weights after each step come from the run's checkpoints; the first update, from
the published weights, is left out, since Adam's first steps are its largest. Seconds are for
finding and for applying the changes, on one thread. Needs `lockstep fetch smollm2-135m`.

    python benchmarks/delta_sync.py [--lr LR ...] [--steps N] [--groups N]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measuring import ROOT, Row, alone, main, note, row


def train_run(lr: float, steps: int, groups: int, out: str) -> None:
    from lockstep.recipes import configure
    from lockstep.run.train import train

    sums = f"{ROOT}/examples/sums.py"
    task = ("model=smollm2-135m", f"task.path={sums}:tasks", f"task.reward={sums}:reward")
    size = ("max_tokens=128", "agent.max_turn_tokens=48", "evaluation=none", f"steps={steps}")
    size = (*size, f"groups_per_step={groups}")
    kept = ("checkpoint.every=1", f"checkpoint.keep_last={steps}", "trainer.warmup_updates=0")
    words = [*task, *size, *kept, "dtype=bfloat16", f"trainer.lr={lr}"]
    train(configure("custom", overrides=words), out=Path(out), view="json")


def measure(lr: float, steps: int, groups: int) -> dict[str, float]:
    """Runs in a process of its own."""
    import torch

    from lockstep.engines.weight_delta import DeltaDecoder, DeltaEncoder
    from lockstep.models.hf_io import hf_tensors, load_checkpoint

    torch.set_num_threads(1)
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    sent, finding, applying = [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as place:
        train_run(lr, steps, groups, f"{place}/run")
        for policy in sorted(Path(place).glob("run/checkpoints/*/policy")):
            tensors = hf_tensors(load_checkpoint(policy, dtype=torch.bfloat16))
            num_bytes, finding, applying = 0, 0.0, 0.0
            for name, tensor in tensors.items():
                began = time.perf_counter()
                count, data = encoder.encode(name, tensor)
                middle = time.perf_counter()
                found = decoder.decode(name, tensor.dtype, tensor.shape, count, data)
                applying += time.perf_counter() - middle
                finding += middle - began
                assert torch.equal(found, tensor)
                num_bytes += len(data)
            sent.append(num_bytes)
    assert encoder.checksum == decoder.checksum
    return {
        "share": sum(sent[1:]) / len(sent[1:]) / sent[0],
        "whole": sent[0],
        "finding": finding,
        "applying": applying,
    }


def compare(
    *, lr: tuple[float, ...] = (1e-6, 1e-5, 1e-4), steps: int = 4, groups: int = 8
) -> Iterator[Row]:
    for each in lr:
        found = alone(measure, each, steps, groups)
        note(f"lr {each:g}: {found['finding']:.2f} s to find and {found['applying']:.2f} to apply")
        whole = found["whole"] / 1e6
        how = f"learning rate {each:g}, mean of {steps - 1} updates"
        yield row("delta_sync", whole * found["share"], whole, "MB", how=how)


if __name__ == "__main__":
    main(compare, short={"lr": (1e-6,), "steps": 2, "groups": 1})
