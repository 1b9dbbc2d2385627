"""The planner's prediction beside the peak of real processes.

    python benchmarks/memory.py [--only CASE ...]

Each case is a process of its own that makes a decoder with random weights, updates it three times
on random rows that fill their micro-batches (`Trainer.update`, PPO-clip), and reports the most
memory it ever had (VmHWM, Linux). No engine runs in it: what a cache takes is its size. The
prediction is made by `lockstep.memory.plan_memory` from the same shapes and settings. No peer
predicts this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from measuring import Row, alone, main, models_of, note, require_proc, resident_bytes, row

from lockstep.memory import MIB, MemoryPlan, PlanFacts, plan_memory
from lockstep.models.attention_config import LatentShape
from lockstep.models.config import ModelConfig
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.training.config import TrainerConfig

NUM_UPDATES = 3  # in the second one the moments are there while gradients are made

MODELS = {name: ModelConfig.from_hf(shape) for name, shape in models_of("memory").items()}
MODELS["middle latent"] = replace(
    MODELS["middle qwen3"], architecture="deepseek_v3", has_qk_norm=False, num_kv_heads=1,
    latent=LatentShape(
        query_rank=192, kv_rank=128, nope_dim=32, rope_dim=32, value_dim=32, is_interleaved=True
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: ModelConfig
    num_rows: int
    row_tokens: int
    budget: int
    dtype: str = "float32"
    is_invariant: bool = False
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def config(self) -> TrainerConfig:
        return replace(self.trainer, max_tokens_per_microbatch=self.budget)

    def predict(self) -> MemoryPlan:
        return plan_memory(
            PlanFacts(
                model=self.model, dtype=self.dtype, device="cpu", trainer=self.config,
                max_update_tokens=self.num_rows * self.row_tokens, is_invariant=self.is_invariant,
            )
        )  # fmt: skip


def all_cases() -> list[Case]:
    blocks = TrainerConfig(recompute="blocks")
    tiny = {"num_rows": 16, "row_tokens": 256, "budget": 4096}
    one = {"num_rows": 4, "row_tokens": 512, "budget": 2048}
    several = {"num_rows": 4, "row_tokens": 512, "budget": 1024}
    out = [Case(name=name, model=MODELS[name], **tiny) for name in ("tiny qwen3", "tiny gpt_oss")]
    for name in ("middle qwen3", "middle gpt_oss", "middle hybrid", "middle latent"):
        model = MODELS[name]
        out += [
            Case(name=name, model=model, **one),
            Case(name=f"{name}, recompute", model=model, trainer=blocks, **one),
            Case(name=f"{name}, several micro-batches", model=model, **several),
            Case(name=f"{name}, contract", model=model, is_invariant=True, **one),
            Case(
                name=f"{name}, contract, bfloat16, recompute", model=model,
                is_invariant=True, dtype="bfloat16", trainer=blocks, **several,
            ),
        ]  # fmt: skip
    short, large = MODELS["middle hybrid"], MODELS["large qwen3"]
    return [
        *out,
        Case(name="middle hybrid, short rows", model=short, **{**tiny, "row_tokens": 64}),
        Case(name="large qwen3", model=large, **several),
        Case(name="large qwen3, recompute", model=large, trainer=blocks, **several),
    ]


CASES = {case.name: case for case in all_cases()}


def peak_of(name: str) -> int:
    """The peak of a case in bytes. Runs in a process of its own."""
    from measuring.rows import row_to_train

    import numpy as np
    import torch

    from lockstep.models.decoder import Decoder
    from lockstep.objectives.config import PPOClip
    from lockstep.ops.base import Ops
    from lockstep.ops.invariant import InvariantOps
    from lockstep.training.trainer import Trainer

    case = CASES[name]
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, case.dtype))  # made in it: no copy in another one
    model = Decoder(case.model, ops=InvariantOps() if case.is_invariant else Ops())
    torch.set_default_dtype(torch.float32)
    trainer = Trainer(model, case.config, like="unused")
    rng = np.random.default_rng(0)
    mask, rows = np.arange(case.row_tokens) >= case.row_tokens // 8, []
    for number in range(case.num_rows):
        columns = {"advantages": rng.normal(), "rollout_logprobs": -9.0}
        ids = rng.integers(0, case.model.vocab_size, case.row_tokens)
        rows.append(row_to_train(str(number), ids, mask, **columns))
    for _ in range(NUM_UPDATES):
        trainer.update(rows, PPOClip())
    return resident_bytes("VmHWM")


def compare(*, only: tuple[str, ...] = tuple(CASES)) -> Iterator[Row]:
    require_proc()
    how = f"predicted against the peak (VmHWM) of a fresh process of {NUM_UPDATES} updates"
    for name in only:
        case = CASES[name]
        plan, peak = case.predict(), alone(peak_of, name)
        millions = num_elements(decoder_shapes(case.model)) / 1e6
        note(f"{millions:.1f} M parameters, {case.budget} tokens at once: {plan.describe()}")
        yield row(name, plan.num_bytes // MIB, peak // MIB, "MiB", better="higher", how=how)


if __name__ == "__main__":
    main(compare, short={"only": ("tiny qwen3", "tiny gpt_oss", "middle gpt_oss, recompute")})
