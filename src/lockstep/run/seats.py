"""The seats of a run that its policy does not play: checked before a model is loaded, and opened
beside the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.agent.config import FrozenSeat
from lockstep.agent.loop import sampling_of
from lockstep.agent.turns import Policy
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.models.locate import CONFIG_FILES
from lockstep.run.build import Parts, SharedBase, build, load_model
from lockstep.run.preflight import ModelFiles, check_shared_base, read_model_files
from lockstep.run.served import Served, find_served, open_served
from lockstep.run_config import Config
from lockstep.store.run import load_run


def find_seats(config: Config) -> dict[str, Served]:
    """Seat -> the frozen policy that plays it. Raises ConfigError naming the seat, without a model
    in memory, also for a seat with a policy of its own that could not be trained."""
    for seat in config.own_seats:
        check_shared_base(config, f"seats.{seat}=own trains a second adapter over one model")
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
                **{key: getattr(config, key) for key in ("device", "threads", "seed", "vision")},
            )
            read_model_files(choice, files=CONFIG_FILES)
        except LockstepError as error:
            raise ConfigError(f"{where}: {error}") from error
        found[name] = replace(served, config=choice)
    return found


def open_seats(
    config: Config, *, scratch: Path | None, on_wait: Callable[[str], None] = lambda text: None
) -> dict[str, Policy]:
    """Opens an engine for each frozen seat. In evaluations too they draw as in training, so that
    the policy has the same opponent. Under a contract their ops do not depend on the batch, so a
    resumed run gets the same replies."""
    out: dict[str, Policy] = {}
    for name, served in find_seats(config).items():
        place = None if scratch is None else scratch / f"seat-{name}"
        model_files, engine = open_served(
            served, scratch=place, on_wait=on_wait, contract=config.contract
        )
        seat = config.seats[name]
        assert isinstance(seat, FrozenSeat), "only frozen seats are found"
        out[name] = Policy(
            engine=engine,
            renderer=model_files.renderer,
            sampling=sampling_of(config.agent),
            name=seat.model,
        )
    return out


def build_policies(
    config: Config,
    model_files: ModelFiles,
    *,
    checkpoint: Path | None = None,
    base: SharedBase | None = None,
    scratch: Path | None = None,
    **options: Any,
) -> Parts:
    """The parts of a run with the policies of all its seats. checkpoint: their first weights; None
    takes the config's. Other arguments: see `build`."""
    from lockstep.training.checkpoint import SEATS

    own_seats, is_made = config.own_seats, base is None
    if own_seats and base is None:
        base = SharedBase(load_model(replace(config, lora=None), model_files))

    def built(config: Config, at: Path | None) -> Parts:
        weights = None if at is None else at / "policy"
        return build(config, model_files, weights=weights, base=base, scratch=scratch, **options)

    parts = built(config, checkpoint)
    parts.own = {
        seat: built(
            replace(config, name=f"{config.name}.{seat}"),
            None if checkpoint is None else checkpoint / SEATS / seat,
        )
        for seat in own_seats
    }
    if base is not None and is_made:
        parts.shared_engine = base.engine
    on_wait = options.get("on_wait", lambda text: None)
    parts.seats = open_seats(config, scratch=scratch, on_wait=on_wait)
    return parts
