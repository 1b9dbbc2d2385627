"""All checks of a run that need no loaded model, in under two seconds, and the plan that a run
prints first. No torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.agent.config import FrozenSeat, OwnSeat, SeatConfig
from lockstep.agent.guard import CLOSE_SECONDS, checked_messages, checked_tools, described, guarded
from lockstep.agent.harness import Harness
from lockstep.agent.loop import truncation_notice
from lockstep.agent.match import OutOfBudget
from lockstep.agent.task_config import Split
from lockstep.agent.tools import check_names
from lockstep.config import check_conflicts, conflicts_in, differences, from_dict, tag, to_dict
from lockstep.engines.config import GPU_SHARE, EmbeddedConfig, EngineConfig, VllmConfig
from lockstep.envs.mixture import MixtureConfig
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LockstepError,
    RolloutError,
    RunError,
    located,
    require_package,
)
from lockstep.launch.config import LocalPlacement
from lockstep.launch.event_loop import run_to_end
from lockstep.launch.gpu import check_driver, total_gpu_memory
from lockstep.memory import (
    DTYPE_BYTES,
    GIB,
    MemoryPlan,
    host_memory,
    memory_limit,
    predict_memory,
    state_facts,
)
from lockstep.models import peft_format
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.models.locate import HUB_FILES, locate_model
from lockstep.models.lora_config import LoraShape
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.observe.loggers import check_loggers
from lockstep.ops.contract import TRUE_ON_POLICY, Fingerprint
from lockstep.recipes.memory_fit import ways_to_fit
from lockstep.renderers.base import Renderer
from lockstep.renderers.config import (
    ChatMLConfig,
    HarmonyConfig,
    Llama3Config,
    MistralConfig,
    RendererConfig,
)
from lockstep.renderers.jinja.renderer import JinjaRenderer
from lockstep.renderers.registry import Choice, choose_renderer, make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.hooks import current_hooks
from lockstep.run.prompts import FirstPrompts
from lockstep.run_config import CONFLICTS, DEFAULT_DTYPES, Config, ModelChoice
from lockstep.store.checkpoints import RunAddress, checkpoint_of, trained_by
from lockstep.store.files import why_no_directory
from lockstep.store.run import load_run, step_of
from lockstep.training.config import DistillConfig
from lockstep.types import Message

RENDERER_FILE = "renderer.json"

DEFAULT_RENDERERS: dict[str, Callable[[], RendererConfig]] = {
    "gpt_oss": HarmonyConfig,
    "qwen2": partial(ChatMLConfig, variant="qwen2.5"),
    "qwen3": ChatMLConfig,
    "qwen3_moe": ChatMLConfig,
    "llama": Llama3Config,
    "mistral": MistralConfig,
}
"""Architecture -> our renderer of its format, also for models that transformers runs. Models of
deepseek_v3 differ in whether they think; their chat templates show it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as its files describe it, without torch: shape, format, tokenizer and adapter."""

    directory: Path
    model: ModelConfig | FallbackConfig
    renderer_config: RendererConfig
    renderer: Renderer
    lora: LoraShape | None = None
    """The adapter that is trained; None trains the model itself."""
    renderer_line: str = ""
    """The renderer that the model's files chose, and why; empty if they left no choice."""
    notes: tuple[str, ...] = ()
    """Sentences about rows that are left out."""

    @property
    def images_line(self) -> str:
        """Says what becomes of a part that reads images; empty for a model without one."""
        if isinstance(self.model, FallbackConfig) or not self.model.has_vision:
            return ""
        return "not read: the tower is kept in checkpoints as it is, neither run nor trained"

    def facts(self) -> dict[str, Any]:
        """The entries of a run's environment.json."""
        names = ("architecture", "family", "vocab_size")
        facts = {name: getattr(self.model, name) for name in names}
        said = {"renderer": self.renderer_line, "images": self.images_line}
        return facts | {name: line for name, line in said.items() if line}


