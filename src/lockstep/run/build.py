"""Builds the parts of a run from its settings: model, engine, trainer and critic."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.config import flatten, from_dict, to_dict
from lockstep.display import warn
from lockstep.engines.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.launch.gpu import Device, check_gpu, release_gpu_memory
from lockstep.models import peft_format
from lockstep.models.locate import locate_model
from lockstep.ops.contract import TRUE_ON_POLICY, ContractChoice, why_not_same
from lockstep.renderers.base import Renderer
from lockstep.renderers.registry import write_template
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.hooks import RunHooks, current_hooks
from lockstep.run.preflight import (
    ModelFiles,
    Numerics,
    RendererFile,
    check_memory,
    visible_gpus,
    why_no_contract,
    write_renderer,
)
from lockstep.run_config import Config, ModelChoice
from lockstep.store.checkpoints import trained_by
from lockstep.store.run import Run, load_run
from lockstep.system import keep_freed_memory
from lockstep.training.config import DistillConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.agent.turns import Policy
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.launch.ranks import Ranks
    from lockstep.models.decoder import Decoder
    from lockstep.ops.base import Ops
    from lockstep.sync.publisher import Publisher
    from lockstep.training.critic import Critic
    from lockstep.training.teachers import Teachers
    from lockstep.training.trainer import Trainer

SAVED_BY_CLIENTS = ("weights", "sampler_weights")
"""Folders that hold the checkpoints of a client of Tinker's API."""


@dataclass(slots=True)
class Parts:
    """The loaded parts of one run, in one process."""

    model_files: ModelFiles
    model: Decoder
    """The model that the engine samples from: the trained one itself, unless that is sharded."""
    engine: Engine
    trainer: Trainer
    numerics: Numerics
    publisher: Publisher | None
    """Hands weights to the engine; None if an evaluation plays with the engine's own."""
    critic: Critic | None = None
    """The model of values; None unless the advantage needs one."""
    teachers: Teachers | None = None
    """Models and servers that score the rows; None without `distill`."""
    hooks: RunHooks = field(default_factory=current_hooks)
    """Code from outside that steps into the run; by default none."""
    seats: Mapping[str, Policy] = field(default_factory=dict[str, "Policy"])
    """Who plays the frozen seats of a task's matches."""
    own: Mapping[str, Parts] = field(default_factory=dict[str, "Parts"])
    """Seat -> the parts of the policy that is trained there, over the same model."""
    shared_engine: Engine | None = None
    """The engine under the adapters of these policies, which the run closes."""

    @property
    def renderer(self) -> Renderer:
        return self.model_files.renderer

    async def publish(self) -> dict[str, float]:
        """Hands the weights of all policies to their engines. Returns `sync/...`; nothing where an
        evaluation plays with an engine's own weights."""
        if self.publisher is None:
            return {}
        metrics = await self.publisher.publish(self.trainer.version)
        for seat, own in self.own.items():
            found = await own.publish()
            metrics |= {f"policy/{seat}/{name}": value for name, value in found.items()}
        return metrics


