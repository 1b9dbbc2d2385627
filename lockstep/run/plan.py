"""The lines that say what a run is going to do, for a person. No torch."""

from __future__ import annotations

import os

from lockstep.agent.loop import truncation_notice
from lockstep.config import tag
from lockstep.engines.config import EmbeddedConfig
from lockstep.memory import PlanFacts
from lockstep.models.config import FallbackConfig
from lockstep.models.lora_config import adapter_shapes
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.run.hooks import current_hooks
from lockstep.run.preflight import (
    ModelFiles,
    Numerics,
    expected_device,
    memory_limit,
    memory_plan,
    why_no_contract,
)
from lockstep.run_config import Config, ModelChoice
from lockstep.types import Message

_REPLAY = {
    "none": "",
    "rollout": "the sampler's experts are replayed in every forward of the trainer",
    "recompute": "the experts of the forward before the updates are replayed in them",
}


def plan(
    config: Config,
    model_files: ModelFiles,
    *,
    has_support: bool = True,
    numerics: Numerics | None = None,
) -> list[str]:
    """The lines that --dry-run and the start of a run print.

    has_support: whether the engine can record the ids that top-p and top-k keep. numerics: the
    result of the setting `contract`; None before a model is loaded.
    """
    model, renderer = model_files.model, model_files.renderer
    experts = f", {model.num_experts} experts, {model.num_active_experts} active"
    shape = f"{model.architecture}, {model.num_layers} layers of width {model.hidden_size}"
    dtype = getattr(config.engine, "dtype", "same")
    is_cast = dtype not in ("same", config.dtype)
    proof = renderer.proof if isinstance(renderer, JinjaRenderer) else None
    said = [
        ("model", f"{config.model}: {shape}{experts if model.is_moe else ''}, {config.dtype}"),
        ("trained", _trained(config, model_files)),
        (
            "sampler",
            f"{tag(type(config.engine))} engine"
            f"{f' in {dtype}, over a cast copy of the weights' if is_cast else ''}; "
            f"{renderer.name} tokens, token in, token out",
        ),
        ("template", proof.line if proof is not None else ""),
        (
            "thinking",
            "dropped when a user speaks again: that begins a branch (dropped_thinking), which "
            "observes the earlier turns without it; each end is rewarded"
            if renderer.forgets([Message(role="user", content="?")])
            else "",
        ),
        ("draws", truncation_notice(config.agent, has_support=has_support)),
        (
            "step",
            f"{config.groups_per_step} tasks x {config.group_size} episodes = "
            f"{config.groups_per_step * config.group_size} trajectories of at most "
            f"{config.max_tokens} tokens; {config.steps} steps",
        ),
        ("overlap", _overlap(config)),
        ("update", _update(config, is_kept=numerics is not None and numerics.is_kept)),
        ("critic", _critic(config)),
        ("routing", _REPLAY[config.trainer.routing_replay]),
        ("parallel", _parallel(config)),
    ]
    lines = [f"{label:<11}{text}" for label, text in said if text]
    reason = "contract=none" if config.contract == "none" else why_no_contract(config)
    before = f"contract={config.contract}: the self-test decides, on the model's own shapes"
    before = f"stock ops: {reason}" if reason else before
    return [
        *lines,
        *config.placement.describe(config.parallel, num_engines=config.engine.num_workers),
        f"numerics   {before if numerics is None else numerics.line}",
        f"memory     {describe_memory(config, model_files, numerics=numerics)}",
        *current_hooks().plan(),
    ]


def describe_memory(
    config: ModelChoice, model_files: ModelFiles, *, numerics: Numerics | None = None
) -> str:
    """The predicted peak; before a model is loaded also the memory that the device has."""
    device = expected_device(config)
    found = memory_plan(config, model_files, device=device, numerics=numerics)
    if found is None:
        return "not predicted: transformers computes the model"
    limit = memory_limit(config, device) if numerics is None else None
    return found.describe(None if limit is None else limit[0])


def _trained(config: Config, model_files: ModelFiles) -> str:
    """The part of the model that is trained; empty for the whole model."""
    model, lora, frozen = model_files.model, model_files.lora, config.trainer.freeze
    if lora is None and not frozen:
        return ""
    said = "the whole model" if lora is None else f"LoRA, {lora.describe()}"
    if frozen:
        said += f"; frozen: {', '.join(frozen)}"
    if isinstance(model, FallbackConfig):
        return said
    facts = PlanFacts(
        model=model, dtype=config.dtype, device="cpu", trainer=config.trainer, lora=lora
    )
    trained = num_elements(facts.trained())
    total = num_elements(decoder_shapes(model) | (adapter_shapes(lora) if lora else {}))
    return f"{said}; {trained:,} of {total:,} parameters ({trained / total:.2%})"


def _overlap(config: Config) -> str:
    """How far the sampler runs ahead."""
    ahead = config.max_staleness
    if not ahead:
        return ""
    kept = {"drop": "computed again", "keep": "kept"}[config.sync.kv]
    over = {"drop": "dropped", "correct": "corrected like any other"}[config.over_stale]
    has_process = not isinstance(config.engine, EmbeddedConfig) or config.engine.replicas
    when = "while one is trained" if has_process else "beside it, but not while the trainer trains"
    limit = ahead * config.trainer.updates_per_batch
    return (
        f"{ahead} later batch(es) are sampled {when}; keys and values are {kept} under new "
        f"weights; a row with a token more than {limit} update(s) old is {over}"
    )


def _update(config: Config, *, is_kept: bool) -> str:
    """One pass or two, and the policies that ratios and weights compare."""
    correction, num_updates = config.chosen_correction, config.trainer.updates_per_batch
    by = f"ratio to {correction.anchor}" if config.objective.has_ratio else "no ratio"
    if correction.level != "none":
        by += f", {correction.level} weights by {correction.bound}"
    if correction.reject:
        by += f", {len(correction.reject)} rejection rules"
    if not config.trainer.scores_first(correction, is_measured=True):
        how = "one-pass: measured inside the training forward, before the optimizer moves"
    elif is_kept and config.trainer.routing_replay != "recompute":
        how = f"recorded log-probs stand for the trainer's in {num_updates} update(s)"
    else:
        how = f"two-pass: a forward over the whole batch, then {num_updates} update(s)"
    return f"{how}; {by}"


def _critic(config: Config) -> str:
    """The critic's first weights, and how it learns."""
    if not config.advantage.needs_critic:
        return ""
    critic = config.critic
    alone = f"; alone for {critic.steps_before_policy} steps" if critic.steps_before_policy else ""
    return (
        f"{tag(type(config.advantage))}; from {critic.model or config.model}, "
        f"{critic.updates_per_batch} update(s) of all rows, lr {critic.lr:g}{alone}"
    )


def _parallel(config: Config) -> str:
    """How the work is divided over processes."""
    parallel = config.parallel
    world = parallel.num_processes(os.environ)
    if world == 1:
        return ""
    parts = [f"{world} processes"]
    if world > parallel.sequence:
        parts.append(f"rows divided by {world // parallel.sequence}")
    if parallel.sequence > 1:
        parts.append(f"tokens of each micro-batch by {parallel.sequence}")
    held = "sharded, with a whole copy for the engine" if parallel.shard else "whole on each"
    return f"{', '.join(parts)}; weights and optimizer {held}"
