"""From settings to the parts of a run: what is checked first, and what is loaded then.

`check_config` finds what can be known without a model, in well under two seconds and without torch.
`build` loads the model and wires engine, trainer and renderer around it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.agent.loop import truncation_notice
from lockstep.config import from_dict, tag
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    RunError,
)
from lockstep.memory import GIB, Device, MemoryPlan, available_bytes, plan_run
from lockstep.models import peft_format
from lockstep.models.config import Architecture, FallbackConfig, ModelConfig
from lockstep.models.locate import locate_model
from lockstep.models.lora_config import LoraShape
from lockstep.ops.contract import TRUE_ON_POLICY, Fingerprint, why_not_same
from lockstep.renderers.base import Renderer
from lockstep.renderers.config import ChatMLConfig, HarmonyConfig, RendererConfig
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.report.document import Vocabulary
from lockstep.run_config import Config, ModelChoice
from lockstep.store.run import Run, load_run
from lockstep.training.config import RoutingReplay

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.engines.base import Engine
    from lockstep.launch.ranks import Ranks
    from lockstep.models.decoder import Decoder
    from lockstep.training.critic import Critic
    from lockstep.training.trainer import Trainer

RENDERER_FILE = "renderer.json"

DEFAULT_RENDERERS: dict[Architecture, Callable[[], RendererConfig]] = {
    "gpt_oss": HarmonyConfig,
    "qwen2": partial(ChatMLConfig, variant="qwen2.5"),
    "qwen3": ChatMLConfig,
    "qwen3_moe": ChatMLConfig,
}
"""The formats of architectures that have one of ours."""


@dataclass(frozen=True, slots=True)
class Foundation:
    """What a run stands on, known without torch."""

    directory: Path
    model: ModelConfig | FallbackConfig
    renderer_config: RendererConfig
    renderer: Renderer
    lora: LoraShape | None = None
    """The adapter that is trained; None trains the model itself."""


@dataclass(slots=True)
class Parts:
    """The loaded parts of one run, in one process."""

    foundation: Foundation
    model: Decoder
    """What the engine samples from: the trained one itself, unless that is sharded."""
    engine: Engine
    trainer: Trainer
    numerics: Numerics
    critic: Critic | None = None
    """Only where the advantage is made of its values."""

    @property
    def renderer(self) -> Renderer:
        return self.foundation.renderer


@dataclass(frozen=True, slots=True)
class Numerics:
    """What was made of the setting `contract`."""

    fingerprint: Fingerprint
    """Of the trainer's side."""
    is_kept: bool
    """The contract true-on-policy holds."""
    line: str
    """For a person: what is promised, or why nothing is."""


# -- before anything is loaded --------------------------------------------------------------------


def check_config(config: Config, *, is_training: bool = True) -> Foundation:
    """Everything that can be wrong and be known without loading a model. Returns what it read.

    is_training: False leaves out what training takes of the memory.
    Raises ConfigError, CheckpointError, RendererError or DataError, with both values and the fix.
    """
    foundation = lay_foundation(config)
    if config.fallback:
        _check_fallback(config)
    elif config.fault is not None and isinstance(foundation.model, ModelConfig):
        config.fault.check(
            model=foundation.model, name=config.model, engine=config.engine, dtype=config.dtype
        )
    if config.contract == TRUE_ON_POLICY and (reason := _why_no_contract(config)):
        raise ConfigError(f"contract={TRUE_ON_POLICY} cannot be kept: {reason}.")
    if config.correction.behaviour == "averaged" and config.agent.is_truncated:
        raise ConfigError(
            f"correction.behaviour=averaged with agent.top_p={config.agent.top_p} "
            f"agent.top_k={config.agent.top_k}: an engine cannot re-score the distribution that "
            "these leave. Set agent.top_p=1 agent.top_k=0, or correction.behaviour=rollout."
        )
    if config.critic.model:
        check_critic(config, foundation)
    if isinstance(foundation.model, ModelConfig):
        _check_replay(config, foundation.model)
    check_parallel(config, foundation.model)
    if is_training:
        check_memory(config, foundation, expected_device(config))
    config.task.check()
    first = next(config.task.tasks(split="train", seed=config.seed), None)
    if first is None:
        raise DataError("the task source has no training task.")
    next(config.task.tasks(split="eval", seed=config.seed), None)
    _check_first_prompt(config, foundation, first)
    return foundation


