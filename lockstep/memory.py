"""How much memory a run will take, before anything is loaded, and whether there is so much.

The peak is a prediction from shapes and settings: what stays for the whole run, and on top of it
the larger of what a training step and what a step of the engine need. Rows are taken as long as the
settings allow, so a run of short rows stays below it. `benchmarks/memory.py` compares it with the
peak of real processes; the bytes that autograd keeps per token are compared in
tests/cpu/test_memory.py, which fails when an op keeps more than is planned here.

# T tokens of a micro-batch  D model width  H heads  G key heads  K head width  F MLP width
# A active experts  V vocabulary; a: bytes of the compute dtype
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from lockstep.config import tag
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.models.lora_config import LoraShape, adapter_shapes
from lockstep.models.shapes import Shapes, decoder_shapes, num_elements
from lockstep.run_config import Config, ModelChoice, SupervisedConfig
from lockstep.training.config import TrainerConfig
from lockstep.training.precision import moment_bytes

Device = Literal["cpu", "cuda"]

MIB, GIB = 1 << 20, 1 << 30

PROCESS_BYTES: dict[Device, int] = {"cpu": 400 * MIB, "cuda": 600 * MIB}
"""Python, torch and its libraries after a first update (measured), or CUDA's context and the
workspaces of its libraries (not measured)."""

HEAD_CHUNK_BYTES = 128 * MIB  # ops.head.CHUNK_BYTES
HEAD_CHUNKS: dict[Device, int] = {"cpu": 2, "cuda": 5}
"""Chunks of logits that live at once: on a CPU most of what is made of one is made in small blocks.
"""

HEAP_BYTES: dict[Device, int] = {"cpu": 224 * MIB, "cuda": GIB}
"""What the allocator holds of freed memory, at most, and never more than a step takes. On a CPU
measured; on CUDA a guess."""

EXPERT_CHUNK_ROWS: dict[Device, int] = {"cpu": 128, "cuda": 1024}  # models.experts.ROWS_PER_EXPERT
LEAST_EXPERT_CHUNK = 1024  # models.experts.LEAST_CHUNK

PACKED_ELEMENTS = 1 << 14  # ops.invariant.PACKED_SIZE

PROCESS, FREED = "process", "freed, not returned"
"""Parts that no setting makes smaller."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory."""

    name: str
    num_bytes: int
    lowered_by: str = ""
    """The settings that make it smaller, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What is predicted for one process and its device."""

    device: Device
    phase: Literal["training", "sampling"]
    """Where the peak is."""
    parts: tuple[Part, ...]
    """All that is there at the peak, in the device's memory."""
    num_ranks: int = 1
    host_parts: tuple[Part, ...] = ()
    """In the host's, with trainer.offload."""

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def host_bytes(self) -> int:
        return sum(part.num_bytes for part in self.host_parts)

    @property
    def by_size(self) -> list[Part]:
        return sorted(self.parts, key=lambda part: -part.num_bytes)

    def describe(self, available: int | None = None) -> str:
        """One line: the peak, and the parts that are at least a twentieth of it. available: bytes
        of the device, if they are known."""
        shown = [p for p in self.by_size if p.num_bytes * 20 >= self.num_bytes]
        rest = self.num_bytes - sum(p.num_bytes for p in shown)
        texts = [f"{p.name} {_gib(p.num_bytes)}" for p in shown]
        texts += [f"others {_gib(rest)}"] if rest else []
        where = " of the GPU" if self.device == "cuda" else ""
        there = "" if available is None else f" ({_gib(available)} are there)"
        each = f" of each of {self.num_ranks} processes" if self.num_ranks > 1 else ""
        line = (
            f"about {_gib(self.num_bytes)} GiB{where}{each} at the peak{there}, in {self.phase}: "
        )
        line += ", ".join(texts)
        if self.host_parts:
            line += f"; {_gib(self.host_bytes)} GiB of the host"
        return line

    def check(self, num_bytes: int, source: str) -> None:
        """Raises ConfigError if the plan does not fit into `num_bytes` of the device, which is
        what `source` says."""
        if self.num_bytes <= num_bytes:
            return
        who = "this run" if self.num_ranks == 1 else f"each of {self.num_ranks} processes"
        chosen = [part for part in self.by_size if part.name not in (PROCESS, FREED)]
        largest = [
            f"{part.name} {_gib(part.num_bytes)} GiB"
            + (f" (less with {part.lowered_by})" if part.lowered_by else "")
            for part in chosen[:3]
        ]
        raise ConfigError(
            f"{who} is predicted to need {_gib(self.num_bytes)} GiB at its peak, in "
            f"{self.phase}, and there are {_gib(num_bytes)} GiB ({source}). The largest parts: "
            f"{'; '.join(largest)}. If the prediction is wrong for you, memory_limit_gib=N "
            "replaces what it is compared with."
        )

    def check_host(self, num_bytes: int, source: str) -> None:
        """The same for what trainer.offload moves to the host."""
        if self.host_bytes > num_bytes:
            raise ConfigError(
                f"trainer.offload is predicted to need {_gib(self.host_bytes)} GiB of the host, "
                f"which has {_gib(num_bytes)} ({source}). trainer.optimizer_bits=8 or lora need "
                "less."
            )