@dataclass(frozen=True, slots=True)
class Numerics:
    """The result of the setting `contract`."""

    fingerprint: Fingerprint
    """Numerics of the trainer."""
    is_kept: bool
    """True if the contract true-on-policy holds."""
    line: str
    """The promise for a person to read, or why there is none."""

    def facts(self) -> dict[str, Any]:
        """The entries of a run's environment.json."""
        contract = TRUE_ON_POLICY if self.is_kept else "none"
        fingerprint = asdict(self.fingerprint)
        return {"contract": contract, "numerics": self.line, "fingerprint": fingerprint}


def preflight(
    config: Config,
    *,
    is_training: bool = True,
    files: Sequence[str] = HUB_FILES,
    start: RunAddress | None = None,
) -> ModelFiles:
    """Checks everything that can be known without loading a model. Returns the files it read.

    files: files of a hub's model to download; CONFIG_FILES are enough here. is_training: False
    skips the checks of training's memory and tasks. start: (run, step of its checkpoint) that this
    run begins with.
    Raises ConfigError, CheckpointError, RendererError or DataError, with both values and the fix.
    """
    check_machine(config)
    if start is not None:
        check_start(config, start)
    if is_training:
        config.check_policy_seat()
    model_files = read_model_files(config, files=files)
    current_hooks().check(config, model_files.model, model_files.renderer)
    check_fallback(config)
    if config.contract == TRUE_ON_POLICY and (reason := why_no_contract(config)):
        raise ConfigError(f"contract={TRUE_ON_POLICY} cannot be kept: {reason}.")
    if config.critic.model:
        check_critic(config, model_files)
    if config.distill is not None:
        check_teachers(config, config.distill, model_files)
    if isinstance(engine := config.engine, EmbeddedConfig):
        model, is_gpu = model_files.model, config.expected_device == "cuda"
        has_states = isinstance(model, ModelConfig) and model.linear is not None
        engine.check_lookup(has_states=has_states, has_graphs=engine.cuda_graphs and is_gpu)
    config.trainer.check_routers(model_files.model, has_adapter=config.lora is not None)
    check_parallel(config, model_files.model)
    if is_training:
        check_conflicts(config, CONFLICTS["training"])
        if not config.placement.is_elsewhere():
            check_memory(config, model_files)
    config.task.check()
    notes = _check_tasks(config, model_files, is_training=is_training)
    for tested in (each for each in config.tested.values() if each.task != config.task):
        tested.task.check()
        notes += _check_tasks(tested, model_files, is_training=False)
    return replace(model_files, notes=notes)


def _check_tasks(config: Config, model_files: ModelFiles, *, is_training: bool) -> tuple[str, ...]:
    """Checks that each split has a task whose first prompt fits. Returns sentences about the tasks
    and about rows that are left out."""
    prompts = FirstPrompts(config, model_files.renderer)
    splits: tuple[Split, ...] = ("train", "eval") if is_training else ("eval",)
    dropped = [found for split in splits if (found := prompts.left_out(split))]
    notes = config.task.notes()
    if dropped:
        notes.append(
            f"{' and '.join(dropped)} are left out: their prompts have no room for a reply in "
            f"max_tokens={config.max_tokens}"
        )
    firsts = config.task.first_tasks(split=splits[0], seed=config.seed)
    if not firsts:
        raise DataError(f"the task source has no {'training' if is_training else 'held-out'} task.")
    held_out = config.task.tasks(split="eval", seed=config.seed).take(1)
    tested = [each for each in config.tested.values() if each.task == config.task]
    if not held_out and any(each.evaluation.num_tasks for each in tested):
        raise DataError("the task source has no held-out task to evaluate on.")
    for first in firsts:
        if not dropped or prompts.fits(first):
            _check_first_prompt(config, model_files, first)
    return tuple(notes)


