"""Random schedules through the embedded engine, and the trainer over what they sampled.

The proof of true on-policy: every log-prob as recorded by the decode step that drew the token,
against that of the training forward (with its gradient) over the packed rows. For the tests of this
folder, and for `docs/proof/run.py`.
"""

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models import attention_config
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.lora import add_adapter
from lockstep.models.lora_config import LoraConfig, lora_shape
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.ops import selftest
from lockstep.ops.base import Ops
from lockstep.training.config import Recompute, RoutingReplay, TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import UNKNOWN_EXPERT, Ragged, Request, Sample, SamplingParams

THREADS = ((1, 1), (2, 1), (1, 2), (2, 2))
DTYPES = ("float32", "bfloat16")
PAGE_SIZES = (16, 48, 128)


def _read(value: Any) -> Any:
    """What a value of schedules.json stands for in a ModelConfig: lists are tuples, and a table
    with a class is an object of it."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    fields = {name: _read(each) for name, each in value.items()}
    kind = fields.pop("class", "")
    return getattr(attention_config, kind)(**fields) if kind else fields


MODELS, FAMILIES, WIDE_MODELS = (
    _read(models) for models in json.loads(Path(__file__).with_suffix(".json").read_text()).values()
)
"""Two small models, the other families that are read, and wider ones: name -> fields of its
ModelConfig."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One line of the proof."""

    model: str
    dtype: str = "float32"
    threads: tuple[int, int] = (1, 1)
    """Of the rollout, of training."""
    is_plain: bool = False
    """The control: stock ops, whose log-probs must differ."""
    seeds: tuple[int, ...] = (0,)
    num_requests: int = 14
    reply_tokens: int = 90
    """Of a turn, at most."""
    recompute: Recompute = "none"
    lora_rank: int = 0
    """Of an adapter on every projection, which alone is trained; 0 trains the model."""
    routing_replay: RoutingReplay = "none"

    def __str__(self) -> str:
        sampler, trainer = self.threads
        ops_name = ", stock ops" if self.is_plain else ""
        recomputed = ", blocks recomputed" if self.recompute == "blocks" else ""
        adapter = f", LoRA of rank {self.lora_rank}" if self.lora_rank else ""
        replayed = "" if self.routing_replay == "none" else ", routes replayed"
        return (
            f"{self.model}, {self.dtype}, threads {sampler} and {trainer}{ops_name}{recomputed}"
            f"{adapter}{replayed}"
        )


def proof_arms() -> list[Arm]:
    """More than 100,000 tokens: every model, dtype and pair of thread counts."""
    return (
        [
            Arm(
                model=model,
                dtype=dtype,
                threads=threads,
                seeds=(i, i + 1) if model in MODELS else (i,),
            )
            for i, (model, dtype, threads) in enumerate(
                product({**MODELS, **WIDE_MODELS}, DTYPES, THREADS)
            )
        ]
        + family_arms()
        + recomputing_arms()
        + lora_arms()
        + replaying_arms()
    )


def family_arms(num_seeds: int = 1, **settings: Any) -> list[Arm]:
    """The families that are not among MODELS."""
    return [
        Arm(
            model=model, dtype=dtype, threads=THREADS[i % 4],
            seeds=tuple(range(i, i + num_seeds)), **settings,
        )
        for i, (model, dtype) in enumerate(product(FAMILIES, DTYPES))
    ]  # fmt: skip


def recomputing_arms(**settings: Any) -> list[Arm]:
    """With activation checkpointing in the training forward."""
    return [
        Arm(model=model, dtype=dtype, threads=(1, 2), recompute="blocks", seeds=(i,), **settings)
        for i, (model, dtype) in enumerate(product(MODELS, DTYPES))
    ]


def control_arms() -> list[Arm]:
    """The same on stock ops."""
    return [
        Arm(model=model, dtype=dtype, is_plain=True)
        for model, dtype in product({**MODELS, **FAMILIES, **WIDE_MODELS}, DTYPES)
    ]


def lora_arms(**settings: Any) -> list[Arm]:
    """With an adapter, unmerged on both sides."""
    ranks = [(model, 4 + i) for i, model in enumerate([*MODELS, "deepseek_v3", "qwen3_next"])]
    ranks += [("deepseek_v3, latents of 512", 32)]
    return [
        Arm(model=model, dtype=dtype, threads=(2, 1), lora_rank=rank, seeds=(i,), **settings)
        for i, ((model, rank), dtype) in enumerate(product(ranks, DTYPES))
    ]