def _check_replay(config: Config, model: ModelConfig) -> None:
    """Raises ConfigError if there are no routes to replay, or no routers to train."""
    if config.trainer.router_aux_coef and not model.routed_layers:
        raise ConfigError(
            f"trainer.router_aux_coef={config.trainer.router_aux_coef} needs a model with routers; "
            f"model={config.model} ({model.architecture}) has none to train. Leave it at 0."
        )
    replay = config.trainer.routing_replay
    if replay != "none" and not model.routed_layers:
        raise ConfigError(
            f"trainer.routing_replay={replay} needs a model with routers; model={config.model} "
            f"({model.architecture}) has none to hand routes to. Set trainer.routing_replay=none."
        )
    if replay == "rollout" and not config.engine.can_record_routes:
        raise ConfigError(
            f"trainer.routing_replay=rollout: engine={tag(type(config.engine))} does not hand out "
            "the experts that its tokens went to. Use engine=embedded, or "
            "trainer.routing_replay=recompute."
        )


def check_parallel(config: ModelChoice, model: ModelConfig | FallbackConfig) -> None:
    """Raises ConfigError if the work cannot be divided over the processes that are asked for."""
    world = config.parallel.num_processes(os.environ)
    if isinstance(model, ModelConfig):
        config.parallel.check_heads(num_heads=model.num_heads, num_kv_heads=model.num_kv_heads)
    if world == 1:
        return
    alone = {"fallback=true": config.fallback}
    if isinstance(config, Config):
        alone["fault"] = config.fault is not None
    else:
        alone["lockstep sft"] = True
    for what, is_asked in alone.items():
        if is_asked:
            raise ConfigError(
                f"{what} works in one process, and this run has {world}. Leave parallel.processes "
                "at 0 and start it without torchrun."
            )


def check_memory(config: ModelChoice, foundation: Foundation, device: Device) -> None:
    """Raises ConfigError if the run's predicted peak is more than there is: `memory_limit_gib`, or
    what the device has free. That of a GPU is known once torch is there."""
    config.trainer.check_device(device)
    plan = memory_plan(config, foundation, device=device)
    if plan is None:
        return
    limit = _memory_limit(config, device)
    if limit is not None:
        plan.check(*limit)
    host = _host_memory(config)
    if plan.host_parts and host is not None:
        plan.check_host(*host)


def _memory_limit(config: ModelChoice, device: Device) -> tuple[int, str] | None:
    """(bytes of the device, what says so); None if that is not known."""
    if config.memory_limit_gib:
        return int(config.memory_limit_gib * GIB), f"memory_limit_gib={config.memory_limit_gib:g}"
    if device == "cpu":
        return _host_memory(config)
    if "torch" not in sys.modules:  # a dry run, which does not start CUDA
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info()[0], "free on the GPU"


def _host_memory(config: ModelChoice) -> tuple[int, str] | None:
    """What this machine has for one of the run's processes on it."""
    found = available_bytes()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or config.parallel.processes or 1
    if found is None or here == 1:
        return found
    return found[0] // here, f"{found[1]}, divided by {here} processes"


def memory_plan(
    config: ModelChoice,
    foundation: Foundation,
    *,
    device: Device,
    numerics: Numerics | None = None,
) -> MemoryPlan | None:
    """The peak that is predicted; None for a model that transformers runs, of which too little is
    known. numerics: None before a model is loaded."""
    if isinstance(foundation.model, FallbackConfig):
        return None
    critic, is_invariant = None, False
    if isinstance(config, Config):
        if config.advantage.needs_critic:
            critic = foundation.model
            if config.critic.model:
                critic = ModelConfig.from_directory(locate_model(config.critic.model))
        may_be = config.contract != "none" and not _why_no_contract(config)
        is_invariant = may_be if numerics is None else numerics.is_kept
    return plan_run(
        config, foundation.model, device=device, lora=foundation.lora, critic=critic,
        is_invariant=is_invariant,
    )  # fmt: skip


