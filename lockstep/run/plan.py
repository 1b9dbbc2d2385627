"""What a run is going to do, line by line, for a person. No torch."""

from __future__ import annotations

import os
from dataclasses import fields

from lockstep.agent.loop import truncation_notice
from lockstep.config import tag
from lockstep.engines.config import EmbeddedConfig
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
from lockstep.training.config import RoutingReplay
from lockstep.types import Message

_REPLAY_PLAN: dict[RoutingReplay, str] = {
    "rollout": "the sampler's experts are replayed in every forward of the trainer",
    "recompute": "the experts of the forward before the updates are replayed in them",
}


def plan(
    config: Config,
    model_files: ModelFiles,
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
    model, episodes = model_files.model, config.groups_per_step * config.group_size
    notice = truncation_notice(config.agent, has_support=has_support)
    replay = config.trainer.routing_replay
    experts = f", {model.num_experts} experts, {model.num_active_experts} active"
    lines = [
        f"model      {config.model}: {model.architecture}, {model.num_layers} layers of width "
        f"{model.hidden_size}{experts if model.is_moe else ''}, {config.dtype}",
        *_trained_plan(config, model_files, num_trained),
        f"sampler    {tag(type(config.engine))} engine{_dtype_apart(config)}; "
        f"{model_files.renderer.name} tokens, token in, token out",
        *_template_plan(model_files),
        *_thinking_plan(model_files),
        *([f"draws      {notice}"] if notice else []),
        f"step       {config.groups_per_step} tasks x {config.group_size} episodes = {episodes} "
        f"trajectories of at most {config.max_tokens} tokens; {config.steps} steps",
        *([f"overlap    {_overlap_plan(config)}"] if config.max_staleness else []),
        f"update     {_update_plan(config, is_kept=numerics is not None and numerics.is_kept)}",
        *([f"critic     {_critic_plan(config)}"] if config.advantage.needs_critic else []),
        *([f"routing    {_REPLAY_PLAN[replay]}"] if replay != "none" else []),
        *_parallel_plan(config),
        *config.placement.describe(config.parallel, num_engines=config.engine.workers[1]),
        f"numerics   {_contract_plan(config) if numerics is None else numerics.line}",
        f"memory     {describe_memory(config, model_files, numerics=numerics)}",
        *(f"warning    {text}" for text in config.chosen_correction.warnings()),
    ]
    return lines + current_hooks().plan()


def _template_plan(model_files: ModelFiles) -> list[str]:
    """What was proved of the model's own chat template, where that is the format."""
    renderer = model_files.renderer
    if not isinstance(renderer, JinjaRenderer) or renderer.proof is None:
        return []
    return [f"template   {renderer.proof.line}"]


def _thinking_plan(model_files: ModelFiles) -> list[str]:
    """What becomes of earlier thinking, where it goes."""
    if not model_files.renderer.forgets([Message(role="user", content="?")]):
        return []
    return [
        "thinking   dropped when a user speaks again: that begins a branch (dropped_thinking), "
        "which observes the earlier turns without it; each end is rewarded"
    ]


def _dtype_apart(config: Config) -> str:
    """The sampler's dtype, where it is not the trainer's."""
    dtype = getattr(config.engine, "dtype", "same")
    if dtype in ("same", config.dtype):
        return ""
    return f" in {dtype}, over a cast copy of the weights"


def describe_memory(
    config: ModelChoice, model_files: ModelFiles, *, numerics: Numerics | None = None
) -> str:
    """The plan's line about memory; before a model is loaded also with what there is."""
    device = expected_device(config)
    found = memory_plan(config, model_files, device=device, numerics=numerics)
    if found is None:
        return "not predicted: transformers computes the model"
    limit = memory_limit(config, device) if numerics is None else None
    return found.describe(None if limit is None else limit[0])


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


def _overlap_plan(config: Config) -> str:
    """How far the sampler runs ahead."""
    ahead = config.max_staleness
    limit = ahead * config.trainer.updates_per_batch
    kept = {"drop": "computed again", "keep": "kept"}[config.sync.kv]
    over = {"drop": "dropped", "correct": "corrected like any other"}[config.over_stale]
    has_process = not isinstance(config.engine, EmbeddedConfig) or config.engine.replicas
    when = "while one is trained" if has_process else "beside it, but not while the trainer trains"
    return (
        f"{ahead} later batch(es) are sampled {when}; keys and values are {kept} under new "
        f"weights; a row with a token more than {limit} update(s) old is {over}"
    )


def _trained_plan(
    config: Config, model_files: ModelFiles, num_trained: tuple[int, int] | None
) -> list[str]:
    """What of the model is trained, and how many numbers that is, where it is known."""
    what = "the whole model" if model_files.lora is None else f"LoRA, {model_files.lora.describe()}"
    if config.trainer.freeze:
        what += f"; frozen: {', '.join(config.trainer.freeze)}"
    if num_trained is None:
        if model_files.lora is not None and not config.trainer.freeze:
            what += f"; {model_files.lora.num_parameters:,} parameters"
        is_plain = model_files.lora is None and not config.trainer.freeze
        return [] if is_plain else [f"trained    {what}"]
    trained, total = num_trained
    return [f"trained    {what}; {trained:,} of {total:,} parameters ({trained / total:.2%})"]


def _contract_plan(config: Config) -> str:
    """What `choose_numerics` will do, as far as is known without a model."""
    reason = "contract=none" if config.contract == "none" else why_no_contract(config)
    if reason:
        return f"stock ops: {reason}"
    return f"contract={config.contract}: the self-test decides, on the model's own shapes"


def _update_plan(config: Config, *, is_kept: bool) -> str:
    """One pass or two, and what each token's ratio and weight are of."""
    correction, num_updates = config.chosen_correction, config.trainer.updates_per_batch
    by = f"ratio to {correction.anchor}" if config.objective.has_ratio else "no ratio"
    if correction.level != "none":
        by += f", {correction.level} weights by {correction.bound}"
        by += ", normalised over the batch" if correction.is_normalized else ""
    if correction.reject:
        by += f", {len(correction.reject)} rejection rules"
    if correction.behaviour == "averaged":
        by += f", behaviour averaged over {correction.rescorings} re-scorings"
    is_two_pass = config.trainer.scores_first(correction, is_measured=True)
    if is_two_pass and is_kept and config.trainer.routing_replay != "recompute":
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
