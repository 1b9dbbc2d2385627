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
from typing import Any

from measuring import Row, alone, main, note, require_proc, resident_bytes, row

from lockstep.memory import MIB, MemoryPlan, PlanFacts, plan_memory
from lockstep.models.attention_config import LatentShape, LinearShape
from lockstep.models.config import ModelConfig
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.training.config import TrainerConfig

NUM_UPDATES = 3  # in the second one the moments are there while gradients are made

DENSE = ModelConfig(
    architecture="qwen3", vocab_size=640, hidden_size=64, intermediate_size=128, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4,
    max_positions=1024, windows=(None, None), tie_embeddings=True, has_qk_norm=True,
)  # fmt: skip
MOE = replace(
    DENSE, architecture="gpt_oss", intermediate_size=64, has_qk_norm=False, has_sinks=True,
    has_attention_bias=True, has_router_bias=True, has_expert_bias=True, num_experts=4,
    num_active_experts=2, swiglu_limit=7.0, windows=(None, 64),
)  # fmt: skip


def widened(config: ModelConfig, *, layers: int, **shape: Any) -> ModelConfig:
    windows = (config.windows * layers)[:layers]
    return replace(config, num_layers=layers, windows=windows, **shape)


MIDDLE_DENSE = widened(
    DENSE, layers=8, hidden_size=384, intermediate_size=1024, num_heads=6, head_dim=64,
    vocab_size=8192,
)  # fmt: skip
MIDDLE_MOE = widened(
    MOE, layers=6, hidden_size=256, intermediate_size=256, num_heads=8, head_dim=32,
    vocab_size=8192, num_experts=16, num_active_experts=4,
)  # fmt: skip
MIDDLE_HYBRID = replace(
    MIDDLE_DENSE, architecture="qwen3_5_text", has_output_gate=True, norm_weights="centered",
    linear=LinearShape(
        layers=(0, 1, 2, 4, 5, 6), key_heads=6, value_heads=12, key_dim=32, value_dim=32,
        conv_width=4, is_grouped=False,
    ),
)  # fmt: skip
MIDDLE_LATENT = replace(
    MIDDLE_DENSE, architecture="deepseek_v3", has_qk_norm=False, num_kv_heads=1, head_dim=64,
    latent=LatentShape(
        query_rank=192, kv_rank=128, nope_dim=32, rope_dim=32, value_dim=32, is_interleaved=True
    ),
)  # fmt: skip
LARGE_DENSE = widened(
    DENSE, layers=12, hidden_size=512, intermediate_size=1536, num_heads=8, head_dim=64,
    vocab_size=16384,
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
    out = [
        Case(name="tiny qwen3", model=DENSE, **tiny),
        Case(name="tiny gpt_oss", model=MOE, **tiny),
    ]
    middle = {
        "qwen3": MIDDLE_DENSE,
        "gpt_oss": MIDDLE_MOE,
        "hybrid": MIDDLE_HYBRID,
        "latent": MIDDLE_LATENT,
    }
    for kind, model in middle.items():
        out += [
            Case(name=f"middle {kind}", model=model, **one),
            Case(name=f"middle {kind}, recompute", model=model, trainer=blocks, **one),
            Case(name=f"middle {kind}, several micro-batches", model=model, **several),
            Case(name=f"middle {kind}, contract", model=model, is_invariant=True, **one),
            Case(
                name=f"middle {kind}, contract, bfloat16, recompute", model=model,
                is_invariant=True, dtype="bfloat16", trainer=blocks, **several,
            ),
        ]  # fmt: skip
    out += [
        Case(name="middle hybrid, short rows", model=MIDDLE_HYBRID, **{**tiny, "row_tokens": 64}),
        Case(name="large qwen3", model=LARGE_DENSE, **several),
        Case(name="large qwen3, recompute", model=LARGE_DENSE, trainer=blocks, **several),
    ]
    return out


CASES = {case.name: case for case in all_cases()}


def peak_of(name: str) -> int:
    """The peak of a case in bytes. Runs in a process of its own."""
    import numpy as np
    import torch

    from lockstep.models.decoder import Decoder
    from lockstep.objectives.config import PPOClip
    from lockstep.ops.base import Ops
    from lockstep.ops.invariant import InvariantOps
    from lockstep.training.trainer import Trainer
    from lockstep.types import Sample

    case = CASES[name]
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, case.dtype))  # made in it: no copy in another one
    model = Decoder(case.model, ops=InvariantOps() if case.is_invariant else Ops())
    torch.set_default_dtype(torch.float32)
    trainer = Trainer(model, case.config, like="unused")
    rng = np.random.default_rng(0)
    rows: list[Sample] = []
    for number in range(case.num_rows):
        mask = np.arange(case.row_tokens) >= case.row_tokens // 8
        columns = {
            "advantages": np.where(mask, rng.normal(), 0.0),
            "rollout_logprobs": np.where(mask, -9.0, np.nan),
        }
        rows.append(
            Sample(
                id=str(number),
                token_ids=rng.integers(0, case.model.vocab_size, case.row_tokens).astype(np.int32),
                loss_mask=mask,
                columns={name: x.astype(np.float32) for name, x in columns.items()},
            )
        )
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