def describe_memory(
    config: ModelChoice, foundation: Foundation, *, numerics: Numerics | None = None
) -> str:
    """The plan's line about memory; before a model is loaded also with what there is."""
    device = expected_device(config)
    found = memory_plan(config, foundation, device=device, numerics=numerics)
    if found is None:
        return "not predicted: transformers computes the model"
    limit = _memory_limit(config, device) if numerics is None else None
    return found.describe(None if limit is None else limit[0])


def expected_device(config: ModelChoice) -> Device:
    """What `device=auto` will be, as far as can be seen without torch."""
    if config.device == "auto":
        return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    return config.device


def lay_foundation(config: ModelChoice) -> Foundation:
    """Model config, tokenizer, renderer and adapter of a run, checked against each other."""
    directory = locate_model(config.model)
    kind = FallbackConfig if config.fallback else ModelConfig
    model = kind.from_directory(directory)
    if config.max_tokens > model.max_positions:
        raise ConfigError(
            f"max_tokens={config.max_tokens} is more than the {model.max_positions} positions that "
            f"model={config.model} was made for."
        )
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"model={config.model}: {directory} has no tokenizer.json.")
    tokenizer = Tokenizer.from_file(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"model={config.model}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the "
            f"model's vocabulary ends at {model.vocab_size - 1}. They belong to different models."
        )
    chosen = config.renderer or renderer_of(directory, model)
    lora = None
    if config.lora is not None and isinstance(model, ModelConfig):
        lora = peft_format.resolve_shape(config.lora, model, directory, name=config.model)
    return Foundation(directory, model, chosen, make_renderer(chosen, tokenizer), lora)


def check_critic(config: Config, foundation: Foundation) -> None:
    """Raises ConfigError if `critic.model` cannot read what the policy writes."""
    try:
        directory = locate_model(config.critic.model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model=", "critic.model=", 1)) from None
    model = ModelConfig.from_directory(directory)
    where = f"critic.model={config.critic.model}"
    if config.max_tokens > model.max_positions:
        raise ConfigError(
            f"max_tokens={config.max_tokens} is more than the {model.max_positions} positions that "
            f"{where} was made for."
        )
    known = foundation.renderer.tokenizer
    if (directory / "tokenizer.json").is_file():
        theirs = Tokenizer.from_file(directory)
        if theirs.all_token_bytes() != known.all_token_bytes():
            raise ConfigError(
                f"{where} has another tokenizer than model={config.model}: it would read other "
                "text than was written. Leave critic.model empty to start from the policy."
            )
    if known.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{where} has a vocabulary of {model.vocab_size}, and the policy's tokenizer ids up to "
            f"{known.vocab_size - 1}. Leave critic.model empty to start from the policy."
        )


def _check_fallback(config: Config) -> None:
    """Raises ConfigError that lists what a model which transformers runs cannot do of what is asked
    for: before it is loaded, and before transformers is imported."""
    problems = [
        text
        for is_asked, text in (
            (
                isinstance(config.engine, EmbeddedConfig),
                "engine=embedded runs the decoder alone; choose an engine outside of this process",
            ),
            (
                config.contract == TRUE_ON_POLICY,
                f"contract={TRUE_ON_POLICY} is a promise of the decoder's ops; set contract=none",
            ),
            (
                config.advantage.needs_critic and not config.critic.model,
                "a critic is a decoder: name one with critic.model",
            ),
            (
                config.fault is not None,
                "faults are injected into the decoder and its engine; leave fault out",
            ),
            (
                config.trainer.routing_replay != "none" or config.trainer.router_aux_coef > 0,
                "routers are known of the decoder alone; set trainer.routing_replay=none "
                "trainer.router_aux_coef=0",
            ),
        )
        if is_asked
    ]
    if problems:
        raise ConfigError(f"fallback=true: {'; '.join(problems)}.")
    if find_spec("transformers") is None:
        raise MissingExtraError.of("transformers", extra="transformers", needed_for="fallback=true")


