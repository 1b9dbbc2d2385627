"""The weights at hand: a model's directory, weights given for comparison, checkpoints of a run. No
torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
    is_fallback: bool = False
    """Whether transformers computes it: an architecture that the decoder lacks."""

    @property
    def model_directory(self) -> Path:
        return self.base or self.directory


@dataclass(frozen=True, kw_only=True)
class WeightsAtHand:
    """All weights that can score rows."""

    all: tuple[Weights, ...]
    """The first is the trained model, unless steps say which."""
    config: ModelConfig | FallbackConfig
    dtype: str = "float32"
    """dtype of the run, if it is known."""

    def of_step(self, step: int | None) -> int | None:
        """Index of the weights that the trainer ran at this step; None if they are not at hand."""
        if all(w.step is None for w in self.all):
            return 0
        return next((i for i, w in enumerate(self.all) if w.step == step), None)


def weights_at_hand(
    dump: Dump, model: str | Path, *, adapter: str | Path = "", against: Sequence[str | Path] = ()
) -> WeightsAtHand:
    """The weights to score by. model: a directory, a shipped name, or OWN for those of a run.
    adapter: a directory in PEFT's form, for that model. against: other sets that may explain a
    difference.

    Raises ConfigError or CheckpointError for anything but a model with the shapes of the first.
    """
    is_own = str(model) == OWN
    if is_own and not isinstance(dump, RunDump):
        raise ConfigError(
            f"--model {OWN} takes the weights of a run of Lockstep; {dump.path} is in the format "
            f"{dump.format}, which has none. Name the directory: --model DIR."
        )
    if is_own:
        found, dtype = _of_run(dump.path)
    elif adapter:
        base = locate_model(str(model))
        found = [Weights(name=str(adapter), directory=_adapter(adapter), base=base)]
        dtype = "float32"
    else:
        found, dtype = [Weights(name=str(model), directory=locate_model(str(model)))], "float32"
    config, is_fallback = _config_of(found[0].model_directory)
    for other in against:
        path = Path(other).expanduser()
        if (path / POLICY).is_dir():
            path = path / POLICY  # a checkpoint of a run
        if (path / ADAPTER_CONFIG).is_file():
            found.append(Weights(name=str(other), directory=path, base=found[0].model_directory))
            continue
        path = locate_model(str(path))
        if _config_of(path)[0] != config:
            raise CheckpointError(
                f"--against {other}: a model of other shapes than {found[0].model_directory}. "
                "Give checkpoints of the same model."
            )
        found.append(Weights(name=str(other), directory=path))
    if is_fallback:
        found = [
            Weights(name=w.name, directory=w.directory, step=w.step, is_fallback=True)
            for w in found
        ]
    return WeightsAtHand(all=tuple(found), config=config, dtype=dtype)


def _adapter(adapter: str | Path) -> Path:
    path = Path(adapter).expanduser()
    if not (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"--adapter {adapter}: there is no {ADAPTER_CONFIG} in it.")
    return path


def _config_of(directory: Path) -> tuple[ModelConfig | FallbackConfig, bool]:
    try:
        return ModelConfig.from_directory(directory), False
    except CheckpointError:
        return FallbackConfig.from_directory(directory), True


def _of_run(path: Path) -> tuple[list[Weights], str]:
    """The model that the run started from, as the weights of step 0, and its last checkpoints."""
    run = load_run(path)
    base = locate_model(str(run.config["model"]))
    is_lora = run.config.get("lora") is not None
    started = Weights(name=str(run.config["model"]), directory=base, step=0)
    kept: list[Weights] = []
    for folder in sorted((path / "checkpoints").glob("step-*")):
        policy, state = folder / POLICY, folder / "state.json"
        if not policy.is_dir() or not state.is_file():
            continue
        step = int(json.loads(state.read_text("utf-8"))["state"]["step"])
        kept.append(
            Weights(name=folder.name, directory=policy, base=base if is_lora else None, step=step)
        )
    kept.sort(key=lambda weights: weights.step or 0)
    return [started, *kept[-(MAX_WEIGHTS - 1) :]], str(run.config.get("dtype", "float32"))
