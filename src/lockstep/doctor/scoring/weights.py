"""The weights at hand: a model's directory, weights given for comparison, checkpoints of a run. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.doctor.inputs.base import Dump
from lockstep.doctor.inputs.run_dump import RunDump
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.models.locate import locate_model
from lockstep.models.peft_format import CONFIG as ADAPTER_CONFIG
from lockstep.store.run import load_run

OWN = "own"
"""Replaces a directory: the model that the run started from, and its checkpoints."""
MAX_WEIGHTS = 6
"""Sets of weights to score by: each costs a forward over the sample. Faults of weights are nearly
always one or two versions back, or the model that training began with."""
POLICY = "policy"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One set of weights on disk."""

    name: str
    """Name in findings."""
    directory: Path
    """Directory of a Hugging Face model, or of an adapter in PEFT's form."""
    base: Path | None = None
    """Model of an adapter; None for a whole model."""
    step: int | None = None
    """Training step whose rows it scores, in a run; None if unknown."""
    vocab_size: int | None = None
    """As for `ModelConfig.with_vocabulary`."""
    is_fallback: bool = False
    """True if transformers computes it: an architecture that the decoder lacks."""

    @property
    def model_directory(self) -> Path:
        return self.base or self.directory


def described(config: ModelConfig | FallbackConfig) -> str:
    """Facts that every checkpoint of a model has in common."""
    names = ("architecture", "num_layers", "hidden_size", "num_experts")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def weights_at_hand(
    dump: Dump, model: str | Path, *, adapter: str | Path = "", against: Sequence[str | Path] = ()
) -> tuple[tuple[Weights, ...], ModelConfig | FallbackConfig]:
    """The weights to score by, the trained model first unless steps say which; and their config.

    model: a directory, a shipped name, or OWN for a run's.
    adapter: a directory in PEFT's form, for that model. against: other sets that may explain a
    difference.

    Raises ConfigError or CheckpointError for anything but a model with the shapes of the first.
    """
    if str(model) == OWN:
        if not isinstance(dump, RunDump):
            raise ConfigError(
                f"--model {OWN} takes the weights of a run of Lockstep; {dump.path} is in the "
                f"format {dump.format}, which has none. Name the directory: --model DIR."
            )
        found = _of_run(dump.path)
    elif adapter:
        path = Path(adapter).expanduser()
        if not (path / ADAPTER_CONFIG).is_file():
            raise CheckpointError(f"--adapter {adapter}: there is no {ADAPTER_CONFIG} in it.")
        found = [Weights(name=str(adapter), directory=path, base=locate_model(str(model)))]
    else:
        found = [Weights(name=str(model), directory=locate_model(str(model)))]
    first = found[0].model_directory
    config = config_of(first)
    for other in against:
        path = Path(other).expanduser()
        if (path / POLICY).is_dir():
            path = path / POLICY  # a checkpoint of a run
        is_adapter = (path / ADAPTER_CONFIG).is_file()
        path = path if is_adapter else locate_model(str(path))
        if not is_adapter and config_of(path) != config:
            raise CheckpointError(f"--against {other}: a model of other shapes than {first}.")
        found.append(Weights(name=str(other), directory=path, base=first if is_adapter else None))
    size, is_fallback = dump.facts.vocab_size, isinstance(config, FallbackConfig)
    if isinstance(config, ModelConfig):
        config = config.with_vocabulary(size)
    every = (replace(w, vocab_size=size, is_fallback=is_fallback) for w in found)
    return tuple(every), config


def config_of(directory: Path) -> ModelConfig | FallbackConfig:
    try:
        return ModelConfig.from_directory(directory)
    except CheckpointError:
        return FallbackConfig.from_directory(directory)


def _of_run(path: Path) -> list[Weights]:
    """The model that the run started from, as the weights of step 0, and its last checkpoints."""
    run = load_run(path)
    base = locate_model(str(run.config["model"]))
    of = base if run.config.get("lora") is not None else None
    kept = [
        Weights(name=folder.name, directory=folder / POLICY, base=of, step=step)
        for step, folder in run.checkpoints().items()
        if (folder / POLICY).is_dir()
    ]
    started = Weights(name=str(run.config["model"]), directory=base, step=0)
    return [started, *kept[-(MAX_WEIGHTS - 1) :]]
