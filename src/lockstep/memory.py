"""The memory that a run will need, predicted before anything is loaded, and the memory available.

The peak is predicted from shapes and settings: the state of the run, plus a training step on rows
as long as the settings allow. tests/cpu/test_memory.py compares the bytes that autograd keeps.

# T tokens of a micro-batch  D model width  H heads  G key heads  K head width  F MLP width
# A active experts  V vocabulary  a bytes of the compute dtype
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from lockstep.engines.config import GPU_SHARE, EmbeddedConfig
from lockstep.errors import ConfigError
from lockstep.launch.gpu import Device, free_gpu_memory
from lockstep.models.config import ModelConfig
from lockstep.models.locate import locate_model
from lockstep.models.lora_config import LoraShape, adapter_shapes
from lockstep.models.shapes import Shapes, decoder_shapes, num_elements
from lockstep.ops.contract import CHUNK, DELTA_WORK_BYTES
from lockstep.run_config import Config, ModelChoice, SupervisedConfig
from lockstep.system import available_bytes
from lockstep.tables import tables_beside
from lockstep.training.config import TrainerConfig, frozen_names

MIB, GIB = 1 << 20, 1 << 30

PROCESS_BYTES: dict[Device, int] = {"cpu": 400 * MIB, "cuda": 600 * MIB}
"""Python, torch and its libraries after a first update (measured), or CUDA's context and the
workspaces of its libraries (a guess until it is measured)."""

# ops.head.CHUNK_BYTES and GPU_CHUNK_BYTES
HEAD_CHUNK_BYTES: dict[Device, int] = {"cpu": 128 * MIB, "cuda": 512 * MIB}
HEAD_CHUNKS: dict[Device, int] = {"cpu": 2, "cuda": 5}
"""Chunks of logits alive at once; those on a GPU are a guess until measured."""

EXPERT_CHUNK_ROWS: dict[Device, int] = {"cpu": 128, "cuda": 1024}  # models.experts.ROWS_PER_EXPERT
LEAST_EXPERT_CHUNK = 1024  # models.experts.LEAST_CHUNK

PROCESS = "process"
KV_CACHE = "KV cache"
STEP_PARTS = ("gradients", "activations", "log-prob head", "one block at work")
"""Parts that are in memory during an update, and not while the engine samples."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Parts = Mapping[str, int]
"""Use of memory -> bytes, largest first."""

