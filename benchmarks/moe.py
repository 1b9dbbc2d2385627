"""Cost of a layer of routed experts beside transformers' own, in memory and in time.

gpt-oss' layer with 32 experts, 4 of them active, widths of 512, float32, one thread: log-probs of
64k tokens (no gradient), a training step of 16k (forward, backward, every gradient), and a decode
step of 8. "skewed" sends all tokens to the same four experts. The peers are transformers' GptOssMLP
with the two implementations of experts that its gradients allow: "grouped_mm", its default, which
computes all pairs at once, and "eager", a loop over the experts.

A measurement is a process of its own, after a small call that loads the libraries. Seconds are its
processor time, the best over the rounds, which take turns. MiB are the peak of that process above
its memory before (the peak is reset by /proc/self/clear_refs): input and weights are not counted,
gradients are.

    python benchmarks/moe.py [--rounds N] [--only CASE ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from measuring import Row, best_alone, main, models_of, note, require_proc, row, usage
from measuring.sampling import ops_of

import torch

from lockstep.models.config import ModelConfig
from lockstep.models.layer_inputs import LayerInputs
from lockstep.models.moe import MoE
from lockstep.ops.context import PackedContext

Tensor = torch.Tensor

SHAPE = ModelConfig.from_hf(models_of("moe")["gpt_oss"])
EXPERTS, ACTIVE, WIDTH = SHAPE.num_experts, SHAPE.num_active_experts, SHAPE.hidden_size
PEERS = ("grouped_mm", "eager")
SIDES = ("plain", "invariant", *PEERS)
CASES: dict[str, tuple[str, int, bool, bool]] = {
    "infer-64k": ("log-probs of 64k tokens", 65536, False, False),
    "train-16k": ("a training step of 16k tokens", 16384, True, False),
    "train-16k-skewed": ("the same, all tokens to four experts", 16384, True, True),
    "decode-8": ("decode steps of 8 tokens", 8, False, False),
}
"""Name -> (in words, tokens, whether there are gradients, whether the routes are skewed)."""


def make_layer(side: str) -> tuple[torch.nn.Module, Callable[[Tensor], Tensor]]:
    """(the layer, what runs it on [T, D])."""
    if side in PEERS:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

        config = GptOssConfig(
            hidden_size=WIDTH, intermediate_size=WIDTH, num_local_experts=EXPERTS,
            num_experts_per_tok=ACTIVE,
        )  # fmt: skip
        config._experts_implementation = side
        theirs = GptOssMLP(config)
        return theirs, lambda x: theirs(x[None])[0][0]
    ops, ours = ops_of(side), MoE(SHAPE, 0)
    none = torch.empty(0)  # of rotations, which experts do not read
    return ours, lambda x: ours(x, LayerInputs(ops, PackedContext.of([len(x)]), none, none))


def measure(decodes: int, case: str, side: str) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, num_tokens, is_training, is_skewed = CASES[case]
    layer, run = make_layer(side)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if is_skewed:
        with torch.no_grad():
            layer.get_parameter("router.bias")[:ACTIVE] = 50.0
    x = torch.randn(num_tokens, WIDTH, requires_grad=is_training)

    def once(x: Tensor) -> None:
        if is_training:
            run(x).square().mean().backward()
            return
        with torch.no_grad():
            for _ in range(decodes if num_tokens < 1000 else 1):
                run(x)

    once(x.detach()[:64].requires_grad_(is_training))
    layer.zero_grad(set_to_none=True)
    return usage(lambda: once(x))


def compare(
    *, rounds: int = 3, only: tuple[str, ...] = tuple(CASES), decodes: int = 200
) -> Iterator[Row]:
    require_proc()
    for case in only:
        words = f"{decodes} " * (case == "decode-8") + CASES[case][0]
        found = best_alone(rounds, SIDES, measure, decodes, case)
        for side, figures in found.items():
            note(f"{words:40} {side:12} {figures['seconds']:7.2f} CPU s {figures['mib']:8.0f} MiB")
        for key, unit in (("seconds", "CPU s"), ("mib", "MiB")):
            if key == "mib" and case == "decode-8":
                continue
            for peer in PEERS:
                yield row(f"moe, {words}", found["plain"][key], found[peer][key], unit, how=(
                    f"{EXPERTS} experts, {ACTIVE} active, widths {WIDTH}, float32, one thread; "
                    f"transformers' {peer}"
                ))  # fmt: skip


if __name__ == "__main__":
    main(compare, short={"rounds": 1, "only": ("decode-8",), "decodes": 40})