def renderer_of(directory: Path, model: ModelConfig | FallbackConfig) -> RendererConfig:
    """The renderer that a model was trained with: its own file, or its architecture's format."""
    path = directory / RENDERER_FILE
    if path.is_file():
        try:
            return from_dict(_RendererFile, json.loads(path.read_text())).renderer
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
    default = None
    if isinstance(model, ModelConfig):
        default = DEFAULT_RENDERERS.get(model.architecture)
    if default is None:
        raise ConfigError(
            f"no renderer is known for a model of {model.architecture}. Set renderer=KIND, or keep "
            f"{RENDERER_FILE} beside the model's config.json; a format of your own is a renderer "
            "of your own (docs/renderers.md)."
        )
    return default()


def write_renderer(directory: Path, renderer: RendererConfig) -> None:
    """Keeps `renderer` beside a checkpoint, for `renderer_of`."""
    from lockstep.config import dumps

    (directory / RENDERER_FILE).write_text(dumps(_RendererFile(renderer=renderer)))


@dataclass(frozen=True, kw_only=True)
class _RendererFile:
    renderer: RendererConfig


def _check_first_prompt(config: Config, foundation: Foundation, task: Any) -> None:
    """Renders the first task's prompt: a format that cannot write it, or a budget that cannot hold
    it, fails here and not in every episode."""
    import asyncio

    async def first_prompt() -> int:
        environment = config.task.environment(task, config.agent)
        try:
            messages = await environment.reset()
            return len(foundation.renderer.render(messages, environment.tools))
        finally:
            await environment.close()

    size = asyncio.run(first_prompt())
    if size + 1 >= config.max_tokens:
        raise ConfigError(
            f"the prompt of task {task.id} has {size} tokens and max_tokens={config.max_tokens}: "
            f"no row fits. Raise max_tokens (the model allows {foundation.model.max_positions})."
        )


def plan(
    config: Config,
    *,
    has_support: bool = True,
    numerics: Numerics | None = None,
    num_trained: tuple[int, int] | None = None,
) -> list[str]:
    """What a run will do, in a few lines: printed by --dry-run and at the start.

    has_support: the engine can record what top-p and top-k kept, as far as is known. numerics: what
    was made of the setting `contract`; None before a model is loaded. num_trained: parameters that
    are trained, of all; None before a model is loaded.
    """
    foundation = lay_foundation(config)
    model, episodes = foundation.model, config.groups_per_step * config.group_size
    notice = truncation_notice(config.agent, has_support=has_support)
    replay = config.trainer.routing_replay
    experts = f", {model.num_experts} experts, {model.num_active_experts} active"
    lines = [
        f"model      {config.model}: {model.architecture}, {model.num_layers} layers of width "
        f"{model.hidden_size}{experts if model.is_moe else ''}, {config.dtype}",
        *_trained_plan(config, foundation, num_trained),
        f"sampler    {tag(type(config.engine))} engine; {foundation.renderer.name} tokens, token "
        "in, token out",
        *([f"draws      {notice}"] if notice else []),
        f"step       {config.groups_per_step} tasks x {config.group_size} episodes = {episodes} "
        f"trajectories of at most {config.max_tokens} tokens; {config.steps} steps",
        f"update     {_update_plan(config, is_kept=numerics is not None and numerics.is_kept)}",
        *([f"critic     {_critic_plan(config)}"] if config.advantage.needs_critic else []),
        *([f"routing    {_REPLAY_PLAN[replay]}"] if replay != "none" else []),
        *_parallel_plan(config),
        f"numerics   {_contract_plan(config) if numerics is None else numerics.line}",
        f"memory     {describe_memory(config, foundation, numerics=numerics)}",
        *(f"warning    {text}" for text in config.correction.warnings()),
    ]
    if config.fault is not None:
        lines.append(f"fault      {config.fault.describe()}")
    return lines