@dataclass(slots=True)
class SharedBase:
    """A base model in memory, and the engine that samples all the adapters over it."""

    decoder: Decoder
    engine: Engine | None = None
    """Made for the first run. All runs compute with its ops."""
    _training: asyncio.Lock = field(default_factory=asyncio.Lock)

    def engine_for(self, config: Config, context: EngineContext) -> Engine:
        """The engine as one run sees it. Raises ConfigError if the run computes by other ops than
        the first."""
        from lockstep.engines.adapter_engine import AdapterEngine
        from lockstep.ops.selftest import fingerprint

        model, base = context.model, self.decoder
        if self.engine is None:
            base.ops = model.ops
            self.engine = current_hooks().make_engine(config.engine, replace(context, model=base))
        shared = self.engine.capabilities.fingerprint
        own = fingerprint(model.ops, base.embedding.dtype, base.embedding.device).text
        if own != shared:
            raise ConfigError(
                f"{config.name} computes by {own}, and the engine that it would share by {shared}. "
                "Give the runs side by side the same rank, targets and top-p, or train them in "
                "turn."
            )
        return AdapterEngine(self.engine, config.name, model)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One run trains inside the block. The engine pauses: the two would slow each other down,
        and afterwards it has fuller batches. Episodes go on with their tools and rewards."""
        assert self.engine is not None, "a run trains after it was opened"
        async with self._training:
            await self.engine.pause()
            try:
                yield
            finally:
                await self.engine.resume(kv="keep")


def build(config: Config, model_files: ModelFiles, **options: Any) -> Parts:
    """Loads the model and wires the parts of a run around it. options: see `_Builder`."""
    return _Builder(config, model_files, **options).build()


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds the parts of one run in one process."""

    config: Config
    model_files: ModelFiles
    _: KW_ONLY
    weights: Path | None = None
    """Weights of a checkpoint; None takes the config's own."""
    is_training: bool = True
    """False leaves out the models that only training needs, reference and critic."""
    ranks: Ranks | None = None
    """The processes that train together, each with an engine of its own. Where the trained model is
    sharded, `Parts.model` is the whole copy that the engine samples from."""
    base: SharedBase | None = None
    """The model and the engine that this run shares with others."""
    scratch: Path | None = None
    """Directory in which the engine may leave logs, and weights on their way."""
    on_wait: Callable[[str], None] = lambda text: None
    """Receives lines about what the engine waits for, and the alarms of a sync."""

    def build(self) -> Parts:
        """Loads the model, opens its engine, and makes what trains it."""
        from lockstep.ops.invariant import ask_for_reproducible_gemm

        config, model_files, ranks = self.config, self.model_files, self.ranks
        is_training, hooks = self.is_training, current_hooks()
        if config.contract != "none":
            ask_for_reproducible_gemm()
        if is_training and resolve_device(config) == "cuda":
            check_memory(config, model_files)
        over = None if self.base is None else self.base.decoder
        model = load_model(config, model_files, weights=self.weights, over=over)
        numerics = choose_numerics(config.contract, model, why_not=why_no_contract(config))
        context, engine = self._open_engine(model)
        if numerics.is_kept:
            is_merged = self._is_merged(engine)
            numerics = with_engine(config.contract, engine, numerics, model, is_merged=is_merged)
        if ranks is not None:
            promise = numerics.fingerprint.text if numerics.is_kept else "none"
            ranks.check_same({"numerics": promise})
        self._check_engine(engine, context)
        mesh = ranks.mesh() if ranks is not None and config.parallel.shard else None
        load = partial(load_model, config, model_files, mesh=mesh, ops=model.ops)
        reference = critic = teachers = publisher = None
        if is_training and config.objective.reads_reference_logprobs and model_files.lora is None:
            reference = load().requires_grad_(False)
        trained = hooks.make_trained(model) if mesh is None else load(weights=self.weights)
        if is_training and config.distill is not None:
            teachers = load_teachers(config.distill, context, model)
        trainer = self._trainer(trained, numerics, teachers)
        trainer.reference = reference
        if config.lora is not None and config.lora.path and config.objective.reference == "start":
            trainer.take_reference()
        if is_training or engine.capabilities.weight_sources:
            publisher = self._publisher(context, engine, trainer)
        if is_training and config.advantage.needs_critic:
            critic = self._critic(like=model, mesh=mesh)
        return Parts(
            model_files, model, engine, trainer, numerics, publisher, critic, teachers, hooks
        )

    def _open_engine(self, model: Decoder) -> tuple[EngineContext, Engine]:
        """(inputs of this process's engine, the engine)."""
        config, ranks, scratch, run = self.config, self.ranks, self.scratch, self.config.name
        rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
        if scratch is not None:
            run, scratch = scratch.name, scratch / f"rank-{rank}" if rank else scratch
        context = engine_context(
            config,
            self.model_files,
            model,
            contract=config.contract,
            run=run,
            scratch=scratch,
            on_wait=self.on_wait,
            gpus=gpus_here(config.engine, rank, world, model.embedding.device),
        )
        if config.engine.share_device:
            release_gpu_memory()
        if self.base is not None:
            return context, self.base.engine_for(config, context)
        return context, current_hooks().make_engine(config.engine.for_rank(rank, world), context)

    def _is_merged(self, engine: Engine) -> bool:
        """True if the engine gets the adapter inside its model's weights."""
        forms = {"shared", "adapter"} & set(engine.capabilities.weight_sources)
        has_own_form = bool(forms) and self.config.sync.form in ("auto", *forms)
        return self.model_files.lora is not None and not has_own_form

    def _check_engine(self, engine: Engine, context: EngineContext) -> None:
        """Raises ConfigError or EngineError if the engine lacks an ability that the run needs."""
        from lockstep.engines.registry import Need, check_capabilities

        config = self.config
        needs: dict[Need, bool] = {
            "training": self.is_training,
            "truncation": config.agent.is_truncated,
            "rescoring": config.chosen_correction.rescorings > 0,
            "replay": config.trainer.routing_replay == "rollout",
            "sleep": config.engine.share_device,
        }
        asked: list[Need] = [need for need, is_needed in needs.items() if is_needed]
        check_capabilities(engine, context, needs=asked, temperature=config.agent.temperature)

    def _trainer(self, model: Decoder, numerics: Numerics, teachers: Teachers | None) -> Trainer:
        from lockstep.training.trainer import Trainer

        config = self.config
        num_steps = config.steps - config.critic.steps_before_policy
        return Trainer(
            model,
            config.trainer,
            like=self.model_files.directory,
            temperature=config.agent.temperature,
            total_updates=num_steps * config.trainer.updates_per_batch,
            contract=numerics.fingerprint if numerics.is_kept else None,
            ranks=self.ranks,
            distill=None if teachers is None else teachers.in_update,
        )

    def _publisher(self, context: EngineContext, engine: Engine, trainer: Trainer) -> Publisher:
        from lockstep.sync.publisher import Publisher

        config, place = self.config, context.scratch and context.scratch / "weights"
        if config.sync.directory:
            place = Path(config.sync.directory).expanduser() / context.run
        left_out = self.model_files.renderer.tokenizer.control_ids
        probed = {"left_out": left_out, "max_tokens": config.max_tokens}
        return Publisher(
            engine,
            trainer,
            context.model,
            config.sync,
            place=place,
            ranks=self.ranks,
            probed=probed if current_hooks().verifies_sync else None,
            warn=self.on_wait,
        )

    def _critic(self, *, like: Decoder, mesh: DeviceMesh | None) -> Critic:
        """The critic, from its own model or the policy's, on the device and with the ops of
        `like`."""
        import torch

        from lockstep.models.critic import load_value_model
        from lockstep.training.critic import Critic

        config, directory = self.config, self.model_files.directory
        if config.critic.model:
            directory = locate_model(config.critic.model)
        model = load_value_model(
            directory,
            dtype=getattr(torch, config.compute_dtype),
            device=like.embedding.device,
            mesh=mesh,
            ops=like.ops,
        )
        return Critic(
            model,
            config.critic,
            config.trainer,
            like=directory,
            total_updates=config.steps * config.critic.updates_per_batch,
            ranks=self.ranks,
        )


