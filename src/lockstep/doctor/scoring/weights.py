"""The weights at hand: a model's directory, weights given for comparison, checkpoints of a run. No
torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.inputs.run_dump import RunDump
from lockstep.doctor.rows import Rows
from lockstep.doctor.tokenization import locate
from lockstep.errors import CheckpointError, ConfigError, DataError, LockstepError
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


@dataclass(frozen=True, kw_only=True)
class WeightsAtHand:
    """All weights that can score rows."""

    all: tuple[Weights, ...]
    """The first is the trained model, unless steps say which."""
    config: ModelConfig | FallbackConfig

    def of_step(self, step: int | None) -> int | None:
        """Index of the weights that the trainer ran at this step; None if they are not at hand."""
        if all(w.step is None for w in self.all):
            return 0
        return next((i for i, w in enumerate(self.all) if w.step == step), None)

    def rows_of(self, dump: Dump, facts: Facts) -> Iterator[Rows]:
        """The rows of the dump. Raises DataError if its facts name a model of another architecture
        or size, and for ids or experts that the model does not have."""
        named = c = self.config
        with suppress(LockstepError):  # it is not on this machine
            named = _config_of(locate(facts.model, may_fetch=False))
        if (of_dump := _told(named)) != _told(c):
            raise self._refusal(dump, f"the rows are of {facts.model} ({of_dump})", _told(c))
        experts = (len(c.routed_layers), c.num_active_experts)
        for rows in dump.read():
            is_beyond = (rows.token_ids < 0) | (rows.token_ids >= c.vocab_size)
            if is_beyond.any():
                row, place = rows.where(at := int(np.argmax(is_beyond)))
                what = f"row {row}, token {place} has the id {rows.token_ids[at]}"
                raise self._refusal(dump, what, f"ids up to {c.vocab_size - 1}")
            routes = rows.routed_experts if isinstance(c, ModelConfig) else None
            if routes is not None and routes.ndim == 3:
                is_beyond = (routes >= c.num_experts).any((1, 2)) | (routes.shape[1:] != experts)
                if is_beyond.any():
                    row, place = rows.where(at := int(np.argmax(is_beyond)))
                    what = f"row {row}, token {place} has the experts {routes[at].tolist()!s:.60}"
                    told = f"{experts[0]} layers that send a token to {experts[1]} of"
                    raise self._refusal(dump, what, f"{told} {c.num_experts} experts")
            yield rows

    def _refusal(self, dump: Dump, found: str, has: str) -> DataError:
        return DataError(
            f"{dump.path}: {found}, and {self.all[0].name} has {has}: the rows are of another "
            "model. Give theirs (--model DIR), or leave --model out."
        )


def _told(config: ModelConfig | FallbackConfig) -> str:
    """Facts that every checkpoint of a model has in common."""
    names = ("architecture", "num_layers", "hidden_size", "num_experts")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def weights_at_hand(
    dump: Dump, model: str | Path, *, adapter: str | Path = "", against: Sequence[str | Path] = ()
) -> WeightsAtHand:
    """The weights to score by. model: a directory, a shipped name, or OWN for a run's.
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
    config = _config_of(first)
    for other in against:
        path = Path(other).expanduser()
        if (path / POLICY).is_dir():
            path = path / POLICY  # a checkpoint of a run
        is_adapter = (path / ADAPTER_CONFIG).is_file()
        path = path if is_adapter else locate_model(str(path))
        if not is_adapter and _config_of(path) != config:
            raise CheckpointError(f"--against {other}: a model of other shapes than {first}.")
        found.append(Weights(name=str(other), directory=path, base=first if is_adapter else None))
    size, is_fallback = dump.facts.vocab_size, isinstance(config, FallbackConfig)
    if isinstance(config, ModelConfig):
        config = config.with_vocabulary(size)
    return WeightsAtHand(
        all=tuple(replace(w, vocab_size=size, is_fallback=is_fallback) for w in found),
        config=config,
    )


def _config_of(directory: Path) -> ModelConfig | FallbackConfig:
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