def _parallel_plan(config: Config) -> list[str]:
    """How the work is divided, where it is."""
    parallel = config.parallel
    world = parallel.num_processes(os.environ)
    if world == 1:
        return []
    parts = [f"{world} processes"]
    if world > parallel.sequence:
        parts.append(f"rows divided by {world // parallel.sequence}")
    if parallel.sequence > 1:
        parts.append(f"tokens of each micro-batch by {parallel.sequence}")
    held = "sharded, with a whole copy for the engine" if parallel.shard else "whole on each"
    return [f"parallel   {', '.join(parts)}; weights and optimizer {held}"]


def _trained_plan(
    config: Config, foundation: Foundation, num_trained: tuple[int, int] | None
) -> list[str]:
    """What of the model is trained, and how many numbers that is, where it is known."""
    what = "the whole model" if foundation.lora is None else f"LoRA, {foundation.lora.describe()}"
    if config.trainer.freeze:
        what += f"; frozen: {', '.join(config.trainer.freeze)}"
    if num_trained is None:
        is_plain = foundation.lora is None and not config.trainer.freeze
        return [] if is_plain else [f"trained    {what}"]
    trained, total = num_trained
    return [f"trained    {what}; {trained:,} of {total:,} parameters ({trained / total:.2%})"]


_REPLAY_PLAN: dict[RoutingReplay, str] = {
    "rollout": "the sampler's experts are replayed in every forward of the trainer",
    "recompute": "the experts of the forward before the updates are replayed in them",
}


def _contract_plan(config: Config) -> str:
    """What `choose_numerics` will do, as far as is known without a model."""
    reason = "contract=none" if config.contract == "none" else _why_no_contract(config)
    if reason:
        return f"stock ops: {reason}"
    return f"contract={config.contract}: the self-test decides, on the model's own shapes"


def _update_plan(config: Config, *, is_kept: bool) -> str:
    """One pass or two, and what each token's ratio and weight are of."""
    correction, num_updates = config.correction, config.trainer.updates_per_batch
    by = f"ratio to {correction.anchor}" if config.objective.has_ratio else "no ratio"
    if correction.level != "none":
        by += f", {correction.level} weights by {correction.bound}"
        by += ", normalised over the batch" if correction.is_normalized else ""
    if correction.reject:
        by += f", {len(correction.reject)} rejection rules"
    if correction.behaviour == "averaged":
        by += f", behaviour averaged over {correction.rescorings} re-scorings"
    is_recomputing = config.trainer.routing_replay == "recompute"
    is_two_pass = (
        correction.needs_forward(num_updates=num_updates) or num_updates > 1 or is_recomputing
    )
    if is_two_pass and is_kept and not is_recomputing:
        return (
            "recorded log-probs stand for the trainer's: no forward before the "
            f"{num_updates} update(s); {by}"
        )
    if is_two_pass:
        return f"two-pass: a forward over the whole batch, then {num_updates} update(s); {by}"
    return f"one-pass: measured inside the training forward, before the optimizer moves; {by}"


def _critic_plan(config: Config) -> str:
    """What the critic starts from, and how it learns."""
    critic = config.critic
    settings = " ".join(
        f"{f.name}={value}"
        for f in fields(config.advantage)
        if (value := getattr(config.advantage, f.name)) is not None
    )
    line = (
        f"{tag(type(config.advantage))} {settings}; from {critic.model or config.model}, "
        f"{critic.updates_per_batch} update(s) of all rows, lr {critic.lr:g}"
    )
    if critic.steps_before_policy:
        line += f"; alone for {critic.steps_before_policy} steps"
    return line


# -- loading --------------------------------------------------------------------------------------


