"""The frozen seats of a run: found before a model is loaded, and opened beside the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.agent.config import FrozenSeat
from lockstep.agent.loop import sampling_of
from lockstep.agent.match_loop import SeatPolicy
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.models.locate import CONFIG_FILES
from lockstep.run.preflight import read_model_files
from lockstep.run.served import Served, find_served, open_served
from lockstep.run_config import Config
from lockstep.store.run import load_run


def find_seats(config: Config) -> dict[str, Served]:
    """Seat -> the frozen policy that plays it. Raises ConfigError naming the seat, without a model
    in memory."""
    frozen = {name: s for name, s in config.seats.items() if isinstance(s, FrozenSeat)}
    found: dict[str, Served] = {}
    for name, seat in frozen.items():
        where = f"seats.{name}.model={seat.model}"
        if (Path(seat.model) / "environment.json").is_file():
            steps = ", ".join(map(str, load_run(seat.model).checkpoints())) or "none"
            raise ConfigError(
                f"{where} is a run, and an opponent is one of its checkpoints: give RUN@STEP. It "
                f"has {steps}."
            )
        if isinstance(seat.engine, EmbeddedConfig) and config.expected_device == "cuda":
            raise ConfigError(
                f"{where} with engine=embedded: on a GPU the plan of the memory has no room for a "
                f"second model. Serve it elsewhere and set seats.{name}.engine=vllm "
                f"seats.{name}.engine.urls=http://HOST:PORT, or run on device=cpu."
            )
        try:
            served = find_served(seat.model, (), tree={"max_tokens": config.max_tokens})
            choice = replace(
                served.config,
                name=name,
                engine=seat.engine,
                contract=config.contract,
                dtype=config.compute_dtype,
                **{key: getattr(config, key) for key in ("device", "threads", "seed")},
            )
            read_model_files(choice, files=CONFIG_FILES)
        except LockstepError as error:
            raise ConfigError(f"{where}: {error}") from error
        found[name] = replace(served, config=choice)
    return found


def open_seats(
    config: Config, *, scratch: Path | None, on_wait: Callable[[str], None] = lambda text: None
) -> dict[str, SeatPolicy]:
    """Opens an engine for each frozen seat. They draw as in training in every evaluation too, so
    that the policy meets the same opponent. Under a contract they compute by ops whose result does
    not depend on the batch: a resumed run meets the same replies."""
    out: dict[str, SeatPolicy] = {}
    for name, served in find_seats(config).items():
        place = None if scratch is None else scratch / f"seat-{name}"
        model_files, engine = open_served(
            served, scratch=place, on_wait=on_wait, contract=config.contract
        )
        seat = config.seats[name]
        assert isinstance(seat, FrozenSeat), "only frozen seats are found"
        out[name] = SeatPolicy(
            engine=engine,
            renderer=model_files.renderer,
            sampling=sampling_of(config.agent),
            name=seat.model,
        )
    return out
