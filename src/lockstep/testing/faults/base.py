"""The base of all faults, and how they are injected into a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar

from lockstep.agent.tasks import derive_seed
from lockstep.config import Checked, Interval, resolve, tag, to_dict
from lockstep.engines.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.renderers.base import Renderer
from lockstep.run.hooks import LogProbs, RunHooks, hooked
from lockstep.run_config import Config
from lockstep.types import Sample

if TYPE_CHECKING:
    from lockstep.engines.base import Engine, EngineContext
    from lockstep.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class FaultConfig(RunHooks, Checked):
    """Base of every fault. A subclass is a kind of `--fault`, by its tag; it overrides one of the
    hooks `make_engine`, `make_trained`, `change_rows` or `after_update`.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class DoubledRows(FaultConfig):
    ...     def change_rows(self, rows, renderer, log_probs):
    ...         return [*rows, *rows]
    >>> tag(DoubledRows)
    'doubled_rows'
    """

    nonzero: ClassVar[Mapping[str, str]] = {}
    """Setting that may not be 0 -> what the fault does by it."""
    needs: ClassVar[str] = ""
    """Part of the model that the fault is in, by the words of `check`."""
    verifies_sync: ClassVar[bool] = True
    """False for a fault that the verification of weights would refuse before it could act."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, does in self.nonzero.items():
            if not getattr(self, name):
                raise ConfigError(f"{name}=0 {does} nothing; expected another whole number.")

    def check(self, config: Config, model: ModelConfig, renderer: Renderer) -> None:
        layer = getattr(self, "layer", -1)
        at = slice(layer, layer + 1) if layer >= 0 else slice(None)
        has_sinks = model.has_sinks and bool(range(model.num_layers)[at])
        has: dict[str, bool] = {
            "a router": model.is_moe,
            "routes that the trainer replays": config.trainer.routing_replay == "rollout",
            "attention sinks": has_sinks,
            "attention sinks that learn": has_sinks and config.lora is None,
            "a sliding window": any(model.windows[at]),
        }
        if not has.get(self.needs, True):
            where = f" in layer {layer}" if layer >= 0 else ""
            raise ConfigError(
                f"fault {tag(type(self))} needs a model with {self.needs}{where}; "
                f"model={config.model} ({model.architecture}) has none in this run."
            )

    @property
    def replaces_trained(self) -> bool:
        """True if `make_trained` gives another decoder."""
        return type(self).make_trained is not RunHooks.make_trained

    def describe(self) -> str:
        """The fault in one line, with its settings."""
        settings = "".join(f" {f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{tag(type(self))}{settings}"


@dataclass(frozen=True, kw_only=True)
class RowFault(FaultConfig):
    """Base of faults that hit a share of the rows, chosen by `seed` and the row's id (which names
    step, task and sample): a resumed run hits the same rows."""

    share: Annotated[float, Interval("(0, 1]")] = 1.0
    """Share of the rows that are hit."""
    seed: int = 0
    """Seed of the choice."""

    def is_hit(self, row: Sample) -> bool:
        return is_chosen(self.share, self.seed, row.id)

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        return [self.changed(row, renderer) if self.is_hit(row) else row for row in rows]

    def changed(self, row: Sample, renderer: Renderer) -> Sample:
        """A new row with the fault; `row` itself if it does not apply."""
        raise NotImplementedError(f"{type(self).__name__} changes no row")


def is_chosen(share: float, seed: int, *names: str | int) -> bool:
    """True if these names are in the share that `seed` chooses."""
    return derive_seed(seed, *names) < share * 2.0**63


def check_one(faults: Sequence[FaultConfig], what: str) -> None:
    """Raises ConfigError for several faults if the last would undo the others."""
    if len(faults) > 1:
        names = " and ".join(tag(type(fault)) for fault in faults)
        raise ConfigError(f"{names} each {what}: choose one.")


class Faults(RunHooks):
    """Several faults of one run, applied in order."""

    def __init__(self, faults: Sequence[FaultConfig]) -> None:
        self.faults = tuple(faults)
        self.verifies_sync = all(fault.verifies_sync for fault in faults)
        names = ", ".join(tag(type(fault)) for fault in faults)
        self.no_contract = (
            f"the fault {names} is injected, which breaks it on purpose" if faults else ""
        )
        self.recorded = tuple({"type": tag(type(f)), **to_dict(f)} for f in faults)
        self._engines = [f for f in faults if type(f).make_engine is not RunHooks.make_engine]

    def check(
        self, config: Config, model: ModelConfig | FallbackConfig, renderer: Renderer
    ) -> None:
        if not self.faults:
            return
        if isinstance(model, FallbackConfig):
            raise ConfigError(
                "fallback=true: faults are injected into the decoder and its engine. Leave --fault "
                "out."
            )
        if (world := config.num_processes) > 1:
            raise ConfigError(
                f"--fault works in one process, and this run has {world}. Leave "
                "parallel.processes at 0 and start it without torchrun."
            )
        check_one(self._engines, "replace the engine")
        check_one([f for f in self.faults if f.replaces_trained], "replace the trainer's decoder")
        for fault in self.faults:
            fault.check(config, model, renderer)

    def plan(self) -> list[str]:
        return [
            f"fault      {fault.describe()}, injected: this run is broken on purpose"
            for fault in self.faults
        ]

    def make_engine(self, config: EngineConfig, context: EngineContext) -> Engine:
        return (*self._engines, RunHooks())[0].make_engine(config, context)

    def make_trained(self, model: Decoder) -> Decoder:
        for fault in self.faults:
            model = fault.make_trained(model)
        return model

    def change_rows(
        self, rows: Sequence[Sample], renderer: Renderer, log_probs: LogProbs
    ) -> list[Sample]:
        for fault in self.faults:
            rows = fault.change_rows(rows, renderer, log_probs)
        return list(rows)

    def after_update(self, rows: Sequence[Sample], log_probs: LogProbs) -> None:
        for fault in self.faults:
            fault.after_update(rows, log_probs)


def injected(*faults: FaultConfig) -> AbstractContextManager[None]:
    """Runs that are started inside of this block have these faults, applied in order.

    >>> with injected():
    ...     pass
    """
    return hooked(Faults(faults))


@dataclass(frozen=True, kw_only=True)
class _Choice:
    fault: FaultConfig | None = None


def parse_fault(text: str) -> FaultConfig:
    """The fault that `--fault KIND,setting=value,...` describes.

    Raises ConfigError for an unknown kind or setting.
    """
    kind, *settings = text.split(",")
    words = [f"fault={kind}", *(f"fault.{setting}" for setting in settings)]
    fault = resolve(_Choice(), words).fault
    if fault is None:
        raise ConfigError(f"--fault {text}: name a kind; the documentation (Faults) lists them.")
    return fault


def split_faults(words: Sequence[str]) -> tuple[list[str], list[FaultConfig]]:
    """(settings, faults) of the words of a command line.

    >>> split_faults(["steps=3", "--fault=shifted_logprobs,offset=2"])
    (['steps=3'], [ShiftedLogprobs(share=1.0, seed=0, offset=2)])
    """
    option = "--fault="
    faults = [parse_fault(word.removeprefix(option)) for word in words if word.startswith(option)]
    return [word for word in words if not word.startswith(option)], faults