def build(
    config: Config,
    foundation: Foundation,
    *,
    weights: Path | None = None,
    is_training: bool = True,
    ranks: Ranks | None = None,
) -> Parts:
    """Loads the model (from `weights`, or the config's own) and wires the parts around it.

    ranks: the processes that train together, each with an engine of its own; where the trained
    model is sharded, `Parts.model` is the whole copy that the engine samples from. is_training:
    False leaves out the models that only training needs, reference and critic.
    """
    from lockstep.engines.registry import check_capabilities, make_engine
    from lockstep.ops.invariant import ask_for_reproducible_gemm
    from lockstep.training.trainer import Trainer

    if config.contract != "none":
        ask_for_reproducible_gemm()
    if is_training and config.advantage.needs_critic:
        _check_critic_freeze(config, foundation)
    if is_training and (device := resolve_device(config)) == "cuda":
        check_memory(config, foundation, device)
    model = load_model(config, foundation, weights=weights)
    numerics = choose_numerics(config, model)
    if ranks is not None:
        ranks.check_same({"numerics": numerics.fingerprint.text if numerics.is_kept else "none"})
    mesh = ranks.mesh() if ranks is not None and config.parallel.shard else None
    make = make_engine if config.fault is None else config.fault.make_engine
    engine = make(config.engine, model, foundation.renderer.tokenizer.all_token_bytes())
    if numerics.is_kept:
        _check_engine(engine, numerics, has_adapter=foundation.lora is not None)
    check_capabilities(
        engine,
        vocab_size=foundation.model.vocab_size,
        max_tokens=config.max_tokens,
        is_truncated=config.agent.is_truncated,
        is_rescored=config.correction.behaviour == "averaged",
        is_replayed=config.trainer.routing_replay == "rollout",
    )
    reference = None
    needs_reference = config.objective.reads_reference_logprobs and foundation.lora is None
    if is_training and needs_reference:
        reference = load_model(config, foundation, mesh=mesh).requires_grad_(False)
    trained = model if config.fault is None else config.fault.make_trained(model)
    if mesh is not None:
        trained = load_model(config, foundation, weights=weights, mesh=mesh)
    trainer = Trainer(
        trained,
        config.trainer,
        like=foundation.directory,
        temperature=config.agent.temperature,
        total_updates=(config.steps - config.critic.steps_before_policy)
        * config.trainer.updates_per_batch,
        reference=reference,
        contract=numerics.fingerprint if numerics.is_kept else None,
        ranks=ranks,
    )
    critic = None
    if is_training and config.advantage.needs_critic:
        device = model.embedding.device
        critic = load_critic(config, foundation, device=device, ranks=ranks, mesh=mesh)
    return Parts(foundation, model, engine, trainer, numerics, critic)


def _check_critic_freeze(config: Config, foundation: Foundation) -> None:
    """Tries the setting on a critic without memory, before weights are read."""
    import torch

    from lockstep.models.critic import ValueModel
    from lockstep.training.optimizer import freeze

    name = config.critic.model
    shape = ModelConfig.from_directory(locate_model(name) if name else foundation.directory)
    with torch.device("meta"):
        model = ValueModel(shape)
    freeze(model.named_parameters(), config.critic.freeze, setting="critic.freeze")


def load_critic(
    config: Config,
    foundation: Foundation,
    *,
    device: torch.device,
    ranks: Ranks | None = None,
    mesh: DeviceMesh | None = None,
) -> Critic:
    """The critic that `advantage` compares with, from its own model or the run's.

    ranks, mesh: as of `build` and `load_model`.
    """
    import torch

    from lockstep.models.critic import load_value_model
    from lockstep.training.critic import Critic

    name = config.critic.model
    directory = locate_model(name) if name else foundation.directory
    return Critic(
        load_value_model(directory, dtype=getattr(torch, config.dtype), device=device, mesh=mesh),
        config.critic,
        config.trainer,
        like=directory,
        total_updates=config.steps * config.critic.updates_per_batch,
        ranks=ranks,
    )