def plan_run(
    config: ModelChoice,
    model: ModelConfig,
    *,
    device: Device,
    lora: LoraShape | None = None,
    critic: ModelConfig | None = None,
    is_invariant: bool = False,
) -> MemoryPlan:
    """The plan of `config`, a training run or a supervised one.

    critic: the shapes of the model of values, where there is one. is_invariant: the ops of the
    contract are used, as far as is known.
    """
    world = config.parallel.num_processes(os.environ)
    facts = PlanFacts(
        num_ranks=world,
        sequence=config.parallel.sequence,
        is_sharded=config.parallel.shard and world > 1,
        model=model, dtype=config.dtype, device=device, trainer=config.trainer, lora=lora,
        critic=critic, is_invariant=is_invariant,
    )  # fmt: skip
    if isinstance(config, Config):
        total = config.groups_per_step * config.group_size * config.max_tokens
        return plan_memory(
            replace(
                facts,
                engine=config.engine if isinstance(config.engine, EmbeddedConfig) else None,
                has_reference=config.objective.reads_reference_logprobs,
                critic_freeze=config.critic.freeze,
                max_update_tokens=max(total // config.trainer.updates_per_batch, config.max_tokens),
            )
        )
    assert isinstance(config, SupervisedConfig), tag(type(config))
    longest = config.sft.max_tokens or config.max_tokens
    return plan_memory(replace(facts, max_update_tokens=config.sft.rows_per_step * longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What a prediction depends on."""

    model: ModelConfig
    dtype: str
    device: Device
    trainer: TrainerConfig
    max_update_tokens: int = 0
    """Of all rows of one update: with one micro-batch no gradient waits for another's."""
    engine: EmbeddedConfig | None = None
    has_reference: bool = False
    lora: LoraShape | None = None
    critic: ModelConfig | None = None
    critic_freeze: tuple[str, ...] = ()
    is_invariant: bool = False
    num_ranks: int = 1
    sequence: int = 1
    """Ranks that share the tokens of a micro-batch."""
    is_sharded: bool = False
    """Weights, gradients and optimizer state are divided over the ranks."""

    @property
    def a(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def T(self) -> int:
        """Of a rank: its part of the largest micro-batch."""
        longest = min(self.trainer.max_tokens_per_microbatch, self.rank_update_tokens)
        return math.ceil(longest / self.sequence)

    @property
    def rank_update_tokens(self) -> int:
        """Of the rows that this rank trains on, alone or with others."""
        return math.ceil(self.max_update_tokens * self.sequence / self.num_ranks)

    def sharded(self, num_bytes: int) -> int:
        return math.ceil(num_bytes / self.num_ranks) if self.is_sharded else num_bytes


def plan_memory(facts: PlanFacts) -> MemoryPlan:
    """The prediction itself."""
    beside: list[Part] = []
    if facts.engine is not None and facts.engine.replicas:
        beside = _engine_processes(facts, facts.engine)
        facts = replace(facts, engine=None)
    policy = _policy_state(facts)
    staying = [Part(PROCESS, PROCESS_BYTES[facts.device]), *policy.device]
    host = policy.host
    if facts.critic is not None:
        state = _critic_state(facts, facts.critic)
        staying += state.device
        host += state.host
    if facts.has_reference and facts.lora is None:
        num_bytes = facts.sharded(num_elements(decoder_shapes(facts.model)) * facts.a)
        staying.append(Part("reference policy", num_bytes, "objective.kl_coef=0 or lora"))
    if facts.engine is not None and facts.is_sharded:
        num_bytes = num_elements(decoder_shapes(facts.model)) * facts.a
        staying.append(Part("the engine's copy of the weights", num_bytes, "parallel.shard=false"))
    staying += beside
    training = _training(facts)
    sampling = [] if facts.engine is None else _sampling(facts, facts.engine)
    if facts.engine is not None:
        # With share_device its memory is given back before an update.
        held = sampling if facts.engine.share_device else staying
        held += _engine_state(facts, facts.engine)
    is_training = _total(training) >= _total(sampling)
    step = training if is_training else sampling
    parts = [
        *staying,
        *step,
        Part(FREED, min(HEAP_BYTES[facts.device], _total(step))),
    ]
    return MemoryPlan(
        device=facts.device,
        num_ranks=facts.num_ranks,
        phase="training" if is_training else "sampling",
        parts=tuple(part for part in parts if part.num_bytes),
        host_parts=tuple(part for part in host if part.num_bytes),
    )


# -- what stays for the whole run ------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    device: list[Part]
    host: list[Part]


def _policy_state(facts: PlanFacts) -> _State:
    shapes = decoder_shapes(facts.model)
    if facts.lora is not None:
        shapes = shapes | adapter_shapes(facts.lora)
    advice = "dtype=bfloat16" if facts.dtype == "float32" else ""
    # The table of rotations stands beside them: two of head width per position, float32.
    rotations = 8 * facts.model.max_positions * facts.model.head_dim
    num_bytes = facts.sharded(num_elements(shapes) * facts.a) + _gathered(facts, shapes)
    weights = Part("weights", num_bytes + rotations, advice)
    return _with_optimizer(facts, weights, _trained(facts), "")


def _critic_state(facts: PlanFacts, critic: ModelConfig) -> _State:
    shapes = decoder_shapes(replace(critic, tie_embeddings=True))
    num_bytes = facts.sharded(num_elements(shapes) * facts.a) + _gathered(facts, shapes)
    weights = Part("critic's weights", num_bytes)
    trained = {
        name: shape
        for name, shape in shapes.items()
        if not any(fnmatchcase(f"body.{name}", pattern) for pattern in facts.critic_freeze)
    }
    return _with_optimizer(facts, weights, trained, "critic's ")


def _gathered(facts: PlanFacts, shapes: Shapes) -> int:
    """Of sharded weights what is whole at one time: a block and the next, each with its gradient,
    and what belongs to no block."""
    if not facts.is_sharded:
        return 0
    outside = {n: shape for n, shape in shapes.items() if not n.startswith("layers.")}
    blocks = [
        num_elements({n: s for n, s in shapes.items() if n.startswith(f"layers.{layer}.")})
        for layer in range(facts.model.num_layers)
    ]
    return (num_elements(outside) + 3 * max(blocks)) * facts.a


def _with_optimizer(facts: PlanFacts, weights: Part, trained: Shapes, whose: str) -> _State:
    trainer = facts.trainer
    is_offloaded = trainer.offload == "optimizer"
    advice = ["critic.freeze"] if whose else [] if facts.lora else ["lora or trainer.freeze"]
    if facts.device == "cuda" and not is_offloaded:
        advice.insert(0, "trainer.offload=optimizer")
    has_masters = facts.dtype != "float32" or is_offloaded
    masters = Part(
        f"{whose}float32 masters",
        facts.sharded(4 * num_elements(trained)) if has_masters else 0,
        " or ".join(advice),
    )
    if trainer.optimizer_bits == 32:
        advice.insert(0, "trainer.optimizer_bits=8")
    bits = trainer.optimizer_bits
    moments = Part(
        f"{whose}AdamW moments",
        facts.sharded(2 * sum(moment_bytes(n, shape, bits=bits) for n, shape in trained.items())),
        " or ".join(advice),
    )
    if is_offloaded:
        gradients = Part(f"{whose}gradients", facts.sharded(4 * num_elements(trained)))
        return _State([weights], [masters, moments, gradients])
    return _State([weights, masters, moments], [])


def _trained(facts: PlanFacts) -> Shapes:
    """The parameters that have a gradient."""
    shapes = decoder_shapes(facts.model)
    if facts.lora is not None:
        shapes = adapter_shapes(facts.lora)
    patterns = facts.trainer.freeze
    return {
        name: shape
        for name, shape in shapes.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _engine_processes(facts: PlanFacts, engine: EmbeddedConfig) -> list[Part]:
    """What engines in processes of their own take of the trainer's device: of a CPU's memory all,
    of a GPU's nothing."""
    if facts.device == "cuda":
        return []
    count = math.ceil(engine.replicas / facts.num_ranks)
    weights = num_elements(decoder_shapes(facts.model)) * facts.a
    own = [*_engine_state(facts, engine), *_sampling(facts, engine)]
    each = PROCESS_BYTES[facts.device] + weights + _total(own)
    advice = "fewer engine.replicas or a smaller engine.kv_cache_tokens"
    return [
        Part("engines in processes of their own", count * each, advice),
        Part("weights on their way to them", weights, "engine.replicas=0"),
    ]


def _engine_state(facts: PlanFacts, engine: EmbeddedConfig) -> Iterator[Part]:
    c = facts.model
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim
    num_pages = engine.kv_cache_tokens // engine.page_size + 1
    yield Part("KV cache", per_token * num_pages * engine.page_size * facts.a,
               "a smaller engine.kv_cache_tokens")  # fmt: skip
    if engine.resident_rows and facts.device == "cpu":
        width = 4 if facts.is_invariant else facts.a
        yield Part("KV cache in rows", per_token * engine.kv_cache_tokens * width,
                   "engine.resident_rows=false or a smaller engine.kv_cache_tokens")  # fmt: skip
    if facts.is_invariant and facts.device == "cpu":
        # In MKL's layout; a bfloat16 weight is also held in float32, which MKL reads beside it.
        width = 4 if facts.dtype == "float32" else 8
        shapes = decoder_shapes(c)
        head = "embedding" if c.tie_embeddings else "untied_head"
        num = sum(
            math.prod(shape)
            for name, shape in shapes.items()
            if len(shape) > 1
            and math.prod(shape[-2:]) >= PACKED_ELEMENTS
            and (name != "embedding" or name == head)
        )
        yield Part("packed weights of the contract", num * width, "contract=none")


# -- what a step takes -----------------------------------------------------------------------------


def _training(facts: PlanFacts) -> list[Part]:
    """What the worst moment of a forward and backward of the largest micro-batch adds."""
    c, T, trainer = facts.model, facts.T, facts.trainer
    fewer = "a smaller trainer.max_tokens_per_microbatch"
    frozen = "" if facts.lora is not None else "lora or trainer.freeze"
    blocks = [
        T * kept_per_token(c, layer, facts.a, is_invariant=facts.is_invariant)
        for layer in range(c.num_layers)
    ]
    at_work = max(_work_bytes(facts, layer) for layer in range(c.num_layers))
    kept, advice = sum(blocks), f"trainer.recompute=blocks or {fewer}"
    if trainer.recompute == "blocks":
        at_work += max(blocks)
        kept, advice = c.num_layers * T * c.hidden_size * facts.a, fewer
    ends = T * c.hidden_size * (4 + 3 * facts.a)  # the final norm, and what the head reads
    gradients = _gradient_bytes(facts)

    def at(gradients: int, kept: int, head: int, at_work: int) -> list[Part]:
        return [
            Part("gradients", gradients, frozen),
            Part("activations", kept, advice),
            Part("log-prob head", head),
            Part("one block at work", at_work, fewer),
        ]

    head, L = _head_bytes(facts), max(c.num_layers, 1)
    if facts.rank_update_tokens <= T * facts.sequence:
        # One micro-batch: gradients come as activations go, and go to the masters at the end.
        own = facts.sharded(num_elements(_trained(facts)) * facts.a)
        moments = [
            at(0, kept + ends, head, 0),
            at(own // L, kept, 0, at_work),
            at(own, kept // L, 0, at_work),
            at(gradients, 0, 0, 0),
        ]
    else:
        moments = [at(gradients, kept + ends, head, 0), at(gradients, kept, 0, at_work)]
    return max(moments, key=_total)


def _gradient_bytes(facts: PlanFacts) -> int:
    """Of parameters, in their dtype, and of masters where those are apart, in float32."""
    trained = _trained(facts)
    size = num_elements(trained)
    if facts.trainer.offload == "optimizer":
        return facts.sharded(size * facts.a)
    return facts.sharded(size * (4 if facts.dtype == "float32" else 4 + facts.a))


def kept_per_token(c: ModelConfig, layer: int, a: int, *, is_invariant: bool) -> int:
    """Bytes per token that autograd keeps of one block until its backward."""
    D, H, G, K = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
    norms = 2 * D * (4 + 2 * a)  # each: its input as float32, normed, scaled
    # The fused projection, which the values are a part of; queries and keys as turned; the output.
    attention = (3 * H + 3 * G) * K * a + 4 * H
    if c.has_qk_norm:
        attention += (H + G) * K * (a if a == 4 else a + 4)
    if a < 4:
        attention += 2 * K * a  # the rotations in the compute dtype
    if layer in c.routed_layers:
        A = c.num_active_experts
        # Routes and what the router made of them; the experts are computed again.
        return norms + attention + A * (8 + 2 * a) + c.num_experts * a
    F = c.dense_intermediate_size if c.is_moe else c.intermediate_size
    return norms + attention + (3 if is_invariant else 4) * F * a


def _work_bytes(facts: PlanFacts, layer: int) -> int:
    """The gradients within one block that are there at one time."""
    c, T, a = facts.model, facts.T, facts.a
    D, H, G, K = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
    attention = T * (4 * H + 4 * G) * K * 4
    if facts.is_invariant:
        attention += T * (H + 2 * G) * K * 4  # float32 copies, queries scaled
    stream = T * D * 4 * 2
    if layer in c.routed_layers:
        return stream + max(attention, _expert_chunk_bytes(facts, T))
    F = c.dense_intermediate_size if c.is_moe else c.intermediate_size
    return stream + max(attention, T * 4 * F * a)


def _expert_chunk_bytes(facts: PlanFacts, num_tokens: int) -> int:
    """Forward and backward of the experts on one chunk of tokens; all of a chunk may choose alike,
    which moves its pairs to one expert and leaves their number."""
    c = facts.model
    A, D, F = c.num_active_experts, c.hidden_size, c.intermediate_size
    rows = EXPERT_CHUNK_ROWS[facts.device] * c.num_experts // A
    chunk = min(num_tokens, max(LEAST_EXPERT_CHUNK, rows))
    return chunk * A * (3 * D + 8 * F) * max(facts.a, 4)


def _head_bytes(facts: PlanFacts) -> int:
    """Chunks of logits, and the gradients of the weight and of what it is multiplied with."""
    V, D, T = facts.model.vocab_size, facts.model.hidden_size, facts.T
    chunk = min(HEAD_CHUNK_BYTES, T * V * 4)
    is_trained = any(name in _trained(facts) for name in ("embedding", "untied_head"))
    return HEAD_CHUNKS[facts.device] * chunk + 2 * T * D * 4 + (V * D * 4 if is_trained else 0)


def _sampling(facts: PlanFacts, engine: EmbeddedConfig) -> list[Part]:
    """A step of the engine: the widest rows of its tokens, and the logits of what is sampled."""
    c, T, a = facts.model, engine.max_step_tokens, facts.a
    widths = [(c.num_heads + 2 * c.num_kv_heads) * c.head_dim * 8]
    for layer in range(c.num_layers):
        if layer in c.routed_layers:
            widths.append(_expert_chunk_bytes(facts, T) // max(T, 1))
        else:
            F = c.dense_intermediate_size if c.is_moe else c.intermediate_size
            widths.append(3 * F * a)
    logits = 4 * 4 * engine.max_num_sequences * c.vocab_size
    return [Part("a step of the engine", T * (max(widths) + 4 * c.hidden_size * 4) + logits,
                 "a smaller engine.max_step_tokens")]  # fmt: skip


def _total(parts: list[Part]) -> int:
    return sum(part.num_bytes for part in parts)


# -- what there is ---------------------------------------------------------------------------------


def available_bytes(root: Path = Path("/")) -> tuple[int, str] | None:
    """(bytes that this machine can give to the process, what says so): the least of MemAvailable
    and the limits of the control groups that it is in. None where the system tells neither."""
    found: list[tuple[int, str]] = []
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found.append((int(rest.split()[0]) * 1024, "MemAvailable of this machine"))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.strip().lstrip("/")
        for directory in (group, *group.parents):
            limit = "".join(_lines(directory / file)).strip()
            if limit.isdigit():
                found.append((int(limit), f"{file} of this control group"))
            if directory == base:
                break
    return min(found, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes < 10 * GIB else f"{num_bytes / GIB:.1f}"