def check_machine(config: ModelChoice) -> None:
    """Raises ConfigError or MissingExtraError for what settings name and this machine lacks: the
    cheapest checks, and the first."""
    is_here = not (isinstance(config, Config) and config.placement.is_elsewhere())
    if config.device == "cuda" and is_here:
        check_driver(f"device={config.device}")
    if not isinstance(config, Config):
        return
    check_loggers(config.record.loggers)
    python, place = getattr(config.engine, "python", ""), Path(config.sync.directory).expanduser()
    if python and not Path(python).is_file():
        raise ConfigError(
            f"engine.python={python} is no file; expected the interpreter of an environment that "
            "has the engine, as DIR/bin/python."
        )
    if config.sync.directory and (problem := why_no_directory(place)):
        raise ConfigError(f"sync.directory={place}: no weights can be written there: {problem}.")


def check_start(config: Config, start: RunAddress) -> None:
    """Raises ConfigError if a run that begins with this checkpoint would train nothing, or if that
    is one of a supervised run."""
    parent = load_run(start[0])
    if "sft" in parent.config:
        raise ConfigError(
            f"from={start[0]} continues the optimizer and the tasks of a run, and this one was "
            f"supervised: it has no tasks. Start from its weights: model={start[0]}, or with an "
            f"adapter lora.path={start[0]}/adapter."
        )
    checkpoint = checkpoint_of(parent, start[1])
    made = step_of(checkpoint.name)
    if made >= config.steps:
        raise ConfigError(
            f"steps={config.steps}, and the checkpoint {checkpoint} was written after step {made}: "
            f"steps count from the start of the first run, so nothing would be trained. Set "
            f"steps={made + config.steps} to train {config.steps} more."
        )


SHARED = ("model", "dtype", "device", "threads", "contract", "engine", "parallel", "placement")
"""Settings that must be equal in all runs over one base model: model, engine, and numerics."""


def check_side_by_side(configs: Sequence[Config]) -> None:
    """Raises ConfigError unless these runs can share one base model, one engine and one process."""
    configs = [replace(config, dtype=config.compute_dtype) for config in configs]
    first, names = configs[0], [config.name for config in configs]
    if len(set(names)) < len(names):
        text = f"runs side by side need different names; these have {', '.join(names)}."
        raise ConfigError(f"{text} Set name= of each.")
    for config in configs:
        for path, (mine, theirs) in differences(to_dict(first), to_dict(config)).items():
            if path.split(".")[0] in SHARED:
                raise ConfigError(
                    f"{first.name} and {config.name} would share one model and one engine, and "
                    f"{path} is {mine} and {theirs}. Set it alike, or train them in turn."
                )
        check_shared_base(config, f"{config.name} trains beside others over one model")


def check_shared_base(config: Config, where: str) -> None:
    """Raises ConfigError, which begins with `where`, unless several adapters can be trained over
    the model of this run."""
    for problem in conflicts_in(config, CONFLICTS["shared_base"]):
        raise ConfigError(f"{where}: {problem}.")


def check_parallel(config: ModelChoice, model: ModelConfig | FallbackConfig) -> None:
    """Raises ConfigError if the work cannot be divided over the processes that are asked for."""
    world = config.num_processes
    if isinstance(model, ModelConfig):
        config.parallel.check_heads(num_heads=model.num_heads, num_kv_heads=model.num_kv_heads)
        if model.linear is not None and config.parallel.sequence > 1:
            raise ConfigError(
                f"parallel.sequence={config.parallel.sequence} divides attention's heads, and "
                f"{len(model.linear.layers)} of {model.num_layers} layers of {model.architecture} "
                "have states in place of keys. Set parallel.sequence=1."
            )
    if isinstance(config, Config):
        config.engine.for_rank(0, world)
        config.placement.check(config.parallel, config.demand)
    else:
        check_conflicts(config, CONFLICTS["sft"])


def check_memory(config: ModelChoice, model_files: ModelFiles) -> None:
    """Raises ConfigError if the run's predicted peak is more than `memory_limit_gib` or, without
    that setting, than the device's free memory."""
    config.trainer.check_device(config.expected_device)
    model, plan = model_files.model, memory_plan(config, model_files)
    if plan is None or isinstance(model, FallbackConfig):
        return
    if (limit := memory_limit(config)) is not None:
        ways = partial(ways_to_fit, config, model, model_files.directory, limit[0])
        plan.check(*limit, ways=ways)
    if plan.host_parts and (host := host_memory(config)) is not None:
        plan.check(*host, is_host=True)


