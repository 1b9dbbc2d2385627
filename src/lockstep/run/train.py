"""Entry points of a run, from Python and the command line: checks first, torch after them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.config import differences, from_dict, tag, to_dict
from lockstep.display import show_once
from lockstep.errors import ConfigError, DiskFullError, LockstepError, is_full_disk
from lockstep.launch.place import is_follower
from lockstep.launch.processes import on_all_ranks
from lockstep.models.locate import CONFIG_FILES, locate_model
from lockstep.observe.live import ViewKind, open_view
from lockstep.run.build import resolve_device
from lockstep.run.preflight import ModelFiles, check_side_by_side, preflight, summary
from lockstep.run.served import find_seats
from lockstep.run_config import Config
from lockstep.store.checkpoints import RunAddress
from lockstep.store.run import Outcome, check_place, default_run_path, load_run

T = TypeVar("T", bound=Any)

if TYPE_CHECKING:
    from lockstep.run.training_run import OpenMonitor


def train(
    config: Config,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    start: RunAddress | None = None,
    view: ViewKind = "live",
    monitor: OpenMonitor | None = None,
) -> Outcome:
    """Trains as `config` says and returns how the run ended.

    out: the run directory; None makes runs/NAME-TIMESTAMP. resume: continue the run in `out` from
    its newest checkpoint, to the same bits as without a stop. start: (run, step) whose weights,
    optimizer and task stream a new run begins with; differences of the settings are recorded.
    monitor: makes the check of each step's rows (`lockstep.train` gives the doctor's); None: no
    check. view: the printed lines: live, verbose with the internal facts, or none with json. Raises
    ConfigError, DataError or CheckpointError, if possible before a model is loaded.
    """
    out = Path(out) if out else default_run_path(config.name)
    check_out(out, resume=resume)
    model_files = _begin(config, out, view, start=start)
    from lockstep.run.steps import train_on_rank  # imports torch
    from lockstep.run.training_run import RunOptions

    is_elsewhere = config.placement.is_elsewhere()
    is_alone = not is_elsewhere and config.num_processes == 1
    with said_first(out):
        return on_all_ranks(
            config.parallel,
            train_on_rank,
            config,
            model_files if is_alone else None,  # each of several processes reads its own
            RunOptions(out=out, resume=resume, start=start, view=view, monitor=monitor),
            device=config.expected_device if is_elsewhere else resolve_device(config),
            placement=config.placement,
            demand=config.demand,
        )


def train_side_by_side(
    configs: Mapping[Path, Config],
    *,
    resume: bool = False,
    view: ViewKind = "live",
    monitor: OpenMonitor | None = None,
) -> dict[Path, Outcome | Exception]:
    """Trains several runs with lora over one base model in memory, by run directory, and returns
    the outcome or error of each. If one fails, the others go on.

    One engine samples for all. Under the contract each run has the bits that it has alone. resume:
    continues all of them. Other arguments: see `train`. Raises the errors of `train` before
    anything starts, and ConfigError for runs that cannot share a model.
    """
    check_side_by_side(list(configs.values()))
    for path in configs:
        check_out(path, resume=resume)
    configs = {path: continued(c, path) if resume else c for path, c in configs.items()}
    model_files = [_begin(config, path, view, name=config.name) for path, config in configs.items()]
    from lockstep.run.steps import train_over_base  # imports torch

    return train_over_base(configs, model_files, resume=resume, view=view, monitor=monitor)


@contextmanager
def said_first(out: str | Path | None = None) -> Generator[None]:
    """Shortens an error of a script that a user can mend: one sentence before Python's traceback.
    out: the run; after a full disk it goes on once there is room again."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            if isinstance(error, LockstepError) and not is_follower():
                show_once(error)
            raise
        then = f"The run goes on with lockstep train {out} resume=true" if out else "Start it again"
        full = DiskFullError(f"the disk is full ({error}). Free some space. {then}.")
        if not is_follower():
            show_once(full)
        raise full from error


def check_out(out: str | Path | None, *, resume: bool) -> None:
    """Raises RunError if `out` cannot be the directory of a run, or none that goes on."""
    if resume and out:
        load_run(out)
    elif out:
        check_place(out)


def continued(config: T, run: str | Path) -> T:
    """The config that `run` goes on with. A setting that `config` leaves open has the run's value.
    Raises ConfigError if other settings differ from the run's first ones."""
    stored, asked = load_run(run).config, to_dict(config)
    for name, unset in (("dtype", "auto"), ("renderer", None)):
        asked[name] = stored.get(name) if asked[name] == unset else asked[name]
    # A run continues with any number of processes, anywhere: its numbers stay the same.
    stored |= {name: asked[name] for name in ("parallel", "placement") if name in asked}
    if changed := differences(stored, asked):
        listed = ", ".join(f"{k}: {a} -> {b}" for k, (a, b) in changed.items())
        way = "from" if isinstance(config, Config) else "model"
        raise ConfigError(
            f"resume=true continues {run} as it was, and these settings differ: {listed}. To go "
            f"on with other settings start a new run from its checkpoint: {way}={run}@STEP."
        )
    return from_dict(type(config), stored)


def check_run(
    config: Config,
    *,
    files: Sequence[str] = CONFIG_FILES,
    start: RunAddress | None = None,
    is_training: bool = True,
) -> ModelFiles:
    """All that a run checks before a model is loaded, as `--dry-run` does too. Raises as `train`.
    files, start, is_training: see `preflight`."""
    model_files = preflight(config, is_training=is_training, files=files, start=start)
    find_seats(config)
    return model_files


def _begin(
    config: Config, path: Path, view: ViewKind, *, name: str = "", start: RunAddress | None = None
) -> ModelFiles:
    """Checks a run, and says what begins before torch is imported, which takes seconds."""
    shown = open_view("json" if is_follower() else view, name=name)
    shown.phase("checking settings, model and tasks")
    try:
        model_files = check_run(config, start=start)
    finally:
        shown.close()
    for line in (
        f"{config.name}: trains {config.model} on {tag(type(config.task))} for {config.steps} "
        "steps. Ctrl-C stops with a checkpoint.",
        *summary(config, model_files),
        f"run        {path}",
        f"watch      lockstep report {path}",
    ):
        shown.note(line)
    if not config.placement.is_elsewhere():
        locate_model(config.model)  # the weights of a model on the hub, after all checks
    return model_files