def engine_context(
    config: ModelChoice, model_files: ModelFiles, model: Any, **more: Any
) -> EngineContext:
    """All inputs of an engine. more: facts that are not among a model's settings, such as `run` and
    `scratch`, or another directory."""
    from lockstep.engines.base import EngineContext

    tokenizer = model_files.renderer.tokenizer
    return EngineContext(
        model=model,
        token_bytes=tokenizer.all_token_bytes(),
        control_ids=tokenizer.control_ids,
        vocab_size=model_files.model.vocab_size,
        max_tokens=config.max_tokens,
        dtype=config.compute_dtype,
        seed=config.seed,
        **{"directory": model_files.directory, **more},
    )


def load_teachers(distill: DistillConfig, context: EngineContext, like: Decoder) -> Teachers:
    """The teachers of `distill`: models on the device of `like` and in its dtype, and engines on
    servers, whose weights are not checked."""
    from lockstep.engines.registry import open_engine
    from lockstep.models.hf_io import load_checkpoint
    from lockstep.training.teachers import Teachers

    models: dict[str, Decoder] = {}
    engines: dict[str, Engine] = {}
    for setting, teacher in distill.teachers.items():
        directory = locate_model(teacher.model)
        if teacher.engine is None:
            weight = like.embedding
            size = like.config.vocab_size
            model = load_checkpoint(
                directory, dtype=weight.dtype, device=weight.device, vocab_size=size
            )
            models[setting] = model.requires_grad_(False)
        else:
            run = f"{context.run}-{setting}"
            engines[setting] = open_engine(
                teacher.engine, replace(context, model=None, directory=directory, run=run)
            )
    return Teachers(config=distill, models=models, engines=engines)