def sized_engine(config: Config, model_files: ModelFiles) -> EngineConfig:
    """The engine's settings with the sizes that fit beside the trainer. An engine with a GPU of its
    own gets its sizes after its weights are loaded."""
    engine, model = config.engine, model_files.model
    if not isinstance(engine, (EmbeddedConfig, VllmConfig)) or isinstance(model, FallbackConfig):
        return engine
    if config.expected_device == "cpu":
        is_embedded = isinstance(engine, EmbeddedConfig)
        return engine.sized(longest=config.max_tokens) if is_embedded else engine
    if getattr(engine, "urls", ()) or (engine.num_workers and not engine.share_device):
        return engine
    found, limit = memory_plan(config, model_files), memory_limit(config)
    assert found is not None and limit is not None, "the decoder, on a GPU that was checked"
    num_here = max(1, math.ceil(engine.num_workers / config.num_processes))
    room = found.cache_room(limit[0], takes_turns=engine.share_device) // num_here
    dtype = config.compute_dtype if engine.dtype == "same" else engine.dtype
    if isinstance(engine, VllmConfig):
        weights = num_elements(decoder_shapes(model)) * DTYPE_BYTES[dtype]
        return engine.sized(room, total=total_gpu_memory(), weights=weights)
    return engine.sized(
        room,
        token_bytes=model.cached_per_token * DTYPE_BYTES[dtype],
        sequence_bytes=model.cached_per_sequence(DTYPE_BYTES[dtype]),
        longest=config.max_tokens,
        most_tokens=config.agent.max_in_flight * config.max_tokens or None,
    )


def memory_plan(
    config: ModelChoice, model_files: ModelFiles, *, numerics: Numerics | None = None
) -> MemoryPlan | None:
    """The predicted peak; None for a model that transformers runs, since too little is known about
    it. numerics: None before a model is loaded."""
    if isinstance(model_files.model, FallbackConfig):
        return None
    is_kept = False if numerics is None else numerics.is_kept
    if numerics is None and isinstance(config, Config):
        is_kept = config.contract != "none" and not why_no_contract(config)
    return predict_memory(config, model_files.model, model_files.lora, is_invariant=is_kept)


def read_model_files(config: ModelChoice, *, files: Sequence[str] = HUB_FILES) -> ModelFiles:
    """Model config, tokenizer, renderer and adapter of a run, checked against each other.

    files: as for `preflight`.
    """
    directory = locate_model(config.model, files=files)
    model = (FallbackConfig if config.fallback else ModelConfig).from_directory(directory)
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
    if isinstance(model, ModelConfig) and isinstance(
        getattr(config, "engine", None), EmbeddedConfig
    ):  # other engines draw from all rows, and the trainer's distribution is its engine's
        model = model.with_vocabulary(tokenizer.vocab_size)
    if config.renderer is not None:
        chosen = Choice(config=config.renderer, renderer=make_renderer(config.renderer, tokenizer))
    else:
        chosen = choose_model_renderer(directory, model.architecture, tokenizer)
    lora = None
    if config.lora is not None and isinstance(model, ModelConfig):
        lora = peft_format.resolve_shape(config.lora, model, directory, name=config.model)
    return ModelFiles(directory, model, chosen.config, chosen.renderer, lora, chosen.line)


