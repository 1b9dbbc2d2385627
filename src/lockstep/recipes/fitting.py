"""Settings that follow the model and the data when a user trains a model on tasks of their own.

A setting that the user gives is never changed. Sources of the learning rates: 1e-6 for full
training of models from half a billion parameters on (DeepSeekMath, arXiv 2402.03300; DAPO, arXiv
2503.14476); ten times the full model's rate for an adapter (LoRA Without Regret,
thinkingmachines.ai/blog/lora). The rate of the shipped models was measured with the quickstart;
rates in between are interpolated, not measured. Supervised training takes ten times the rate: 5e-6
to 2e-5 is published for full training of 7 and 8 billion parameters (Tulu 3, arXiv 2411.15124;
LIMA, arXiv 2305.11206; Alpaca), 3e-4 to 1e-3 as the best of a sweep for adapters (tinker-cookbook,
recipes/chat_sl), and 1e-3 for 135 and 360 million parameters (SmolLM2, in the alignment handbook).
It is at the careful end.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.agent.references import check_not_importing, reference_to
from lockstep.config import FILE_FORMS, flatten, from_settings, merged, nested, overlaid, read_tree
from lockstep.envs.custom import MAX_TASKS, CustomConfig, Reward
from lockstep.errors import ConfigError, located
from lockstep.models.config import ModelConfig
from lockstep.models.locate import CONFIG_FILES, locate_model
from lockstep.models.shapes import decoder_shapes, num_elements
from lockstep.recipes.memory_fit import fit_memory, left_open
from lockstep.recipes.registry import find_recipe
from lockstep.renderers.config import ChatMLConfig
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run_config import Config, ModelChoice, SupervisedConfig, check_is_rl
from lockstep.training.config import TrainerConfig

FITTED = ("custom", "docsearch", "agent", "connect")
"""Recipes whose open settings follow the model and the data."""
LEARNING_RATES = ((10**7, 1e-3), (10**8, 1e-4), (4 * 10**8, 1e-5))
"""(parameters below which it holds, learning rate of full training)."""
LARGE_LEARNING_RATE = 1e-6
LORA_FACTOR, SUPERVISED_FACTOR, LARGEST_RATE = 10, 10, 3e-3
MOST_THREADS = 8  # the bits of more threads were not compared
FORMAT_TOKENS = 64
"""Tokens of a prompt's frame, and of one turn's."""


def configure(
    recipe: str, *, tree: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """The config of a recipe, with the settings of a file or of Python (`tree`). Settings of the
    command line replace them. Open settings follow the model and the data."""
    base = find_recipe(recipe)
    tree = dict(tree or {})
    config = overlaid(base, tree, overrides)
    given = {*flatten(tree), *(text.partition("=")[0].strip() for text in overrides)}
    if config.fallback or config.placement.is_elsewhere():
        return config
    directory = locate_model(config.model, files=CONFIG_FILES)
    model = ModelConfig.from_directory(directory)
    if recipe in FITTED:
        return fitted(config, given, model, directory)
    is_open = not any(name.startswith("renderer") for name in given)
    is_qwens = isinstance(config.renderer, ChatMLConfig) and not config.renderer.enable_thinking
    if is_open and is_qwens and not model.architecture.startswith("qwen3"):
        config = replace(config, renderer=None)  # only Qwen3 has this switch; gpt-oss has harmony
    return fit_memory(config, given, model, directory, may_adapt=False)


def find_config(target: str | os.PathLike[str], settings: Mapping[str, Any]) -> Config:
    """The config of a recipe, or of a file of settings, with other settings as in a file."""
    if (path := Path(target)).suffix in FILE_FORMS:
        return read_config(path, tree=settings)
    return configure(os.fspath(target), tree=settings)


def read_config(
    path: Path, overrides: Sequence[str] = (), *, tree: Mapping[str, Any] | None = None
) -> Config:
    """The config of a JSON, YAML or TOML file. Its key `recipe` names a recipe that its settings go
    over; without it, what the file leaves open has its default. tree: settings over the file's."""
    tree = merged(read_tree(path), nested(tree or {}))
    recipe = tree.pop("recipe", None)
    check_is_rl(tree, path.parent)
    with located(str(path)):
        if recipe is not None:
            return configure(str(recipe), tree=tree, overrides=overrides)
        return from_settings(Config, tree, overrides)


def custom_config(
    *,
    model: str = "",
    reward: Reward | str = "",
    tasks: str | Path | Iterable[Any] = "",
    tools: Sequence[Any] = (),
    **settings: Any,
) -> Config:
    """The config of the recipe `custom` with functions and tasks as they are in Python.

    settings: as in a file, for example `steps=100`, `lora={"rank": 16}`, `engine="vllm"`,
    `task={"question": "prompt"}`.
    """
    check_not_importing()
    given = {"model": model, "reward": reward, "tasks": tasks}
    if missing := [f"{name}=" for name, value in given.items() if value is None or value == ""]:
        raise ConfigError(
            f"a task of your own needs model=, reward= and tasks=; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Or name a recipe: "
            "lockstep.train('quickstart')."
        )
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools must be a list of functions, found {tools!r:.60}.")
    if isinstance(tasks, Path):
        tasks = str(tasks)
    elif not isinstance(tasks, str) and not callable(tasks):  # an iterator is read once only
        if not isinstance(tasks, Iterable) or isinstance(tasks, Mapping):
            raise ConfigError(
                f"tasks must be a file, the name of a data set, or a list of tasks; found "
                f"{type(tasks).__name__}."
            )
        tasks = list(islice(tasks, MAX_TASKS + 1))
    task = {
        "type": "custom",
        "tools": [reference_to(each, name="tool") for each in tools],
        "reward": reference_to(reward, name="reward"),
        "path": reference_to(tasks, name="tasks"),
    }
    own = dict(settings.pop("task", {}))
    if twice := sorted(own.keys() & task.keys() - {"type"}):
        raise ConfigError(f"task.{twice[0]} is given beside the argument that says it: drop one.")
    return configure("custom", tree={"model": model, **settings, "task": own | task})