def choose_numerics(config: Config, model: Decoder) -> Numerics:
    """Makes the process's ops those that the setting `contract` asks for.

    Raises ConfigError if it is named and cannot be kept; `auto` then takes stock ops and says why.
    """
    from lockstep.ops import api, plain
    from lockstep.ops.selftest import fingerprint, prove

    weight = model.embedding
    api.use_backend(plain)
    reason = "contract=none"
    if config.contract != "none":
        reason = _why_no_contract(config)
        if not reason:
            proof = prove(model)
            api.use_backend(proof.backend)
            reason = proof.failure
            if proof.is_kept:
                found = fingerprint(weight.dtype, weight.device)
                return Numerics(
                    found, True,
                    f"{TRUE_ON_POLICY}: {found.ops} ops, rows filled to {found.row_quantum}, keys "
                    f"in blocks of {found.key_block}; {proof.num_checks} checks on the model's "
                    f"shapes in {proof.seconds:.1f} s. Every token is checked",
                )  # fmt: skip
            if weight.device.type == "cpu" and proof.num_checks:  # an op was tried and broke
                reason += (
                    ". Its result depends on the batch here; a fresh process, one thread or "
                    "MKL_CBWR=AUTO,STRICT in the environment may change that"
                )
    if config.contract == TRUE_ON_POLICY:
        raise ConfigError(
            f"contract={TRUE_ON_POLICY} cannot be kept: {reason}. contract=auto goes on without."
        )
    line = "stock ops; sampler and trainer agree to rounding"
    line += f" ({reason})" if config.contract == "none" else f". No contract: {reason}"
    return Numerics(fingerprint(weight.dtype, weight.device), False, line)


def _why_no_contract(config: Config) -> str:
    """What rules the contract out before anything is tried; empty if nothing does."""
    if config.fallback:
        return "fallback=true: transformers computes the model, and not ops"
    if config.agent.is_truncated and not config.agent.record_support:
        return (
            f"agent.top_p={config.agent.top_p} agent.top_k={config.agent.top_k} with "
            "agent.record_support=false: the trainer cannot know what a token was drawn from. Set "
            "agent.record_support=true"
        )
    if config.contract == "auto" and config.fault is not None:
        return f"the fault {tag(type(config.fault))} is injected, which breaks it on purpose"
    if config.contract == "auto" and type(config.engine) is not EmbeddedConfig:
        return f"engine={tag(type(config.engine))} does not sample with this process's own ops"
    return ""


def _check_engine(engine: Engine, numerics: Numerics, *, has_adapter: bool) -> None:
    """Raises ConfigError unless the engine computes with the trainer's numerics."""
    found = engine.capabilities
    reason = why_not_same(numerics.fingerprint, found.fingerprint)
    if not reason and has_adapter and not found.shares_weights:
        reason = "its weights are its own, with the adapter merged into them: equal to rounding"
    if reason:
        raise ConfigError(
            f"contract={TRUE_ON_POLICY}: engine {found.name} cannot keep it: {reason}. Or set "
            "contract=none: the gap is then measured and corrected."
        )


def load_model(
    config: ModelChoice,
    foundation: Foundation,
    *,
    weights: Path | None = None,
    mesh: DeviceMesh | None = None,
) -> Decoder:
    """The decoder, with its adapter, on the config's device and dtype; sets torch's threads and
    seed. weights: of a checkpoint; None takes the config's own. mesh: the ranks that its parameters
    are spread over; an adapter is whole on each.

    With fallback=true a `FallbackModel`, which a trainer takes for one; what asks for more of it
    was refused before.
    """
    import torch

    from lockstep.models.hf_io import load_checkpoint
    from lockstep.models.lora import add_adapter
    from lockstep.models.peft_io import check_policy, load_adapter

    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = resolve_device(config)
    dtype = getattr(torch, config.dtype)
    if config.fallback:
        from lockstep.models.fallback import load_fallback

        found = load_fallback(weights or foundation.directory, dtype=dtype, device=device)
        return cast("Decoder", found)
    _check_freeze(config, foundation)
    if config.lora is None or foundation.lora is None:
        source = weights or foundation.directory
        return load_checkpoint(source, dtype=dtype, device=device, mesh=mesh)
    model = load_checkpoint(foundation.directory, dtype=dtype, device=device, mesh=mesh)
    add_adapter(model, foundation.lora, seed=config.lora.seed)
    if weights is not None:
        check_policy(model, weights, like=foundation.directory)
    if source := weights or config.lora.path:
        load_adapter(model, Path(source).expanduser())
    return model