def replaying_arms(**settings: Any) -> list[Arm]:
    """With the sampler's experts in the training forward, which must be those that it would have
    chosen itself."""
    return [
        Arm(
            model="gpt_oss", dtype=dtype, threads=(1, 2), routing_replay="rollout", seeds=(i,),
            recompute=recompute, **settings,
        )
        for i, (dtype, recompute) in enumerate([("float32", "blocks"), ("bfloat16", "none")])
    ]  # fmt: skip


@dataclass(kw_only=True)
class Tally:
    """What an arm found, and what its schedules went through."""

    compared: int = 0
    unequal: int = 0
    max_abs_diff: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    chunked_prompts: int = 0
    """Prompts longer than what one step prefills."""
    page_sizes: set[int] = field(default_factory=set)
    resident: set[bool] = field(default_factory=set)
    updates: int = 0

    def add(self, rows: list[Sample]) -> None:
        """Compares the columns `logprobs` and `rollout_logprobs` of trained rows."""
        for row in rows:
            ours, theirs = (
                row.columns[name][row.loss_mask] for name in ("logprobs", "rollout_logprobs")
            )
            self.compared += len(ours)
            self.unequal += int((ours != theirs).sum())
            self.max_abs_diff = max(self.max_abs_diff, float(np.abs(ours - theirs).max()))


