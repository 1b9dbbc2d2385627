"""Models that play without training: for `lockstep serve`, and for frozen seats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.agent.config import FrozenSeat, SamplingConfig
from lockstep.agent.loop import sampling_of
from lockstep.agent.turns import Policy
from lockstep.config import from_dict, overlaid, read_json
from lockstep.engines.config import EmbeddedConfig
from lockstep.errors import CheckpointError, ConfigError, located
from lockstep.models import peft_format
from lockstep.models.config import FallbackConfig, ModelConfig
from lockstep.models.locate import CONFIG_FILES, locate_model
from lockstep.models.lora_config import LoraConfig
from lockstep.ops.contract import ContractChoice
from lockstep.run.build import Parts, SharedBase, build, choose_numerics, engine_context, load_model
from lockstep.run.preflight import (
    ModelFiles,
    check_fallback,
    check_shared_base,
    read_model_files,
    stored_renderer,
)
from lockstep.run_config import Config, ServeConfig
from lockstep.store.checkpoints import POLICY, split_address, trained_by
from lockstep.store.run import is_run, load_run, step_of

if TYPE_CHECKING:
    from lockstep.engines.base import Engine

DEFAULT_MAX_TOKENS = 8192
"""Tokens of a dialogue if the setting is not given; fewer if the model's context is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Settings of a server, and the checkpoint whose weights it serves."""

    config: ServeConfig
    weights: Path | None = None
    """Weights of a run's checkpoint; None are the model's own."""
    version: int = 0
    """Version of the weights, which an engine in this process records with each turn."""


def find_served(
    target: str, settings: Sequence[str], *, tree: Mapping[str, Any] | None = None
) -> Served:
    """Reads `lockstep serve TARGET key=value ...`; TARGET is `RUN`, `RUN@STEP`, a model, or an
    adapter in PEFT's form, as `lockstep export` writes it, over the base that it names or `model`.
    tree: settings as in a file, below these.

    Raises ConfigError, and what reading a run raises.
    """
    path, step = split_address(target)
    if is_run(path):
        return _of_run(path, step, settings, tree or {})
    written = (setting.partition("=") for setting in settings)
    given = dict(tree or {}) | {name.strip(): value for name, _, value in written}
    config = overlaid(_config_of(target, given.get("model", "")), tree or {}, settings)
    if "max_tokens" not in given:
        kind = FallbackConfig if config.fallback else ModelConfig
        limit = kind.from_directory(locate_model(config.model)).max_positions
        config = replace(config, max_tokens=min(limit, DEFAULT_MAX_TOKENS))
    return Served(config=config)


def _config_of(target: str, base: str) -> ServeConfig:
    """The config of a model or an adapter without settings. base: the user's base model; "" takes
    the adapter's."""
    stored = Path(target).expanduser() / peft_format.CONFIG
    if not stored.is_file():
        return ServeConfig(model=target)
    base = base or read_json(stored, CheckpointError)["base_model_name_or_path"]
    if not base:
        raise ConfigError(f"{stored} names no base model. Add model=BASE.")
    renderer = stored_renderer(stored.parent)
    return ServeConfig(model=base, renderer=renderer, lora=LoraConfig(path=target))


def _of_run(
    path: Path, step: int | None, settings: Sequence[str], tree: Mapping[str, Any]
) -> Served:
    run, weights = trained_by(path, step)
    own = {one.name for one in fields(ServeConfig)} - {"parallel"}  # one process is enough to play
    kept = {name: value for name, value in run.config.items() if name in own}
    drawn = {one.name for one in fields(SamplingConfig)}
    kept["agent"] = {key: value for key, value in kept.get("agent", {}).items() if key in drawn}
    return Served(
        config=overlaid(from_dict(ServeConfig, kept), tree, settings),
        weights=weights,
        version=max(step_of(weights.parent.name), 0),
    )


def open_served(
    served: Served,
    *,
    scratch: Path | None,
    on_wait: Callable[[str], None] = lambda text: None,
    contract: ContractChoice = "none",
) -> tuple[ModelFiles, Engine]:
    """Opens the engine. Returns it with the files of its model. contract: the contract of the run
    that an engine in this process plays for."""
    from lockstep.engines.registry import check_capabilities, open_engine

    config = served.config
    check_fallback(config)
    model_files = read_model_files(config)
    if model_files.renderer_line:
        on_wait(f"renderer   {model_files.renderer_line}")
    directory, model = model_files.directory, None
    if isinstance(config.engine, EmbeddedConfig):
        model = load_model(config, model_files, weights=served.weights)
        choose_numerics(contract, model)
    elif config.lora is not None:
        raise ConfigError(
            "it is an adapter, and only engine=embedded serves one. Merge it first: "
            "lockstep export RUN --hf DIR --merged, then lockstep serve DIR."
        )
    elif served.weights is not None:
        directory = served.weights
    told = {"directory": directory, "run": config.name, "scratch": scratch, "on_wait": on_wait}
    context = engine_context(config, model_files, model, **told)
    engine = open_engine(config.engine.for_rank(0, 1), context)
    check_capabilities(engine, context)
    return model_files, engine


# -- seats -----------------------------------------------------------------------------------------


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
        with located(where, ConfigError):
            served = find_served(seat.model, (), tree={"max_tokens": config.max_tokens})
            alike = {key: getattr(config, key) for key in ("contract", "device", "threads", "seed")}
            alike["dtype"] = config.compute_dtype
            choice = replace(served.config, name=name, engine=seat.engine, **alike)
            read_model_files(choice, files=CONFIG_FILES)
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

    def built(seat: str = "") -> Parts:
        own = replace(config, name=f"{config.name}.{seat}") if seat else config
        place = Path(SEATS, seat, POLICY) if seat else Path(POLICY)
        weights = None if checkpoint is None else checkpoint / place
        return build(own, model_files, weights=weights, base=base, scratch=scratch, **options)

    parts = built()
    parts.own = {seat: built(seat) for seat in own_seats}
    if base is not None and is_made:
        parts.shared_engine = base.engine
    on_wait = options.get("on_wait", lambda text: None)
    parts.seats = open_seats(config, scratch=scratch, on_wait=on_wait)
    return parts