def gpus_here(engine: EngineConfig, rank: int, world: int, device: torch.device) -> list[str]:
    """The GPUs of each engine of this rank that runs in a process of its own; empty on a CPU."""
    import torch

    if device.type != "cuda":
        return []
    gpus, here = visible_gpus(torch.cuda.device_count()), os.environ.get("LOCAL_WORLD_SIZE", world)
    local: dict[str, Any] = {"local_rank": device.index or 0, "local_world": int(here)}
    return engine.gpus_of_rank(rank, world, gpus=gpus, **local)


def choose_numerics(contract: ContractChoice, model: Decoder, *, why_not: str = "") -> Numerics:
    """Gives `model` the ops that the setting `contract` asks for.

    why_not: why other settings rule the contract out. Raises ConfigError if it is named and cannot
    be kept; `auto` then takes stock ops and says why.
    """
    from lockstep.ops.selftest import fingerprint, prove

    if contract == "none":
        return _stock(model, "contract=none")
    reason = why_not
    if not reason:
        proof = prove(model)
        if proof.is_kept:
            model.ops = proof.ops
            found = fingerprint(model.ops, model.embedding.dtype, model.embedding.device)
            line = (
                f"{TRUE_ON_POLICY}: {found.ops} ops, rows filled to {found.row_quantum}, keys in "
                f"blocks of {found.key_block}; {proof.num_checks} checks on the model's shapes in "
                f"{proof.seconds:.1f} s. Every token is checked"
            )
            return Numerics(found, True, line)
        reason = proof.failure
    return _stock(model, reason, is_refused=contract == TRUE_ON_POLICY)


def with_engine(
    contract: ContractChoice,
    engine: Engine,
    numerics: Numerics,
    model: Decoder,
    *,
    is_merged: bool = False,
) -> Numerics:
    """The numerics that this engine and the trainer keep together. is_merged: the engine has the
    adapter in its weights.

    Raises ConfigError where the contract is named and the engine cannot keep it, and for an engine
    of this library that should; `auto` goes on without.
    """
    found = engine.capabilities
    reason = why_not_same(numerics.fingerprint, found.fingerprint)
    if is_merged:
        reason = "its weights are its own, with the adapter merged into them: equal to rounding"
    if not reason:
        return numerics
    reason = f"engine {found.name} cannot keep it: {reason}"
    return _stock(model, reason, is_refused=bool(found.fingerprint) or contract == TRUE_ON_POLICY)


def _stock(model: Decoder, reason: str, *, is_refused: bool = False) -> Numerics:
    """Gives the model stock ops, for this reason. is_refused: raises ConfigError in place of it."""
    from lockstep.ops.base import Ops
    from lockstep.ops.selftest import fingerprint

    if is_refused:
        raise ConfigError(
            f"contract={TRUE_ON_POLICY} cannot be kept: {reason}. With contract=none the gap is "
            "measured and corrected."
        )
    model.ops, weight = Ops(), model.embedding
    line = f"stock ops; sampler and trainer agree to rounding. No contract: {reason}"
    return Numerics(fingerprint(model.ops, weight.dtype, weight.device), False, line)