def resolve_device(config: ModelChoice) -> Device:
    """What the setting `device` means here. Raises ConfigError for a GPU that is not there."""
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device=cuda, and torch sees no GPU. Choose device=cpu or auto.")
    return "cuda" if has_gpu and config.device != "cpu" else "cpu"


def _check_freeze(config: ModelChoice, foundation: Foundation) -> None:
    """Tries the setting on a model without memory: an error comes before weights are read."""
    import torch

    from lockstep.models.decoder import Decoder
    from lockstep.models.lora import add_adapter
    from lockstep.training.optimizer import freeze

    if not config.trainer.freeze or not isinstance(foundation.model, ModelConfig):
        return
    with torch.device("meta"):
        model = Decoder(foundation.model)
    if foundation.lora is not None:
        add_adapter(model, foundation.lora, seed=0)
    freeze(model.named_parameters(), config.trainer.freeze)


# -- checkpoints and texts of a run ---------------------------------------------------------------


def checkpoint_of(run: Run, step: int | None) -> Path:
    """The checkpoint of a run: at `step`, else the best, else the last. RunError if it has none."""
    from lockstep.training.checkpoint import CheckpointStore

    store = CheckpointStore(run.path / "checkpoints")
    if step is not None:
        return store.at(step)
    found = store.best() or store.latest()
    if found is None:
        raise RunError(f"{run.path} has no checkpoint. Did it end before checkpoint.every steps?")
    return found


def export_checkpoint(
    path: Path, directory: Path, *, step: int | None, is_merged: bool = False
) -> str:
    """Copies a run's checkpoint out as a Hugging Face directory; of a run with lora, as an adapter
    in PEFT's form, or merged into its model. Returns the checkpoint's name."""
    run = load_run(path)
    source = checkpoint_of(run, step)
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} exists and is not empty; --hf names a new directory.")
    is_adapter = (source / "policy" / peft_format.CONFIG).is_file()
    if is_merged and not is_adapter:
        raise ConfigError(
            f"{path} trained the whole model: there is no adapter to merge. Leave --merged out."
        )
    if is_merged:
        _merge(run, source / "policy", directory)
    else:
        shutil.copytree(source / "policy", directory, dirs_exist_ok=True)
    if run.config["renderer"] is not None:
        stored = from_dict(_RendererFile, {"renderer": run.config["renderer"]})
        write_renderer(directory, stored.renderer)
    return source.name


def _merge(run: Run, adapter: Path, directory: Path) -> None:
    """Writes the run's model with `adapter` in its weights: added in float32, then cast to the
    dtype that the run computed in."""
    import torch

    from lockstep.models.hf_io import load_checkpoint, save_checkpoint
    from lockstep.models.lora import add_adapter
    from lockstep.models.peft_io import load_adapter

    base = locate_model(run.config["model"])
    peft_format.check_base(adapter, base)
    model = load_checkpoint(base)
    add_adapter(model, peft_format.read_shape(adapter, model.config), seed=0)
    load_adapter(model, adapter)
    save_checkpoint(model, directory, like=base, dtype=getattr(torch, run.config["dtype"]))


def vocabulary_of(config: Mapping[str, Any]) -> Vocabulary:
    """How the token ids of a run with this stored config read, for its report."""
    tokenizer = Tokenizer.from_file(locate_model(config["model"]))
    return Vocabulary(
        decode_token=lambda token_id: tokenizer.decode([token_id]),
        control_ids=tokenizer.control_ids,
    )