LOWERED_BY: Mapping[str, str] = tables_beside(__file__)
"""Use of memory -> the settings that make it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The predicted peak of one process and its device."""

    device: Device
    parts: Parts
    """Everything in the device's memory at the peak."""
    num_ranks: int = 1
    host_parts: Parts = field(default_factory=dict[str, int])
    """Parts in the host's memory, with trainer.offload."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    def describe(self, available: int | None = None) -> str:
        """One line: the peak, and the parts that are at least a twentieth of it. available: bytes
        of the device, if known."""
        shown = {name: n for name, n in self.parts.items() if n * 20 >= self.num_bytes}
        rest = self.num_bytes - sum(shown.values())
        texts = [f"{name} {_gib(n)}" for name, n in shown.items()]
        texts += [f"others {_gib(rest)}"] if rest else []
        where = " of the GPU" if self.device == "cuda" else ""
        there = "" if available is None else f" ({_gib(available)} are there)"
        each = f" of each of {self.num_ranks} processes" if self.num_ranks > 1 else ""
        on_host = sum(self.host_parts.values())
        host = f"; {_gib(on_host)} GiB of the host" if on_host else ""
        peak = f"about {_gib(self.num_bytes)} GiB{where}{each} at the peak{there}"
        return f"{peak}: {', '.join(texts)}{host}"

    def cache_room(self, num_bytes: int, *, takes_turns: bool) -> int:
        """Bytes of the GPU left for keys and values, out of the free bytes. takes_turns: the cache
        is given back before each update."""
        away = (KV_CACHE, *STEP_PARTS) if takes_turns else (KV_CACHE,)
        others = sum(size for name, size in self.parts.items() if name not in away)
        return int(GPU_SHARE * num_bytes) - others

    def check(
        self, num_bytes: int, source: str, *, is_host: bool = False, ways: Callable[[], str] = str
    ) -> None:
        """Raises ConfigError if the plan does not fit into `num_bytes` of the device, or its parts
        in the host's memory into that much of it. source: the origin of the number. ways: a
        sentence that names the settings that would fit."""
        parts = self.host_parts if is_host else self.parts
        if sum(parts.values()) <= num_bytes:
            return
        who = "this run" if self.num_ranks == 1 else f"each of {self.num_ranks} processes"
        largest = [
            f"{name} {_gib(n)} GiB" + (f" (less with {less})" if less else "")
            for name, n in parts.items()
            if name != PROCESS
            for less in [LOWERED_BY.get(name, "")]
        ]
        raise ConfigError(
            f"{who} is predicted to need {_gib(sum(parts.values()))} GiB"
            f"{' of the host' if is_host else ''} at its peak, and there are {_gib(num_bytes)} GiB "
            f"({source}). The largest parts: {'; '.join(largest[:3])}. {ways()} If the prediction "
            "is wrong for you, memory_limit_gib=N sets the limit."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """The inputs of a prediction."""

    model: ModelConfig
    dtype: str
    device: Device
    trainer: TrainerConfig
    max_update_tokens: int = 0
    """Tokens of all rows of one update."""
    engine: EmbeddedConfig | None = None
    num_sleeping: int = 0
    """Engines of other kinds that sleep on this GPU during an update."""
    has_reference: bool = False
    teachers: tuple[ModelConfig, ...] = ()
    """Teachers in this process, each of them whole."""
    compares_vocabulary: bool = False
    """True if an update compares its own distribution with a teacher's (distill.signal=full)."""
    lora: LoraShape | None = None
    num_adapters: int = 1
    """Policies over the model, each with an adapter of this shape."""
    critic: ModelConfig | None = None
    critic_freeze: tuple[str, ...] = ()
    is_invariant: bool = False
    num_ranks: int = 1
    sequence: int = 1
    """Ranks that share the tokens of a micro-batch."""
    is_sharded: bool = False
    """True if weights, gradients and optimizer state are divided over the ranks."""

    @property
    def a(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def T(self) -> int:
        """This rank's part of the largest micro-batch."""
        # Tokens of the rows that this rank trains on, alone or with others.
        own = math.ceil(self.max_update_tokens * self.sequence / self.num_ranks)
        return math.ceil(min(self.trainer.max_tokens_per_microbatch, own) / self.sequence)

    def sharded(self, num_bytes: int) -> int:
        return math.ceil(num_bytes / self.num_ranks) if self.is_sharded else num_bytes

    def weight_bytes(self, shapes: Shapes) -> int:
        """Includes, with sharding, the blocks that are gathered at one time: a block and the next,
        each with its gradient, and the parameters outside of blocks."""
        size = self.sharded(num_elements(shapes) * self.a)
        if not self.is_sharded:
            return size
        outside = {n: shape for n, shape in shapes.items() if not n.startswith("layers.")}
        blocks = [
            num_elements({n: s for n, s in shapes.items() if n.startswith(f"layers.{layer}.")})
            for layer in range(self.model.num_layers)
        ]
        return size + (num_elements(outside) + 3 * max(blocks)) * self.a

    def adapters(self) -> Shapes:
        of_one = adapter_shapes(self.lora) if self.lora else {}
        return {
            f"{name}#{number}" if number else name: shape
            for number in range(self.num_adapters)
            for name, shape in of_one.items()
        }

    def trained(self) -> Shapes:
        """The parameters that have a gradient."""
        shapes = decoder_shapes(self.model)
        trainable = self.adapters() if self.lora else shapes
        return _unfrozen(trainable, self.trainer.freeze, "trainer.freeze", others=shapes)


def state_facts(config: ModelChoice, model: ModelConfig, lora: LoraShape | None) -> PlanFacts:
    """The inputs for what stays in memory in every kind of run. lora: the shape of `config.lora` on
    this model."""
    return PlanFacts(
        model=model,
        dtype=config.compute_dtype,
        device=config.expected_device,
        trainer=config.trainer,
        lora=lora,
        num_adapters=1 + len(config.own_seats) if isinstance(config, Config) else 1,
        num_ranks=config.num_processes,
        sequence=config.parallel.sequence,
        is_sharded=config.parallel.shard and config.num_processes > 1,
    )


def predict_memory(
    config: ModelChoice, model: ModelConfig, lora: LoraShape | None, *, is_invariant: bool
) -> MemoryPlan:
    """The predicted peak of a run. lora: as for `state_facts`. is_invariant: whether the contract
    holds, whose packed weights take memory."""
    facts = state_facts(config, model, lora)
    if isinstance(config, SupervisedConfig):
        facts = replace(facts, max_update_tokens=config.sft.rows_per_step * config.max_tokens)
    if isinstance(config, Config):
        critic = None
        if config.advantage.needs_critic:
            name = config.critic.model
            critic = ModelConfig.from_directory(locate_model(name)) if name else model
        total = config.groups_per_step * config.group_size * config.max_tokens
        engine = config.engine if isinstance(config.engine, EmbeddedConfig) else None
        if engine is not None:  # an engine without sizes is planned as small as it can be
            engine = engine.sized(None if facts.device == "cpu" else 0, longest=config.max_tokens)
        is_asleep = engine is None and facts.device == "cuda" and config.engine.share_device
        teachers = [] if config.distill is None else config.distill.teachers.values()
        facts = replace(
            facts,
            engine=engine,
            num_sleeping=math.ceil(config.engine.num_workers / facts.num_ranks) if is_asleep else 0,
            has_reference=config.objective.reads_reference_logprobs,
            teachers=tuple(
                ModelConfig.from_directory(locate_model(teacher.model))
                for teacher in teachers
                if not teacher.engine
            ),
            compares_vocabulary=config.distill is not None and config.distill.signal == "full",
            critic=critic,
            critic_freeze=config.critic.freeze,
            is_invariant=is_invariant,
            max_update_tokens=max(total // config.trainer.updates_per_batch, config.max_tokens),
        )
    return plan_memory(facts)


def plan_memory(facts: PlanFacts) -> MemoryPlan:
    """The prediction itself."""
    shapes, engine = decoder_shapes(facts.model), facts.engine
    device, host = {PROCESS: PROCESS_BYTES[facts.device]}, dict[str, int]()
    # The table of rotations: two numbers of head width per position, float32.
    rotations = 8 * facts.model.max_positions * facts.model.head_dim
    device["weights"] = facts.weight_bytes(shapes | facts.adapters()) + rotations
    _add_optimizer(facts, facts.trained(), "", device, host)
    if facts.critic is not None:
        critic = decoder_shapes(replace(facts.critic, tie_embeddings=True))
        device["critic's weights"] = facts.weight_bytes(critic)
        head = {"value_head": (1, facts.critic.hidden_size)}
        whole_critic = head | {f"body.{name}": shape for name, shape in critic.items()}
        trained = _unfrozen(whole_critic, facts.critic_freeze, "critic.freeze")
        trained.pop("value_head", None)  # too small to count
        _add_optimizer(facts, trained, "critic's ", device, host)
    whole = num_elements(shapes) * facts.a
    if facts.has_reference and facts.lora is None:
        device["reference policy"] = facts.sharded(whole)
    device["teachers"] = facts.a * sum(num_elements(decoder_shapes(m)) for m in facts.teachers)
    if engine is not None and (
        engine.replicas == 0 or engine.share_device or facts.device == "cpu"
    ):
        device |= _engine(facts, engine, whole)
    device["engines that sleep"] = facts.num_sleeping * PROCESS_BYTES[facts.device]
    device |= _training(facts)
    return MemoryPlan(
        device=facts.device,
        num_ranks=facts.num_ranks,
        parts=_by_size(device),
        host_parts=_by_size(host),
    )


def _by_size(parts: Parts) -> Parts:
    found = sorted(parts.items(), key=lambda part: -part[1])
    return {name: num_bytes for name, num_bytes in found if num_bytes}


# -- the parts that stay for the whole run ---------------------------------------------------------


def _add_optimizer(
    facts: PlanFacts, trained: Shapes, whose: str, device: dict[str, int], host: dict[str, int]
) -> None:
    """Adds masters and moments of these parameters, and with trainer.offload their gradients."""
    is_offloaded = facts.trainer.offload == "optimizer"
    size = facts.sharded(4 * num_elements(trained))
    parts = host if is_offloaded else device
    if facts.dtype != "float32" or is_offloaded:
        parts[f"{whose}float32 masters"] = size
    # A byte each, and a scale of four for 256 of them.
    packed = 2 * (size // 4 + size // 256)
    parts[f"{whose}AdamW moments"] = packed if facts.trainer.moments == "float8" else 2 * size
    if is_offloaded:
        parts[f"{whose}gradients"] = size


def _unfrozen(
    shapes: Shapes, patterns: tuple[str, ...], setting: str, *, others: Iterable[str] = ()
) -> Shapes:
    """others: names of parameters that are not trained anyway."""
    names = list(dict.fromkeys([*others, *shapes]))
    frozen = frozen_names(names, patterns, trainable=shapes, setting=setting)
    return {name: shape for name, shape in shapes.items() if name not in frozen}


def _engine(facts: PlanFacts, engine: EmbeddedConfig, weights: int) -> Parts:
    """The embedded engine in this process, or its processes on this device."""
    c = facts.model
    per_token = c.cached_per_token
    num_pages = engine.kv_cache_tokens // engine.page_size + 1
    cache = per_token * num_pages * engine.page_size * facts.a
    if engine.resident_rows and facts.device == "cpu":
        cache += per_token * engine.kv_cache_tokens * facts.a
    if c.linear is not None:
        count = engine.max_num_sequences
        kept = count if engine.prefix_cache else 0
        cache += c.linear.cache_bytes(num_running=count, num_kept=kept, item=facts.a)
    packed = 0
    if facts.device == "cpu" and (facts.is_invariant or facts.dtype != "float16"):
        # A copy in oneDNN's layout; under the contract in float32, where the CPU has no bfloat16.
        packed = num_elements(decoder_shapes(c)) * (4 if facts.is_invariant else facts.a)
    if engine.share_device:
        cache = 0  # it is given back before an update
    if engine.replicas:
        each = PROCESS_BYTES[facts.device] + weights + cache + packed
        count = math.ceil(engine.replicas / facts.num_ranks)
        in_transit = weights if facts.device == "cpu" else 0
        return {"engines in processes of their own": count * each + in_transit}
    return {
        KV_CACHE: cache,
        "packed weights": packed,
        "the engine's copy of the weights": weights if facts.is_sharded else 0,
    }


# -- a step ----------------------------------------------------------------------------------------


def _training(facts: PlanFacts) -> Parts:
    """A forward and backward of the largest micro-batch: the activations, and the larger of the
    head and one block at work."""
    c, T, trained = facts.model, facts.T, facts.trained()
    layers = range(c.num_layers)
    how = {"is_invariant": facts.is_invariant, "device": facts.device}
    blocks = [T * kept_per_token(c, i, facts.a, **how) for i in layers]
    at_work, kept = max(_work_bytes(facts, layer) for layer in layers), sum(blocks)
    if facts.trainer.recompute == "blocks":
        at_work += max(blocks)
        kept = c.num_layers * T * c.hidden_size * facts.a
    per_weight = 4 if facts.dtype == "float32" else 4 + facts.a  # in the master, and its own
    if facts.trainer.offload == "optimizer":
        per_weight = facts.a
    room, logits = HEAD_CHUNK_BYTES[facts.device], T * c.num_rows * 4
    head = HEAD_CHUNKS[facts.device] * min(room, logits)
    num_gradients = 1
    if facts.compares_vocabulary:  # log-probs of both sides, and products of theirs
        head, num_gradients = max(head, min(room, 5 * logits)), 2
        for teacher in facts.teachers:
            of_teacher = replace(facts, model=teacher)
            at_work = max(at_work, *(_work_bytes(of_teacher, i) for i in range(teacher.num_layers)))
    head += 2 * T * c.hidden_size * 4
    if trained.keys() & {"embedding", "untied_head"}:
        head += num_gradients * c.num_rows * c.hidden_size * 4
    return {
        "gradients": facts.sharded(num_elements(trained) * per_weight),
        "activations": kept,
        "log-prob head" if head > at_work else "one block at work": max(head, at_work),
    }


def kept_per_token(
    c: ModelConfig, layer: int, a: int, *, is_invariant: bool, device: Device = "cpu"
) -> int:
    """Bytes per token that autograd keeps of one block until its backward."""
    D, H, G, K = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
    num_norms = 4 if c.norms == "both" else 2
    # Each: its input, as float32 if its weight is, and its result; torch's on a GPU, which
    # `ops.base.RmsNorm` does not replace, also what it normed.
    wide, between = a if c.norm_weights == "plain" else 4, 4 * (device == "cuda")
    norms = num_norms * D * (wide + a + between)
    # The fused projection, which contains the values; queries and keys as turned; the output.
    attention = (3 * H + 3 * G) * K * a + 4 * H
    if c.has_qk_norm:
        attention += (H + G) * K * (between + wide * (wide > a or a < between))
    if a < 4:
        attention += 2 * K * a  # the rotations in the compute dtype
    if c.has_output_gate:
        attention += 8 * H * K  # the gate's sigmoid, and the scaled outputs
    if (at := c.latent) is not None:
        if is_invariant:
            # Queries and what attention returns, before and after their products by head.
            by_head = at.nope_dim + 2 * c.key_dim + at.kv_rank + at.value_dim
        else:  # queries, keys and values, and what attention returns
            by_head = 4 * max(K, at.value_dim) + at.value_dim
        attention = H * (by_head * a + 4) + (at.query_rank + at.kv_rank) * (wide + a + between)
    if layer not in c.attention_layers:
        attention = _linear_kept(c, a)
    if layer in c.routed_layers:
        # Routes and the router's outputs; the experts are computed again.
        routes = c.num_active_experts * (8 + 2 * a) + c.num_experts * a
        return norms + attention + routes + 3 * c.shared_width * a
    return norms + attention + 3 * _mlp_width(c) * a


def _linear_kept(c: ModelConfig, a: int) -> int:
    """Bytes per token that a layer of linear attention keeps."""
    at = c.linear
    assert at is not None, "the layer has one"
    keys, values = 2 * at.key_heads * at.key_dim, at.value_width
    # Inputs of the convolution and its output before and in silu, all as float32.
    conv = at.channels * (24 + (4 if a == 4 else 0))
    # Queries and keys of unit length, cut into chunks; values, writes and states.
    rule = keys * (4 if a == 4 else 8) + 8 * values + 4 * at.state_size // CHUNK
    gated = values * (3 if a == 4 else 4) * 4
    return conv + rule + gated + values * a + 40 * at.value_heads


def _work_bytes(facts: PlanFacts, layer: int) -> int:
    """The gradients within one block that exist at one time."""
    c, T = facts.model, facts.T
    H, G, K = c.num_heads, c.num_kv_heads, c.key_dim
    attention = T * (4 * H + 4 * G) * K * 4
    if facts.is_invariant:
        attention += T * (H + 2 * G) * K * 4  # float32 copies, queries scaled
    if layer not in c.attention_layers:
        assert c.linear is not None, "the layer has one"
        # Inputs of the convolution and of the rule, and the gradients of both.
        attention = T * 8 * c.linear.channels * 4 + DELTA_WORK_BYTES[facts.device]
    if layer in c.routed_layers:
        # Forward and backward of the experts on one chunk of tokens.
        rows = EXPERT_CHUNK_ROWS[facts.device] * c.num_experts // c.num_active_experts
        pairs = min(T, max(LEAST_EXPERT_CHUNK, rows)) * c.num_active_experts
        mlp = pairs * (3 * c.hidden_size + 8 * c.intermediate_size) * max(facts.a, 4)
    else:
        mlp = T * 4 * _mlp_width(c) * facts.a
    return T * c.hidden_size * 4 * 2 + max(attention, mlp)


def _mlp_width(c: ModelConfig) -> int:
    return c.dense_intermediate_size if c.is_moe else c.intermediate_size


# -- available memory ------------------------------------------------------------------------------


def memory_limit(config: ModelChoice) -> tuple[int, str] | None:
    """(bytes that the device has for this run, their source); None if they are not known."""
    if config.memory_limit_gib:
        return int(config.memory_limit_gib * GIB), f"memory_limit_gib={config.memory_limit_gib:g}"
    return host_memory(config) if config.expected_device == "cpu" else free_gpu_memory()


def host_memory(config: ModelChoice) -> tuple[int, str] | None:
    """(bytes of this machine's memory for one of the run's processes on it, their source)."""
    found = available_bytes()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or config.parallel.processes or 1
    if found is None or here == 1:
        return found
    return found[0] // here, f"{found[1]}, divided by {here} processes"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes < 10 * GIB else f"{num_bytes / GIB:.1f}"