def load_model(
    config: ModelChoice,
    model_files: ModelFiles,
    *,
    weights: Path | None = None,
    mesh: DeviceMesh | None = None,
    ops: Ops | None = None,
    over: Decoder | None = None,
) -> Decoder:
    """The decoder, with its adapter, on the config's device and dtype; sets torch's threads and
    seed. weights: of a checkpoint; None takes the config's own. mesh: the ranks that its parameters
    are spread over; an adapter is whole on each. ops: what the decoder computes by; None is stock
    torch. over: a decoder in memory, whose parameters one with an adapter takes.

    With fallback=true a `FallbackModel`, which a trainer takes for one; what asks for more of it
    was refused before.
    """
    import torch

    from lockstep.models.adapters import decoder_over
    from lockstep.models.hf_io import load_checkpoint
    from lockstep.models.lora import add_adapter
    from lockstep.models.peft_io import check_policy, load_adapter

    keep_freed_memory()
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = resolve_device(config)
    dtype = getattr(torch, config.compute_dtype)
    if config.fallback:
        from lockstep.models.fallback import load_fallback

        found = load_fallback(weights or model_files.directory, dtype=dtype, device=device)
        return cast("Decoder", found)
    lora = None if config.lora is None else model_files.lora
    if over is not None and lora is not None:
        model = decoder_over(over)
    else:
        source = (weights if lora is None else None) or model_files.directory
        size = model_files.model.vocab_size
        model = load_checkpoint(
            source, dtype=dtype, device=device, mesh=mesh, ops=ops, vocab_size=size
        )
    if config.lora is None or lora is None:
        return model
    add_adapter(model, lora, seed=config.seed)
    if weights is not None:
        check_policy(model, weights, like=model_files.directory)
    if source := weights or config.lora.path:
        load_adapter(model, Path(source).expanduser())
    return model


def resolve_device(config: ModelChoice) -> Device:
    """The device that the setting names here. Raises ConfigError for a GPU that is there or asked
    for, and cannot be used."""
    if config.expected_device == "cuda":
        check_gpu(f"device={config.device}")
    return config.expected_device


# -- checkpoints and texts of a run ---------------------------------------------------------------


def export_checkpoint(run: Run, source: Path, directory: Path, *, is_merged: bool) -> None:
    """Copies weights of a run out as a Hugging Face directory; an adapter in PEFT's form, or merged
    into its model."""
    from lockstep.models.peft_io import merge_adapter

    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} exists and is not empty; --hf names a new directory.")
    if is_merged and not (source / peft_format.CONFIG).is_file():
        raise ConfigError(
            f"{run.path} trained the whole model: there is no adapter to merge. Leave --merged out."
        )
    if is_merged:
        merge_adapter(source, locate_model(run.config["model"]), directory)
    else:
        others = shutil.ignore_patterns("training", "merged-*")
        shutil.copytree(source, directory, ignore=others, dirs_exist_ok=True)
    if run.config["renderer"] is not None:
        used = from_dict(RendererFile, {"renderer": run.config["renderer"]}).renderer
        is_model = (directory / "config.json").is_file()
        place = str(directory) if is_model else run.config["model"]
        reader, line = write_template(directory, used, partial(tokenizer_of, {"model": place}))
        write_renderer(directory, reader if is_model else used)
        if line:
            warn(line)


def exported(path: Path, step: int | None) -> tuple[Run, Path]:
    """(run, directory of the weights) that `path` names: as `trained_by`, or a checkpoint in a
    server of Tinker's API: OUT/checkpoints/MODEL/weights/NAME."""
    if path.parent.name in SAVED_BY_CLIENTS and path.is_dir():
        return load_run(path.parents[3] / "runs" / path.parents[1].name), path
    return trained_by(path, step)


def recipe_of(run: Run) -> dict[str, Any] | None:
    """The settings, by dotted key, of the recipe that the run was started from; None if it is not
    known here."""
    import lockstep.recipes  # noqa: F401  fills the registry
    from lockstep.recipes.registry import RECIPES, SUPERVISED_RECIPES

    for name in (*run.environment.get("argv", ())[1:], run.config.get("name", "")):
        if recipe := RECIPES.get(name) or SUPERVISED_RECIPES.get(name):
            # Its name is no setting: a run may be called anything.
            return flatten(to_dict(recipe()) | {"name": run.config.get("name")})
    return None


def tokenizer_of(config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a run with this stored config."""
    return Tokenizer.from_file(locate_model(config["model"]))