def learning_rate(num_parameters: int, *, is_lora: bool, is_supervised: bool = False) -> float:
    """The peak learning rate for a model of this size.

    >>> learning_rate(600_000_000, is_lora=False), learning_rate(4_000_000_000, is_lora=True)
    (1e-06, 1e-05)
    >>> learning_rate(135_000_000, is_lora=True, is_supervised=True)
    0.001
    """
    rate = next((lr for most, lr in LEARNING_RATES if num_parameters < most), LARGE_LEARNING_RATE)
    factor = (LORA_FACTOR if is_lora else 1) * (SUPERVISED_FACTOR if is_supervised else 1)
    return min(float(f"{rate * factor:.3g}"), LARGEST_RATE)


def usual_rate(config: ModelChoice, model: ModelConfig) -> float:
    """The peak learning rate for this model, by the method of the run."""
    return learning_rate(
        num_elements(decoder_shapes(model)),
        is_lora=config.lora is not None,
        is_supervised=isinstance(config, SupervisedConfig),
    )


def rate_line(config: ModelChoice, model: ModelConfig) -> str:
    """The learning rate of a run beside the usual one, with its reasons."""
    lr, usual = config.trainer.lr, usual_rate(config, model)
    method = "supervised training" if isinstance(config, SupervisedConfig) else "RL"
    what = "an adapter of" if config.lora is not None else "all of"
    size = num_elements(decoder_shapes(model))
    times = "the usual" if lr == usual else f"{lr / usual:.2g} times the usual {usual:g}"
    return f"lr {lr:g}, {times} for {method} of {what} a model with {size / 1e6:,.1f} M parameters"


def fitted_supervised(config: SupervisedConfig, given: Collection[str]) -> SupervisedConfig:
    """`config` with what the user and the recipe left open. given: paths of settings, as in
    `fitted`. Reads the model's config.json."""
    if config.fallback:
        return config
    rate = learning_rate(0, is_lora=False, is_supervised=True)  # `create` makes a tiny model
    if not config.create:
        directory = locate_model(config.model, files=CONFIG_FILES)
        model = ModelConfig.from_directory(directory)
        config = fit_memory(config, given, model, directory, may_adapt=True)
        rate = usual_rate(config, model)
    if config.trainer.lr != TrainerConfig.lr:
        return config
    return overlaid(config, nested(left_open({"trainer.lr": rate}, given)))


def fitted(config: Config, given: Collection[str], model: ModelConfig, directory: Path) -> Config:
    """`config` with open settings chosen for the model, the tasks and the machine.

    given: paths of the settings that the user gave. directory: the model's files, whose tokenizer
    measures the prompts of `custom`.
    """
    size = num_elements(decoder_shapes(model))
    is_tiny = size < LEARNING_RATES[0][0]
    on_cpu = config.expected_device == "cpu"
    open_settings: dict[str, Any] = {
        "trainer.schedule": "linear" if is_tiny else "constant",
        "trainer.min_lr_share": 0.05 if is_tiny else 0.0,
        "agent.max_turn_tokens": 64 if is_tiny else 256 if on_cpu else 1024,
        "threads": 1 if is_tiny else min(len(os.sched_getaffinity(0)), MOST_THREADS),
    }
    if size >= LEARNING_RATES[-1][0]:  # such a model is trained on a GPU, whose memory is short
        open_settings |= {"dtype": "bfloat16", "trainer.recompute": "blocks"}
    task = config.task
    if isinstance(task, CustomConfig):
        chosen = left_open(open_settings, given)
        agent = overlaid(config, {k: v for k, v in chosen.items() if k.startswith("agent.")}).agent
        counts = {split: len(task.splits[split]) for split in ("train", "eval")}
        max_turns = agent.max_turns if "agent.max_turns" in given else 8 if task.tools else 1
        groups = min(8 if is_tiny or on_cpu else 16, counts["train"])
        groups = config.groups_per_step if "groups_per_step" in given else groups
        prompt = _longest_prompt(task, Tokenizer.from_file(directory))
        # A call's output is as long as a reply, by guess; max_tokens bounds the episode anyway.
        longest = prompt + max_turns * (FORMAT_TOKENS + agent.max_turn_tokens) * 2
        passes = 3 * counts["train"] // groups
        open_settings |= {
            "agent.max_turns": max_turns,
            "groups_per_step": groups,
            "max_tokens": min(model.max_positions, max(256, longest), 512 if is_tiny else 16384),
            "steps": min(max(passes, 60), 200),
            "evaluation.num_tasks": min(counts["eval"], 128),
            "evaluation.every": 0 if is_tiny else 50,
        }
    config = overlaid(config, nested(left_open(open_settings, given)))
    config = fit_memory(config, given, model, directory, may_adapt=True)
    rate = {"trainer.lr": usual_rate(config, model)}
    return overlaid(config, nested(left_open(rate, given)))


def _longest_prompt(task: CustomConfig, tokenizer: Tokenizer) -> int:
    """Tokens of the longest prompt, by its text; the format adds its frame."""
    texts = [
        "\n".join(message.content for message in task.opening(each))
        for split in ("train", "eval")
        for each in task.splits[split]
    ]
    longest = max(texts, key=len)
    schemas = "\n".join(f"{t.name} {t.description} {t.parameters}" for t in task.functions)
    return FORMAT_TOKENS + sum(map(len, tokenizer.encode_batch([longest, schemas])))