def make_model(name: str, dtype: str, *, seed: int = 0, lora_rank: int = 0) -> Decoder:
    """No parameter, norms, sinks and adapters included, is at its start; log-probs spread over
    nats."""
    shape = {"tie_embeddings": True, **{**MODELS, **FAMILIES, **WIDE_MODELS}[name]}
    config = ModelConfig(**shape, rms_norm_eps=1e-6, rope_theta=1e4, max_positions=1024)
    model = Decoder(config)
    model.init_weights(std=0.08, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm", "bias", "sinks")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model = model.to(getattr(torch, dtype))
    if lora_rank:
        shape = lora_shape(LoraConfig(rank=lora_rank, alpha=3.0), config)
        add_adapter(model, shape, seed=seed)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if ".B" in parameter_name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@cache
def backend_for(name: str, dtype: str, lora_rank: int = 0) -> selftest.Proof:
    """What a run of this model would compute with on this machine, on any of THREADS."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(map(max, THREADS)))  # the self-test tries one thread too
    try:
        return selftest.prove(make_model(name, dtype, lora_rank=lora_rank))
    finally:
        torch.set_num_threads(threads)


@cache
def compare(arm: Arm) -> Tally:
    """Runs the arm's schedules, each with two rounds and an update after either."""
    threads = torch.get_num_threads()
    proof = backend_for(arm.model, arm.dtype, arm.lora_rank)
    try:
        tally = Tally()
        config = TrainerConfig(lr=1e-3, recompute=arm.recompute, routing_replay=arm.routing_replay)
        model = make_model(arm.model, arm.dtype, lora_rank=arm.lora_rank)
        model.ops = Ops() if arm.is_plain else proof.ops
        trainer = Trainer(model, config, like="unused")
        for seed in arm.seeds:
            _run(trainer, arm, seed, tally)
        return tally
    finally:
        torch.set_num_threads(threads)


def _run(trainer: Trainer, arm: Arm, seed: int, tally: Tally) -> None:
    """One engine: a round of rollouts, an update in random packings, and both again."""
    rng = np.random.default_rng(seed)
    trainer.temperature = float(rng.choice([1.0, 0.7]))
    settings = EmbeddedConfig(
        page_size=PAGE_SIZES[seed % 3],
        kv_cache_tokens=16384 if seed % 2 else 768,
        max_num_sequences=12,
        max_step_tokens=int(rng.choice([48, 96])),
        resident_rows=seed % 4 < 2,
    )
    engine = EmbeddedEngine(trainer.model, settings)
    for round_number in range(2):
        torch.set_num_threads(arm.threads[0])
        name = f"{seed}/{round_number}"
        played = roll_out(
            engine, rng, name, num_requests=arm.num_requests, reply_tokens=arm.reply_tokens,
            temperature=trainer.temperature, is_cut=bool(rng.integers(2)),
            is_routed=arm.routing_replay != "none",
        )  # fmt: skip
        rows = asyncio.run(played)
        torch.set_num_threads(arm.threads[1])
        train(trainer, rows, rng)
        asyncio.run(engine.load_weights(None, version=trainer.version))
        tally.add(rows)
        tally.updates += 1
        starts = [int(row.loss_mask.argmax()) for row in rows]
        tally.chunked_prompts += sum(start > settings.max_step_tokens for start in starts)
    tally.preemptions += engine.stats["preemptions"]
    tally.cached_tokens += engine.stats["cached_tokens"]
    tally.page_sizes.add(settings.page_size)
    tally.resident.add(settings.resident_rows)


async def roll_out(
    engine: EmbeddedEngine,
    rng: np.random.Generator,
    name: str,
    *,
    num_requests: int,
    reply_tokens: int,
    temperature: float = 1.0,
    is_cut: bool = False,
    is_routed: bool = False,
) -> list[Sample]:
    """Dialogues of two turns that arrive when they like, begin alike, and grow by observations.

    is_cut: drawn with top-p; the log-probs are then over what was left to draw from. is_routed: the
    experts that the tokens went to are recorded.
    """
    vocab = engine.capabilities.vocab_size
    stem = rng.integers(0, vocab, 200).astype(np.int32)
    sampling = SamplingParams(
        max_tokens=1, temperature=temperature, top_p=0.9 if is_cut else 1.0,
        distribution="sampled" if is_cut else "tempered", record_support=is_cut,
        record_routes=is_routed,
    )  # fmt: skip
    # Drawn at once: what each dialogue is does not depend on how the engine mixes them.
    seeds = rng.integers(1 << 30, size=num_requests)

    async def play(number: int) -> Sample:
        own = np.random.default_rng(seeds[number])
        begin = stem[: int(own.integers(1, len(stem)))]
        rest = own.integers(0, vocab, int(own.integers(1, 150))).astype(np.int32)
        ids = [np.concatenate([begin, rest])]
        logprobs = [np.full(len(ids[0]), np.nan, np.float32)]
        support = [Ragged.empty(len(ids[0]))]
        routes = []
        for _ in range(int(own.integers(0, reply_tokens // 3))):
            await asyncio.sleep(0)
        for turn in range(2):
            request = Request(
                id=f"{name}/{number}/{turn}", prompt_ids=np.concatenate(ids),
                sampling=replace(sampling, max_tokens=int(own.integers(1, reply_tokens))),
                seed=int(own.integers(1 << 30)), routes_from=sum(map(len, routes)),
            )  # fmt: skip
            async for delta in engine.generate(request):
                ids.append(delta.token_ids)
                logprobs.append(delta.logprobs)
                support.append(delta.support or Ragged.empty(len(delta.token_ids)))
                if is_routed:
                    routes.append(delta.routed_experts)
            observed = own.integers(0, vocab, int(own.integers(1, 20))).astype(np.int32)
            ids.append(observed)
            logprobs.append(np.full(len(observed), np.nan, np.float32))
            support.append(Ragged.empty(len(observed)))
        recorded = np.concatenate(logprobs)
        mask = ~np.isnan(recorded)
        columns = {
            "rollout_logprobs": recorded,
            "advantages": np.where(mask, own.normal(), 0.0).astype(np.float32),
        }
        if is_routed:
            known = np.concatenate(routes)
            column = np.full((len(mask), *known.shape[1:]), UNKNOWN_EXPERT, np.int16)
            column[: len(known)] = known
            columns["routed_experts"] = column
        return Sample(
            id=f"{name}/{number}",
            token_ids=np.concatenate(ids),
            loss_mask=mask,
            columns=columns,
            ragged={"support": Ragged.concatenate(support)} if is_cut else {},
        )

    return list(await asyncio.gather(*(play(i) for i in range(num_requests))))


def train(trainer: Trainer, rows: list[Sample], rng: np.random.Generator) -> None:
    """An update whose gradient gathers over random shares of the rows, each in micro-batches of a
    random size. The log-probs of these forwards are kept as `logprobs`."""
    order = rng.permutation(len(rows))
    cuts = np.sort(rng.choice(np.arange(1, len(rows)), 2, replace=False))
    longest = max(len(row) for row in rows)
    for share in np.split(order, cuts):
        budget = int(rng.integers(longest, 4 * longest))
        trainer.config = replace(trainer.config, max_tokens_per_microbatch=budget)
        metrics = trainer.forward_backward(
            [rows[i] for i in share], make_loss(Reinforce()), column="logprobs"
        )
        assert metrics.get("routing/replayed_share", 1.0) == 1.0
        assert metrics.get("routing/differing_share", 0.0) == 0.0
    trainer.optim_step()
    assert not trainer.last_skip, trainer.last_skip
