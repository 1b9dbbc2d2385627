"""Sends weights from one trainer to one engine, in a form that the engine takes, and verifies it.

publisher = Publisher(engine, trainer, model, SyncConfig())
metrics = await publisher.publish(trainer.version)
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lockstep.engines.base import Capabilities, Engine, WeightSource
from lockstep.errors import CapabilityError, EngineError, LockstepError
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import HFTensors, hf_tensors, save_checkpoint
from lockstep.models.peft_io import save_adapter
from lockstep.models.sharding import copy_whole, mesh_of
from lockstep.sync.changes import WeightChange
from lockstep.sync.config import SyncConfig
from lockstep.sync.directory import WeightsDirectory, size_of
from lockstep.sync.following import Follower, Look
from lockstep.sync.probe import Probe
from lockstep.sync.qualify import Qualification, Qualifier
from lockstep.training.trainer import Trainer

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

T = TypeVar("T")

Level = Literal["shared", "none", "version", "qualified", "correlated"]
"""How well it is verified that the engine runs the trainer's weights (docs/engines.md). shared:
they are the same memory. none: nothing was loaded yet. version: the engine reports it. qualified:
it ran a large change of every group of tensors. correlated: it has followed the trainer since."""
_ORDER: tuple[WeightSource, ...] = ("shared", "adapter", "tensors", "directory")
_NUMBER: dict[Level, float] = {"none": 0.0, "version": 1.0, "qualified": 2.0, "correlated": 3.0}


class Publisher:
    """The only way for weights to reach an engine.

    With several ranks each has an engine of its own, and all call `publish` together.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        sampled: Decoder,
        config: SyncConfig | None = None,
        *,
        place: Path | None = None,
        ranks: Ranks | None = None,
        probed: Mapping[str, Any] | None = MappingProxyType({}),
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """sampled: the model of an engine in this process: the trained one itself, unless that is
        sharded. place: directory for versions; None is a temporary one. probed: `left_out` and
        `max_tokens` of the probe; None if an injected fault changes the weights: then nothing is
        verified.

        Raises CapabilityError if the engine takes no form that `config` allows.
        """
        self.engine, self.trainer, self.sampled = engine, trainer, sampled
        self.config, self.ranks, self.warn = config or SyncConfig(), ranks, warn
        capabilities = engine.capabilities
        self.form: WeightSource = choose_form(
            self.config, capabilities, has_adapter=trainer.model.lora is not None
        )
        self.version: int | None = None
        """Version that was loaded last."""
        self.qualification: Qualification | None = None
        self.last_look: Look | None = None
        self.num_bytes = 0
        """Size of the last load."""
        self.seconds = 0.0
        """Duration of the last load."""
        self._is_copied = False
        self._place, self._directory = place, None
        self._followers: dict[str, Follower] = {}
        """Name of each replica of the engine -> its follower."""
        self._is_verifying = probed is not None or self.config.qualify == "on"
        self._probe = None
        if self.form != "shared" and capabilities.has_score and self._is_verifying:
            self._probe = Probe(self.config, engine, trainer, **(probed or {}))
        self._is_qualifying = self._probe is not None and self.config.qualify != "off"
        if self.config.qualify == "on" and not self._is_qualifying:
            why = "cannot score given ids, which shows what weights it runs"
            if self.form == "shared":
                why = "shares the trainer's weights: there is nothing to qualify"
            raise CapabilityError(
                f"sync.qualify=on: engine {capabilities.name} {why}. Set sync.qualify=auto."
            )

    async def publish(self, version: int) -> dict[str, float]:
        """Loads the trainer's weights into the engine as this version. Returns `sync/...` metrics.

        The first call qualifies the engine: nothing may sample before it returns. Raises
        EngineError if the engine does not take the weights, or takes others; its weights are then
        unknown.
        """
        if self.form == "shared":
            await self._keeping(self._send_shared(version))
            return {}
        if version == self.version:
            return {}
        self.version = None
        if self._is_qualifying and self.qualification is None:
            await self._qualify(version)
        else:
            await self._keeping(self._send(version))
        self.version = version
        metrics = {
            "time/sync_seconds": self.seconds,
            "sync/bytes": float(self.num_bytes),
            "sync/level": _NUMBER[self.level],
        }
        if self._probe is not None:
            metrics |= await self._look(self._probe, version)
        return metrics

    @property
    def level(self) -> Level:
        if self.form == "shared":
            return "shared"
        if self.version is None:
            return "none"
        if self.qualification is None or not self.qualification.is_passed:
            return "version"
        is_following = self.last_look is not None and self.last_look.is_following
        return "correlated" if is_following else "qualified"

    @property
    def has_copy(self) -> bool:
        """True if an engine in this process runs a copy of the trained model."""
        return self.sampled.embedding is not self.trainer.model.embedding

    def describe(self) -> str:
        """One line: the form, and how well it is verified."""
        place = self._place or "a temporary directory"
        how = {
            "shared": "a copy in this process, written at every sync"
            if self.has_copy
            else "the engine reads the trainer's weights in this process: nothing is sent",
            "tensors": "tensors, one by one",
            "directory": f"a checkpoint per version in {place}",
            "adapter": "the adapter alone, in PEFT's form",
        }[self.form]
        if self.form == "shared":
            return how
        if self.qualification is not None:
            return f"{how}. Verified as {self.level}: {self.qualification.describe()}"
        if self._is_qualifying:
            return f"{how}; qualified before the first step"
        why = "sync.qualify=off" if self.config.qualify == "off" else "it cannot score"
        if not self._is_verifying:
            why = "a fault is injected"
        return f"{how}. Not qualified: {why}"

    def facts(self) -> dict[str, Any]:
        """The record of the run."""
        found: dict[str, Any] = {"form": self.form, "level": self.level, "line": self.describe()}
        if self.qualification is not None:
            found["qualification"] = asdict(self.qualification)
        return found

    def close(self) -> None:
        """Removes the versions that were written."""
        if self._directory is not None:
            self._directory.close()

    # -- a load -----------------------------------------------------------------------------------

    async def _keeping(self, load: Awaitable[None]) -> None:
        """Awaits a load; running requests keep their keys and values if `sync.kv` says so."""
        if self.config.kv == "drop":
            await load
            return
        await self.engine.pause()
        try:
            await load
        finally:
            await self.engine.resume(kv="keep")

    async def _send_shared(self, version: int) -> None:
        if self.has_copy:
            # No await from here to the load: a step must not sample with weights of two versions.
            is_known = self._is_copied and not self.trainer.config.expert_bias_rate
            copy_whole(self.trainer.model, self.sampled, is_trained_only=is_known)
            self._is_copied = True
        await self._load(None, version)
        self.version = version

    async def _send(self, version: int) -> None:
        """Loads the trainer's current weights."""
        began = time.perf_counter()
        if self.form == "tensors":
            tensors = hf_tensors(self.trainer.model)
            self.num_bytes = _size(tensors)
            await self._load(tensors, version)
        else:
            directory = self._written(version)
            await self._load(str(directory), version)
            if self._directory is not None:
                self._directory.keep_only(directory)
        self.seconds = time.perf_counter() - began

    async def _load(self, source: Mapping[str, Any] | str | None, version: int) -> None:
        engine, error = self.engine, None
        name = engine.capabilities.name
        try:
            await engine.load_weights(source, version=version)
            if self._is_verifying and engine.version != version:
                raise EngineError(
                    f"it says that it runs version {engine.version} after the load of {version}"
                )
        except (LockstepError, OSError) as caught:
            error = EngineError(
                f"sync: engine {name} did not take version {version} ({self.form}): {caught} Its "
                "weights are unknown, so nothing is sampled from it. The trainer has the update: "
                "mend the engine and go on with resume=true."
            )
            error.__cause__ = caught
            if isinstance(source, HFTensors) and mesh_of(self.trainer.model.embedding) is not None:
                source.finish()
        self._raise_alike(error)
        if engine.capabilities.has_sleep:  # it may have slept while the trainer trained
            await engine.wake()

    def _written(self, version: int) -> Path:
        """The directory of this version; rank 0 writes it, and all ranks gather sharded tensors."""
        model, like = self.trainer.model, self.trainer.like
        if self._directory is None and (self.ranks is None or self.ranks.is_leader):
            self._directory = WeightsDirectory(self._place)

        def write(directory: Path) -> None:
            if self.form == "adapter":
                save_adapter(model, directory, base=like)
            else:
                save_checkpoint(model, directory, like=like)

        path, error = None, None
        if self._directory is not None:
            try:
                self._directory.check_room(version, self._expected_bytes())
            except EngineError as caught:
                error = caught
        self._raise_alike(error)
        if self._directory is not None:
            path = self._directory.write(version, write)
        elif self.form == "directory":
            save_checkpoint(model, self.trainer.like, like=like, is_writer=False)
        if self.ranks is not None:
            path = self.ranks.from_leader(path)
        assert path is not None, "the leader has a directory"
        self.num_bytes = size_of(path)
        return path

    def _expected_bytes(self) -> int:
        if self.form == "adapter":
            factors = (p for name, p in self.trainer.model.named_parameters() if "lora" in name)
            return sum(p.numel() * p.element_size() for p in factors)
        return _size(hf_tensors(self.trainer.model))

    # -- verification -----------------------------------------------------------------------------

    async def _qualify(self, version: int) -> None:
        assert self._probe is not None, "only an engine that scores is qualified"
        change = WeightChange(self.trainer.model, is_adapter_only=self.form == "adapter")
        qualifier = Qualifier(self._probe, change, self._send, self._share)
        found = self.qualification = await qualifier.run(version)
        if found.is_passed:
            return
        name = self.engine.capabilities.name
        sources = self.engine.capabilities.weight_sources
        others = [form for form in sources if form not in (self.form, "shared")]
        advice = f"Try sync.form={others[0]}, or another" if others else "Use another"
        raise EngineError(
            f"sync: engine {name} does not run the sent weights ({self.form}): "
            f"{found.describe()}. Nothing was sampled. {advice} version of the engine, or "
            "engine=embedded. sync.qualify=off goes on regardless, with a sampler that is not the "
            "policy in training."
        )

    async def _look(self, probe: Probe, version: int) -> dict[str, float]:
        """`sync/...` metrics of engine and trainer on the probe, for the worst replica of all
        ranks."""
        began = time.perf_counter()
        ours, by_each = probe.by_trainer(), await probe.by_engines(version=version)
        looks: list[tuple[Look, str]] = []
        for name, theirs in by_each.items():
            follower = self._followers.setdefault(name, Follower(self.config.window))
            looks.append((follower.look(ours, theirs), name))
        found, name = max(
            (look for of_rank in self._share(looks) for look in of_rank),
            key=lambda look: (bool(look[0].alarm), look[0].gap),
        )
        self.last_look = found
        if found.alarm:
            self.warn(
                f"sync: version {version}: {f'{name}: ' * bool(name)}{found.alarm}. The engine "
                "samples from other weights than the trainer's."
            )
        metrics = {
            "time/sync_verify_seconds": time.perf_counter() - began,
            "sync/level": _NUMBER[self.level],
            "sync/alarm": float(bool(found.alarm)),
            **found.metrics,
        }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    # -- ranks ------------------------------------------------------------------------------------

    def _share(self, mine: T) -> list[T]:
        return [mine] if self.ranks is None else self.ranks.gather(mine)

    def _raise_alike(self, error: EngineError | None) -> None:
        """Raises on every rank if any rank has an error, so that none waits in vain."""
        texts = self._share(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise EngineError(f"rank {rank}: {text}")


def choose_form(
    config: SyncConfig, capabilities: Capabilities, *, has_adapter: bool
) -> WeightSource:
    """The form for sending weights to an engine. Raises CapabilityError if there is none."""
    offered: list[WeightSource] = [
        form
        for form in _ORDER
        if form in capabilities.weight_sources and (form != "adapter" or has_adapter)
    ]
    found: WeightSource | None = next((f for f in offered if config.form in ("auto", f)), None)
    if found is None:
        takes = ", ".join(capabilities.weight_sources) or "no weights at all"
        if config.form == "adapter" and not has_adapter:
            takes += ", and this run has no adapter"
        advice = "Choose one of these." if offered else "It cannot follow a training run."
        raise CapabilityError(
            f"sync.form={config.form}: engine {capabilities.name} takes {takes}. {advice}"
        )
    return found


def _size(tensors: Mapping[str, Any]) -> int:
    outlines = tensors.outlines() if isinstance(tensors, HFTensors) else tensors
    return sum(t.numel() * t.element_size() for t in outlines.values())