def check_critic(config: Config, model_files: ModelFiles) -> None:
    """Raises ConfigError if `critic.model` cannot read what the policy writes."""
    try:
        directory = locate_model(config.critic.model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model=", "critic.model=", 1)) from None
    theirs = Tokenizer.from_file(directory) if (directory / "tokenizer.json").is_file() else None
    model, known = ModelConfig.from_directory(directory), model_files.renderer.tokenizer
    if problem := _why_unread(config, known, theirs, model):
        raise ConfigError(
            f"critic.model={config.critic.model} {problem}. Leave it empty to start from the "
            "policy."
        )


def check_teachers(config: Config, distill: DistillConfig, model_files: ModelFiles) -> None:
    """Raises ConfigError for a teacher that cannot read what the student writes, or is missing."""
    distill.check_sources(config.task.parts if isinstance(config.task, MixtureConfig) else {})
    known = model_files.renderer.tokenizer
    for setting, teacher in distill.teachers.items():
        where = f"{setting}.model={teacher.model}"
        with located(where, ConfigError):
            directory = locate_model(teacher.model)
            theirs = Tokenizer.from_file(directory)
            model = None if teacher.engine else ModelConfig.from_directory(directory)
        problem = _why_unread(config, known, theirs, model)
        if distill.signal == "top_k" and distill.top_k > known.vocab_size:
            problem = problem or f"has {known.vocab_size} ids, and distill.top_k={distill.top_k}"
        if problem:
            raise ConfigError(f"{where} {problem}.")
        if model is not None:
            config.parallel.check_heads(num_heads=model.num_heads, num_kv_heads=model.num_kv_heads)


def _why_unread(
    config: Config, known: Tokenizer, theirs: Tokenizer | None, model: ModelConfig | None
) -> str:
    """Why another model cannot read the ids that the policy writes; empty if it can, as far as its
    tokenizer and its shape are known. known: the policy's tokenizer."""
    if theirs is not None:
        mine, others = known.all_token_bytes(), theirs.all_token_bytes()
        at = next((i for i, b in enumerate(mine) if others[i : i + 1] != [b]), None)
        if at is not None:
            there = repr(others[at]) if at < len(others) else "none"
            return (
                f"has another tokenizer than model={config.model}: id {at} is {mine[at]!r} here "
                f"and {there} there. It reads the policy's ids, so its vocabulary must be the "
                "same, id for id"
            )
        if as_text := known.control_ids - theirs.control_ids:
            return f"takes id {min(as_text)}, a control token of model={config.model}, for text"
    if model is not None and config.max_tokens > model.max_positions:
        return f"has {model.max_positions} positions, and max_tokens={config.max_tokens}"
    if model is not None and known.vocab_size > model.vocab_size:
        there, last = model.vocab_size, known.vocab_size - 1
        return f"has a vocabulary of {there}, and the policy's tokenizer ids up to {last}"
    return ""


def _teachers(distill: DistillConfig) -> str:
    names = ", ".join(teacher.model for teacher in distill.teachers.values())
    how = {
        "sampled": "log-probs of sampled tokens, as advantages",
        "top_k": f"{distill.divergence} KL over {distill.top_k} ids",
        "full": f"{distill.divergence} KL over the vocabulary",
    }[distill.signal]
    return f"{names}; {how}, times {distill.coef:g}; rewards times {distill.reward_coef:g}"


def check_fallback(config: ModelChoice) -> None:
    """Raises ConfigError listing the settings that a model which transformers runs cannot keep:
    before it is loaded, and before transformers is imported."""
    if not config.fallback:
        return
    if problems := list(conflicts_in(config, CONFLICTS["fallback"])):
        raise ConfigError(f"fallback=true: {'; '.join(problems)}.")
    require_package("transformers", extra="transformers", needed_for="fallback=true")


def choose_model_renderer(directory: Path, architecture: str, tokenizer: Tokenizer) -> Choice:
    """The renderer that a model was trained with: its own renderer file, else its architecture's
    format if the chat template writes the same ids, else the template. architecture: may be
    unknown."""
    if (stored := stored_renderer(directory)) is not None:
        return Choice(config=stored, renderer=make_renderer(stored, tokenizer))
    default = DEFAULT_RENDERERS.get(architecture)
    found = choose_renderer(None if default is None else default(), tokenizer)
    if found is None:
        raise ConfigError(
            f"no renderer is known for a model of {architecture or 'no known kind'}, and "
            f"{directory} has no chat template. Set renderer=KIND, or keep {RENDERER_FILE} beside "
            "the model's config.json; a format of your own is a renderer of your own "
            "(documentation: Renderers)."
        )
    return found


def stored_renderer(directory: Path) -> RendererConfig | None:
    """The renderer that a model or an adapter was trained with, by its run or by the file beside
    it; None without these."""
    with suppress(RunError):
        if (of_run := trained_by(directory)[0].config.get("renderer")) is not None:
            return from_dict(RendererFile, {"renderer": of_run}).renderer
    path = directory / RENDERER_FILE
    if not path.is_file():
        return None
    try:
        return from_dict(RendererFile, json.loads(path.read_text())).renderer
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def write_renderer(directory: Path, renderer: RendererConfig) -> None:
    """Keeps `renderer` beside a checkpoint, for `stored_renderer`."""
    from lockstep.config import dumps

    (directory / RENDERER_FILE).write_text(dumps(RendererFile(renderer=renderer)))


@dataclass(frozen=True, kw_only=True)
class RendererFile:
    renderer: RendererConfig


def _check_first_prompt(config: Config, model_files: ModelFiles, task: Any) -> None:
    """Renders the first task's prompt: a format that cannot write it, or a budget that cannot hold
    it, fails here and not in every episode."""

    async def first_prompt() -> int:
        if config.task.SEATS:
            return await _first_asked(config, model_files, task)
        call = partial(guarded, seconds=config.agent.max_seconds, setting="agent.max_seconds")
        environment = await call(lambda: config.task.environment(task, config.agent))
        if isinstance(environment, Harness):  # its agent says the first word
            require_package("aiohttp", extra="http", needed_for="the gateway")
            from lockstep.agent.gateway.listener import open_files

            if (log := open_files(config.gateway)[1]) is not None:
                log.close()
            return 0
        try:
            messages = await call(lambda: environment.reset(), check=checked_messages)
            tools = await call(lambda: environment.tools, check=checked_tools)
            check_names(tools, f"the environment of task {task.id}")
            return len(model_files.renderer.render(messages, tools))
        finally:
            await guarded(lambda: environment.close(), seconds=CLOSE_SECONDS)

    if task.problem:
        return  # its episodes fail with it, and no other
    try:
        size = run_to_end(first_prompt())
    except LockstepError:
        raise
    except Exception as error:
        text = f"the prompt of task {task.id} cannot be had: {described(error)}"
        raise RolloutError(text) from error
    if size + 1 >= config.max_tokens:
        raise ConfigError(
            f"the prompt of task {task.id} has {size} tokens and max_tokens={config.max_tokens}: "
            f"no row fits. Raise max_tokens (the model allows {model_files.model.max_positions})."
        )


async def _first_asked(config: Config, model_files: ModelFiles, task: Any) -> int:
    """Tokens of the prompt of the seat that a match asks first."""
    match, sizes = await guarded(lambda: config.task.match(task, config.agent)), list[int]()
    for seat, tools in match.tools.items():
        check_names(tools, f"seat {seat} of task {task.id}")

    async def ask(seat: str, messages: Sequence[Message], *, player: int = 0) -> Message:
        asked = checked_messages(messages)
        sizes.append(len(model_files.renderer.render(asked, match.tools.get(seat, ()))))
        raise OutOfBudget("the first prompt is enough")

    try:
        with suppress(OutOfBudget):
            await guarded(lambda: match.play(ask), seconds=config.agent.max_seconds)
    finally:
        await guarded(lambda: match.close(), seconds=CLOSE_SECONDS)
    if not sizes:
        raise DataError(f"the match of task {task.id} ended before it asked a seat.")
    return sizes[0]


def why_no_contract(config: Config) -> str:
    """The reason why these settings cannot keep the contract; empty if they may."""
    for reason in conflicts_in(config, CONFLICTS["no_contract"]):
        return reason
    if config.contract == "auto" and current_hooks().no_contract:
        return current_hooks().no_contract
    dtype = getattr(config.engine, "dtype", "same")
    if dtype not in ("same", config.compute_dtype):
        return f"engine.dtype={dtype} is not the trainer's {config.compute_dtype}"
    return ""


def summary(config: Config, model_files: ModelFiles) -> list[str]:
    """The lines that a run begins with, before its model is loaded."""
    trainer, tests = config.trainer, config.evaluation
    rate = f"lr {trainer.lr:g}, {trainer.schedule}"
    if trainer.warmup_updates:
        rate += f" after {trainer.warmup_updates} updates of warm-up"
    said = {
        "renderer": model_files.renderer_line,
        "images": model_files.images_line,
        "step": (
            f"{config.groups_per_step} tasks x {config.group_size} episodes = "
            f"{config.groups_per_step * config.group_size} trajectories of at most "
            f"{config.max_tokens} tokens; {config.steps} steps"
        ),
        "learning": (
            f"{rate}; advantage {tag(type(config.advantage))}, objective "
            f"{tag(type(config.objective))}, {trainer.updates_per_batch} update(s) per step"
        ),
        "teachers": "" if config.distill is None else _teachers(config.distill),
        "seats": ", ".join(
            f"{seat}: {_player(policy)}"
            for seat, policy in {**dict.fromkeys(config.task.SEATS), **config.seats}.items()
        ),
        "functions": config.task.limits_notice,
        "tests": (
            f"{tests.num_tasks} held-out tasks, {'first and ' if tests.at_start else ''}last"
            f"{f', and every {tests.every} steps' if tests.every else ''}"
            if tests.num_tasks
            else "none"
        ),
        "trained": _trained(config, model_files),
        "data": "; ".join(model_files.notes),
    }
    return [*labelled(said), *current_hooks().plan()]


def labelled(said: Mapping[str, str]) -> list[str]:
    """The lines of a plan: label -> text, which may be empty."""
    return [f"{label:<11}{text}" for label, text in said.items() if text]


def _player(policy: SeatConfig | None) -> str:
    if isinstance(policy, FrozenSeat):
        return policy.model
    return "an adapter of its own" if isinstance(policy, OwnSeat) else "the policy"


def plan(config: Config, model_files: ModelFiles) -> list[str]:
    """The lines that --dry-run prints."""
    return [*summary(config, model_files), *internals(config, model_files)]


def internals(
    config: Config,
    model_files: ModelFiles,
    *,
    has_support: bool = True,
    numerics: Numerics | None = None,
) -> list[str]:
    """How a run is computed: the lines that it prints at its start with --verbose.

    has_support: whether the engine can record the ids that top-p and top-k keep. numerics: the
    result of the setting `contract`; None before a model is loaded.
    """
    model, renderer = model_files.model, model_files.renderer
    experts = f", {model.num_experts} experts, {model.num_active_experts} active"
    shape = f"{model.architecture}, {model.num_layers} layers of width {model.hidden_size}"
    dtype = getattr(config.engine, "dtype", "same")
    is_cast = dtype not in ("same", config.compute_dtype)
    proof = renderer.proof if isinstance(renderer, JinjaRenderer) else None
    reason = "contract=none" if config.contract == "none" else why_no_contract(config)
    promise = f"contract={config.contract}: the self-test decides, on the model's own shapes"
    promise = f"stock ops: {reason}" if reason else promise
    said = {
        "model": f"{config.model}: {shape}{experts if model.is_moe else ''}, {_dtype(config)}",
        "sampler": (
            f"{tag(type(config.engine))} engine"
            f"{f' in {dtype}, over a cast copy of the weights' if is_cast else ''}; "
            f"{renderer.name} tokens, token in, token out{_cache(config)}"
        ),
        "template": proof.line if proof is not None else "",
        "thinking": (
            "dropped when a user speaks again: that begins a branch (dropped_thinking), which "
            "observes the earlier turns without it; each end is rewarded"
            if renderer.forgets([Message(role="user", content="?")])
            else ""
        ),
        "draws": truncation_notice(config.agent, has_support=has_support),
        "update": _update(config, is_kept=numerics is not None and numerics.is_kept),
        "numerics": promise if numerics is None else numerics.line,
        "memory": describe_memory(config, model_files, numerics=numerics),
    }
    return [
        *labelled(said),
        *config.placement.describe(config.parallel, config.demand),
        *_gpu_table(config, model_files, numerics),
    ]


def _gpu_table(config: Config, model_files: ModelFiles, numerics: Numerics | None) -> Iterator[str]:
    """A line for each process of this machine on GPUs, with its memory."""
    if config.expected_device == "cpu" or not isinstance(config.placement, LocalPlacement):
        return
    engine, world = config.engine, config.num_processes
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    gpus = visible_gpus(here + engine.num_workers * engine.gpus_each)
    local: dict[str, Any] = {"local_world": here, "gpus": gpus}
    found = memory_plan(config, model_files, numerics=numerics)
    need = "not predicted" if found is None else f"{found.num_bytes / GIB:.1f} GiB"
    share = getattr(engine, "memory_share", 0.0) or GPU_SHARE
    for rank, gpu in enumerate(gpus[:here]):
        yield f"{'GPU ' + gpu:<11}rank {rank}: {need}"
        for at, place in enumerate(engine.gpus_of_rank(rank, world, local_rank=rank, **local)):
            takes = "the rest, in turns" if engine.share_device else f"{share:.0%} of the memory"
            yield f"{'GPU ' + place:<11}engine {at} of rank {rank}: {takes}"


def visible_gpus(count: int) -> list[str]:
    """Names of this machine's GPUs for CUDA_VISIBLE_DEVICES. count: their number, without that."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(gpu) for gpu in range(count)]


def _dtype(config: ModelChoice) -> str:
    """The dtype, with the reason if it is the default."""
    device, dtype = config.expected_device, config.compute_dtype
    where = "GPU" if device == "cuda" else "CPU"
    return f"{dtype}, the default on a {where}" if dtype == DEFAULT_DTYPES[device] else dtype


def _cache(config: Config) -> str:
    """The sizes of an engine on a GPU; empty on a CPU, and until they are known."""
    engine = config.engine
    if config.expected_device == "cpu" or not isinstance(engine, EmbeddedConfig):
        return ""
    if not engine.kv_cache_tokens or not engine.max_num_sequences:
        return ""
    return (
        f"; {engine.max_num_sequences} requests at once, keys and values of "
        f"{engine.kv_cache_tokens:,} tokens"
    )


def describe_memory(
    config: ModelChoice, model_files: ModelFiles, *, numerics: Numerics | None = None
) -> str:
    """The predicted peak; before a model is loaded also the memory that the device has."""
    found = memory_plan(config, model_files, numerics=numerics)
    if found is None:
        return "not predicted: transformers computes the model"
    limit = memory_limit(config) if numerics is None else None
    return found.describe(None if limit is None else limit[0])


def _trained(config: Config, model_files: ModelFiles) -> str:
    """The part of the model that is trained; empty for the whole model."""
    model, lora, frozen = model_files.model, model_files.lora, config.trainer.freeze
    if lora is None and not frozen:
        return ""
    said = "the whole model" if lora is None else f"LoRA, {lora.describe()}"
    if config.own_seats:
        said += f"; {1 + len(config.own_seats)} policies"
    if frozen:
        said += f"; frozen: {', '.join(frozen)}"
    if isinstance(model, FallbackConfig):
        return said
    facts = state_facts(config, model, lora)
    trained = num_elements(facts.trained())
    total = num_elements(decoder_shapes(model) | facts.adapters())
    return f"{said}; {trained:,} of {total:,} parameters ({trained / total:.2%})"


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
        how = f"recorded log-probs replace the trainer's in {num_updates} update(s)"
    else:
        how = f"two-pass: a forward over the whole batch, then {num_updates} update(s)"
    return f"{how}; {by}"
