"""The command line: verbs only. A verb imports its modules when it runs, so that help is fast."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import shlex
import signal
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import lockstep
from lockstep.config import (
    FILE_FORMS,
    describe,
    did_you_mean,
    dumps,
    field_docs,
    file_form,
    flatten,
    from_settings,
    read_tree,
    resolve,
    to_dict,
)
from lockstep.display import number, show_once, warn
from lockstep.errors import (
    ConfigError,
    DiskFullError,
    InputError,
    LockstepError,
    StorageError,
    is_full_disk,
)
from lockstep.habits import COMMAND_LINE, VERBS, hint
from lockstep.observe.live import ViewKind
from lockstep.tables import tables_beside

T = TypeVar("T")

EXIT_CODES = """\
exit codes: 0 done; 1 the run failed; 2 a setting, a file or a checkpoint is wrong (nothing was
started), or a process of several was lost; 3 stopped by an alarm; 130 interrupted
(continue with resume=true); 141 the reader of its output left. doctor: 0 sampler and trainer are
consistent, 1 they differ, 2 no check could be made, or the input is wrong."""

OK, FAILED, BAD_INPUT, STOPPED, INTERRUPTED, READER_LEFT = 0, 1, 2, 3, 130, 141

END_SECONDS = 10.0
"""Seconds until the process ends, once its command has, whatever threads are left."""


def command() -> NoReturn:
    """The program `lockstep`. It ends though foreign code left threads that never do."""
    code = FAILED
    try:
        code = main()
    finally:
        end = threading.Timer(END_SECONDS, _exit_now, (code,))
        end.daemon = True
        end.start()
    sys.exit(code)


def _exit_now(code: int) -> None:
    main = threading.main_thread()
    left = {each.name for each in threading.enumerate() if not each.daemon and each is not main}
    print(f"ended beside threads that do not end: {', '.join(sorted(left))}", file=sys.stderr)
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code."""
    try:
        try:
            return _main(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # not when the interpreter ends: `lockstep ... | head`
    except OSError as error:
        _drop_stdout()
        if isinstance(error, BrokenPipeError):
            return READER_LEFT
        with contextlib.suppress(OSError):
            print(f"cannot write the output: {error}", file=sys.stderr)
        return BAD_INPUT


def _drop_stdout() -> None:
    """Discards unwritten output: the interpreter would fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _main(argv: Sequence[str] | None) -> int:
    from lockstep.launch.place import end_by_sigterm

    parser = _parser()
    options = _options(parser, argv)
    if options.verb is None:
        parser.print_help()
        return BAD_INPUT
    end_by_sigterm()
    try:
        _import_plugins(options.plugin)
        _check_is_run(options)
        _check_output(options)
        with _faults(getattr(options, "fault", ())):
            return options.run(options) or OK
    except (LockstepError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        if is_full_disk(error) and not isinstance(error, DiskFullError):
            error = DiskFullError(f"the disk is full ({error}). Free some space, and try again.")
        _complain(error, options)
        is_input = isinstance(error, (InputError, OSError)) and not isinstance(error, StorageError)
        return BAD_INPUT if is_input else FAILED
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return INTERRUPTED


def _faults(words: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Injects the defects of `--fault` while the verb runs."""
    if not words:
        return contextlib.nullcontext()
    from lockstep.testing.faults import injected, parse_fault

    return injected(*map(parse_fault, words))


def _complain(error: Exception, options: argparse.Namespace) -> None:
    from lockstep.launch.place import is_follower

    if is_follower():
        return
    if getattr(options, "json", False):
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    show_once(error)


def _print(options: argparse.Namespace, value: Any, text: Any) -> None:
    """Prints `value` as JSON with --json, else `text`, or calls what prints it."""
    if options.json:
        print(json.dumps(value))
    elif callable(text):
        text()
    else:
        print(text)


def _console(*, width: int = 100) -> Any:
    """A console: in colour on a terminal, else plain text of this width."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


# -- the verbs ----------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int | None:
    """Train an agent by reinforcement learning.

    example: lockstep train quickstart steps=30 seed=1 model=tiny-qwen3
    """
    from lockstep.recipes import find_recipe
    from lockstep.run.preflight import plan
    from lockstep.run.train import check_out, check_run
    from lockstep.run_config import Config

    settings, own = _split(options.settings, "train", *COMMAND_LINE)
    if options.help:
        return _show_settings(options, find_recipe, Config)
    if options.beside:
        return _train_side_by_side(options, settings, own)
    config, run, start = _training_config(options.target, settings, own)
    if options.dry_run:
        check_out(own.get("out"), resume=run is not None)
        lines = plan(config, check_run(config, start=start))
        form = file_form(config, always=("name", "model", "steps"))
        text = form + "\n".join(f"# {line}" for line in lines)
        _print(options, {"config": to_dict(config), "plan": lines}, text)
        return OK
    return _finish(lockstep.train(config, start=start, **_how(options, own, run)), options)


def _train_side_by_side(
    options: argparse.Namespace, settings: list[str], own: dict[str, str]
) -> int:
    from lockstep.run.preflight import check_side_by_side, plan
    from lockstep.run.train import check_run
    from lockstep.store.run import default_run_path

    if "from" in own:
        raise ConfigError("from=RUN starts one run: leave it or --beside out.")
    is_resume = own.get("resume") == "true"
    out = Path(own.pop("out", "") or default_run_path("side-by-side"))
    runs: list[tuple[Path, Any]] = []
    for words in ([], *map(shlex.split, options.beside)):
        target, changed = options.target, [*settings, *words]
        if words and "=" not in words[0]:
            target, *changed = words
        config, run, _ = _training_config(target, changed, own)
        runs.append((run or out / config.name, config))
    check_side_by_side([config for _, config in runs])
    configs = dict(runs)
    if options.dry_run:
        plans = [plan(config, check_run(config)) for config in configs.values()]
        value = {str(path): to_dict(config) for path, config in configs.items()}
        _print(options, value, "\n".join(line for lines in plans for line in lines))
        return OK
    ended = lockstep.train_side_by_side(configs, resume=is_resume, view=_view(options))
    codes: list[int] = []
    for path, outcome in ended.items():
        if isinstance(outcome, Exception):
            warn(f"{path}: {type(outcome).__name__}: {outcome}")
            codes.append(FAILED)
        else:
            codes.append(_finish(outcome, options))
    return max(codes)


def _view(options: argparse.Namespace) -> ViewKind:
    return "json" if options.json else "verbose" if options.verbose else "live"


def _how(options: argparse.Namespace, own: Mapping[str, str], run: Path | None) -> dict[str, Any]:
    """How a run is started. own: the command's settings. run: the run to continue, or None."""
    return {"out": own.get("out") or run, "resume": run is not None, "view": _view(options)}


def _finish(outcome: Any, options: argparse.Namespace) -> int:
    """The last line of a run is its directory; with --json an object whose `run` key holds it."""
    from lockstep.launch.place import is_follower

    if not is_follower():
        try:
            if not options.json:
                print("\n".join(_closing(outcome, options)))
            _print(options, {"run": str(outcome.path), **outcome.summary}, outcome.path)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:  # nobody reads it: how the run ended is what counts
            _drop_stdout()
    return {"done": OK, "interrupted": INTERRUPTED, "stopped": STOPPED}[outcome.status]


def _closing(outcome: Any, options: argparse.Namespace) -> list[str]:
    """The figures that a run has reached, and the commands that go on from it."""
    from lockstep.observe.metrics import held_out_label
    from lockstep.store.run import load_run

    path, found, run = shlex.quote(str(outcome.path)), outcome.summary, load_run(outcome.path)
    rewards = [found[name] for name in ("reward_first", "reward_last_10") if name in found]
    curves = {"reward, first step and last 10": rewards}
    for name in dict.fromkeys(name for row in run.metrics for name in row):
        if label := held_out_label(name):
            curves[f"held out, {label}"] = run.values(name)
    lines = [f"{k:<32} {number(v[0])} -> {number(v[-1])}" for k, v in curves.items() if len(v) > 1]
    same = [w for name in options.plugin for w in ("--plugin", name)]
    same += [w for fault in getattr(options, "fault", ()) for w in ("--fault", fault)]
    commands = {f"{options.verb} {path} {shlex.join(['resume=true', *same])}": "goes on from here"}
    commands |= (
        {f"train RECIPE model={path}": "trains it by reinforcement learning"}
        if options.verb == "sft"
        else {
            f"replay {shlex.quote(f'{outcome.path}#0')}": "shows an episode token by token",
            f"doctor {path}": "says whether sampler and trainer agree",
        }
    )
    commands[f"export {path} --hf DIR"] = "writes the model for other programs"
    shown = list(commands.items())[outcome.status == "done" :][:3]
    width = max(len(command) for command, _ in shown)
    return [
        *lines,
        f"report  {outcome.path / 'report.html'}",
        *(f"next    lockstep {command:<{width}}  {about}" for command, about in shown),
    ]


def _sft(options: argparse.Namespace) -> int | None:
    """Train on written dialogues (supervised).

    example: lockstep sft model=tiny-qwen3 sft.path=dialogues.jsonl sft.steps=200
    """
    from lockstep.recipes import find_supervised_recipe, fitted_supervised
    from lockstep.run.train import check_out
    from lockstep.run_config import SupervisedConfig
    from lockstep.supervised import check_supervised

    settings, own = _split(options.settings, "sft", "out", "resume")
    if options.help:
        return _show_settings(options, find_supervised_recipe, SupervisedConfig)
    path, given = _config_file(options.target), {s.partition("=")[0].strip() for s in settings}
    if path is not None:
        tree = read_tree(path)
        config, given = from_settings(SupervisedConfig, tree, settings), given | {*flatten(tree)}
    else:
        config = resolve(find_supervised_recipe(options.target or "sft"), settings)
    config = fitted_supervised(config, given)
    run = None
    if _is_resume(own):
        config, run = _continued(config, own, path)
    if options.dry_run:
        check_out(own.get("out"), resume=run is not None)
        if not config.create:  # a created model is checked then
            _, (rows, _) = check_supervised(config)
            deque(islice(rows, config.sft.steps * config.sft.rows_per_step), maxlen=0)
        print(dumps(config), end="")
        return OK
    return _finish(lockstep.train_supervised(config, **_how(options, own, run)), options)


def _eval(options: argparse.Namespace) -> None:
    """Play held-out tasks with a run's best checkpoint (or RUN@STEP).

    example: lockstep eval runs/quickstart-20260101-120000 evaluation.num_tasks=512
    """
    settings, _ = _split(options.settings, "eval")
    found = lockstep.evaluate(options.target, overrides=settings)
    lines = [f"  {key:<40} {value:8.4f}" for key, value in found.metrics.items()]
    value = {"run": str(found.run), "checkpoint": found.checkpoint, "metrics": found.metrics}
    _print(options, value, "\n".join((f"{found.run} at {found.checkpoint}", *lines)))


def _report(options: argparse.Namespace) -> None:
    """Write one HTML file about one run, or several side by side.

    example: lockstep report runs/a runs/b --out both.html
             lockstep report runs --serve
    """
    if options.serve:
        return _serve_report(options)
    if options.host or options.port is not None:
        raise ConfigError("--host and --port belong to --serve.")
    out = lockstep.write_report(*options.runs, out=options.out)
    _print(options, {"report": str(out)}, str(out))


def _serve_report(options: argparse.Namespace) -> None:
    from lockstep.report.server import ReportServer
    from lockstep.run.build import recipe_of, tokenizer_of

    if options.out:
        raise ConfigError("--serve writes no file: leave --out or --serve out.")
    server = ReportServer(
        [Path(path) for path in options.runs],
        host=options.host or "127.0.0.1",
        port=options.port or 0,
        key=os.environ.get("LOCKSTEP_KEY", ""),
        tokenizer_of=tokenizer_of,
        recipe_of=recipe_of,
    )
    with server:
        _print(options, {"url": server.url}, f"{server.url}  (Ctrl-C ends it)")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _serve(options: argparse.Namespace) -> None:
    """Serve a model: to agents, whose trajectories are kept, or to programs of the tinker client.

    example: lockstep serve tiny-qwen3 --port 8000 --out runs/served
             lockstep serve tiny-gpt-oss --api agents,tinker --out runs/both
    """
    from lockstep.run.served import find_served
    from lockstep.run_config import ServeConfig

    given = {f"gateway.{name}": getattr(options, name) for name in ("host", "port", "log")}
    given["api"] = options.api
    settings = [*options.settings, *(f"{k}={v}" for k, v in given.items() if v is not None)]
    if options.help:
        return _show_settings(options, lambda target: find_served(target, []).config, ServeConfig)
    if not options.target:
        raise ConfigError("which model? For example: lockstep serve tiny-qwen3.")
    served = find_served(options.target, settings)
    if options.dry_run:
        _print(options, {"config": to_dict(served.config)}, dumps(served.config).rstrip())
        return
    key = options.key or os.environ.get("LOCKSTEP_KEY", "")
    if options.key:  # the command line is stored with the run
        sys.argv = [word.replace(options.key, "***") for word in sys.argv]
    with contextlib.suppress(KeyboardInterrupt):
        lockstep.serve(served, key=key, out=options.out or None, is_json=options.json)
    # Everything is stored; a late Ctrl-C would end the interpreter as if it had been killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _doctor(options: argparse.Namespace) -> int:
    """Say why sampler and trainer differ: of a run, or of another trainer's dump.

    example: lockstep doctor runs/quickstart-20260101-120000
    """
    from lockstep.doctor.diagnosis import EXIT_CODES

    if options.ladder:
        return _ladder(options)
    if options.settings:
        raise ConfigError(
            f"{options.settings[0]} belongs to --ladder, which plays a recipe; a "
            "run or a dump is only read."
        )
    names = ("format", "only", "tokenizer", "renderer", "model", "adapter", "against")
    how: dict[str, Any] = {name: getattr(options, name) for name in names}
    diagnosis = lockstep.diagnose(options.target, **how)
    page = ""
    if options.out:
        from lockstep.doctor.html_page import write_page

        page = str(write_page(diagnosis, options.out))
    found = diagnosis.to_json() | {"page": page}
    _print(options, found, lambda: diagnosis.show(_console(width=80), page=page))
    return EXIT_CODES[diagnosis.outcome]


def _ladder(options: argparse.Namespace) -> int:
    from lockstep.doctor.diagnosis import EXIT_CODES
    from lockstep.doctor.ladder import climb

    config, weights = _played(options, "doctor --ladder")
    with _faults_of_run(options):
        ladder = climb(config, weights=weights)
    _print(options, ladder.to_json(), ladder.summary())
    return EXIT_CODES["differs" if ladder.culprits else "consistent"]


def _faults_of_run(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """The faults that a run was started with: a ladder of it climbs with its defect."""
    from lockstep.store.run import is_run, load_run

    if options.fault or not is_run(Path(options.target)):
        return _faults(())
    words = [str(word) for word in load_run(options.target).environment.get("argv", ())]
    after = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--fault"]
    joined = [word.removeprefix("--fault=") for word in words if word.startswith("--fault=")]
    return _faults([*after, *joined])


def _noise(options: argparse.Namespace) -> None:
    """Say how far sampler and trainer are apart on the same tokens, and each from itself.

    example: lockstep noise quickstart model=tiny-qwen3 engine.dtype=bfloat16
    """
    config, weights = _played(options, "noise")
    found = lockstep.measure_noise(config, weights=weights, num_scorings=options.scorings)
    _print(options, found, "\n".join(f"{name:<20} {value:8.3g}" for name, value in found.items()))


def _replay(options: argparse.Namespace) -> None:
    """Show one stored trajectory token by token, with both sides' log-probs.

    example: lockstep replay 'runs/quickstart-20260101-120000#0'
    """
    replay, shown = lockstep.replay(options.target), {"has_all_tokens": options.tokens}
    _print(options, replay.to_json(), lambda: replay.show(_console(), **shown))


def _render(options: argparse.Namespace) -> None:
    """Show a dialogue as tokens, by origin, and whether rendering it anew changes them.

    example: lockstep render tiny-gpt-oss messages.json
    """
    how: dict[str, Any] = {"tools": options.tools, "renderer": options.renderer}
    rendered = lockstep.render(options.model, options.messages, **how)
    _print(options, rendered.to_json(), lambda: rendered.show(_console()))


def _export(options: argparse.Namespace) -> None:
    """Write a run's checkpoint as a Hugging Face model, or its adapter in PEFT's form.

    example: lockstep export runs/quickstart-20260101-120000 --hf my-model
             lockstep export runs/quickstart-20260101-120000 --hub me/my-model
    """
    from lockstep.store.checkpoints import split_address

    path, _ = split_address(options.target)
    how: dict[str, Any] = {name: getattr(options, name) for name in ("merged", "hub", "private")}
    done = lockstep.export(options.target, options.hf or None, **how)
    place, name = str(done.directory), done.checkpoint
    value = {"run": str(path), "checkpoint": name, "hf": place, "hub": done.hub}
    _print(options, value, f"{path} at {name} -> {done.hub or place}")


def _fetch(options: argparse.Namespace) -> None:
    """Bring a pretrained model onto this machine, once, where model=NAME finds it.

    example: lockstep fetch smollm2-135m
    """
    place = str(lockstep.fetch(options.model))
    _print(options, {"model": options.model, "directory": place}, place)


def _recipes(options: argparse.Namespace) -> None:
    """List the recipes.

    example: lockstep recipes
    """
    rows = lockstep.list_recipes()
    lines = [f"lockstep {row['verb']} {row['name']}\n{_indent(row['about'])}" for row in rows]
    _print(options, rows, "\n".join(lines))


def _completion(options: argparse.Namespace) -> None:
    """Print the script that makes a shell complete verbs, recipes and settings.

    example: eval "$(lockstep completion bash)"   in ~/.bashrc; zsh alike, after compinit
             lockstep completion fish | source    in ~/.config/fish/config.fish
    """
    if not options.words:
        # The script runs `lockstep completion SHELL WORD...`; the user is typing the last word.
        script = Path(__file__).with_name(f"completion.{options.shell}")
        print(script.read_text("utf-8").rstrip("\n"))
        return
    flags = {
        verb: ["--help", *(name for name in _arguments(verb) if name.startswith("-"))]
        for verb in COMMANDS
    }
    print("\n".join(candidates(options.words, flags)))


# -- what a run starts from -----------------------------------------------------------------------


def _played(options: argparse.Namespace, verb: str) -> tuple[Any, Path | None]:
    """(config, checkpoint or None) of a recipe, a file or a run that is only played."""
    from lockstep.store.checkpoints import split_address, trained_by
    from lockstep.store.run import is_run

    settings, _ = _split(options.settings, verb)
    path, step = split_address(options.target)
    weights = trained_by(path, step)[1] if is_run(path) else None
    return _training_config(str(path), settings, {})[0], weights


def _training_config(
    target: str | None, settings: list[str], own: dict[str, str]
) -> tuple[Any, Path | None, tuple[Path, int | None] | None]:
    """(config, run to continue or None, (run, step) to start from or None)."""
    from lockstep.recipes import read_config, with_method
    from lockstep.run_config import Config
    from lockstep.store.checkpoints import split_address
    from lockstep.store.run import load_run

    is_resume = _is_resume(own)
    fork = split_address(own["from"]) if "from" in own else None
    if is_resume and fork:
        raise ConfigError("resume=true continues a run and from=RUN@STEP starts one: choose one.")
    path = _config_file(target)
    if fork and target is None:
        config = from_settings(Config, load_run(fork[0]).config, settings)
    elif target is None:
        raise ConfigError("which recipe, as in lockstep train quickstart? See lockstep recipes.")
    elif path is not None:
        config = read_config(path, settings)
    else:
        config = _find_recipe(target, settings)
    if "method" in own:
        config = resolve(with_method(config, own["method"]), settings)
    if not is_resume:
        return config, None, fork
    return *_continued(config, own, path), None


def _is_resume(own: Mapping[str, str]) -> bool:
    if (resume := own.get("resume", "false").lower()) not in ("true", "false"):
        raise ConfigError(f"resume={resume}: expected true or false.")
    return resume == "true"


def _continued(config: T, own: Mapping[str, str], path: Path | None) -> tuple[T, Path]:
    """(config of the run to continue, its directory). path: its file of settings, if one was
    given."""
    from lockstep.run.train import continued

    where = own.get("out") or (str(path.parent) if path else "")
    if not where:
        raise ConfigError(
            "resume=true needs the run: lockstep train RUN resume=true, or out=RUN with the recipe."
        )
    return continued(config, where), Path(where)


def _find_recipe(target: str, settings: Sequence[str]) -> Any:
    """A recipe's config. Each other thing that tools call a recipe has its own error."""
    from lockstep.recipes import configure

    suffix = Path(target).suffix
    if target == "@" and settings:
        raise ConfigError(f"a file of settings is given by its name: lockstep train {settings[0]}.")
    if suffix == ".py":
        raise ConfigError(
            f"{target} is code. A recipe that it registers is trained by its name: lockstep train "
            f"NAME --plugin {target}."
        )
    if suffix in FILE_FORMS and not Path(target).is_file():
        raise ConfigError(f"{target}: there is no such file.")
    if "/" in target and not Path(target).exists():
        raise ConfigError(
            f"{target}: there is no such file or run. A model is a setting of a recipe: lockstep "
            f"train RECIPE model={target}. `lockstep recipes` lists them."
        )
    return configure(target, overrides=settings)


def _check_output(options: argparse.Namespace) -> None:
    """Refuses a file or directory that could not be written, before anything is loaded."""
    from lockstep.store.files import why_no_directory

    is_file = options.verb in ("report", "doctor")
    for option in ("out", "hf") if options.verb in ("report", "doctor", "export") else ():
        if not (text := getattr(options, option, "")):
            continue
        path = Path(text)
        problem = why_no_directory(path.parent if is_file else path)
        if is_file and path.is_dir():
            problem = "it is a directory; give the name of a file"
        if problem:
            raise ConfigError(f"--{option} {path} cannot be written: {problem}.")


def _check_is_run(options: argparse.Namespace) -> None:
    """Refuses a recipe where a run of it is expected."""
    from lockstep.recipes.registry import RECIPES

    if options.verb in ("train", "sft", "serve", "noise") or getattr(options, "ladder", False):
        return
    for target in [*getattr(options, "runs", []), getattr(options, "target", None)]:
        if target in RECIPES and not Path(target).exists():
            raise ConfigError(
                f"{target} is a recipe, and `lockstep {options.verb}` takes a run: `lockstep train "
                f"{target}` makes one, runs/{target}-..."
            )


def _config_file(target: str | None) -> Path | None:
    """The file of settings that a target means: itself, or the config.json of a run directory."""
    path = Path(target or "")
    if target and path.is_dir():
        path = path / "config.json"
    return path if path.suffix in FILE_FORMS and path.is_file() else None


def _split(settings: Sequence[str], verb: str, *allowed: str) -> tuple[list[str], dict[str, str]]:
    """(settings of the config, the command's own). allowed: own settings that this verb takes."""
    own = {k: v for k, eq, v in (s.partition("=") for s in settings) if eq and k in COMMAND_LINE}
    if extra := [k for k in own if k not in allowed]:
        raise ConfigError(f"lockstep {verb} takes no {extra[0]}=.")
    return [s for s in settings if s.partition("=")[0] not in own], own


def _import_plugins(names: Sequence[str]) -> None:
    """Imports a user's files and modules, and the modules that installed packages name under the
    entry point `lockstep.plugins`. Their kinds (tasks, losses, dump formats) are known then, after
    the package's own, which they may extend."""
    from importlib.metadata import entry_points

    import lockstep.recipes  # noqa: F401  with them come the kinds of tasks and dialogues
    from lockstep.agent.references import imported

    for point in entry_points(group="lockstep.plugins"):
        try:
            point.load()
        except ImportError as error:
            raise ConfigError(
                f"the installed plugin {point.name} ({point.value}) cannot be imported: {error}. "
                "Repair or uninstall its package."
            ) from error
    sys.path.insert(0, "")  # a module in the working directory is importable, as with `python -m`
    for name in names:
        imported(name, where="--plugin")


# -- showing settings -----------------------------------------------------------------------------


def _show_settings(options: argparse.Namespace, find: Callable[[str], T], cls: type[T]) -> None:
    """--help: of the verb, or the settings of the target's config: all, or some sections.

    The words after the target are settings, and names of sections.
    """
    if not options.target:
        options.parser.print_help()
        return
    settings = [word for word in options.settings if "=" in word]
    wanted = [word.rstrip(".") for word in options.settings if "=" not in word]
    sections = field_docs(cls)
    if options.target in sections:
        raise ConfigError(
            f"{options.target} is a section of a recipe's settings: lockstep {options.verb} RECIPE "
            f"--help {options.target}."
        )
    rows = list(describe(resolve(find(options.target), settings)))
    known = [*sections, *(row[0] for row in rows)]
    for section in wanted:
        if not any(name == section or name.startswith(f"{section}.") for name in known):
            raise ConfigError(f"there is no section {section}.{did_you_mean(section, sections)}")
    begins = tuple(f"{section}." for section in wanted) or ("",)
    rows = [row for row in rows if f"{row[0]}.".startswith(begins)]
    keys = ("path", "type", "value", "about")
    lines: list[str] = []
    for section, members in groupby(rows, key=lambda row: row[0].partition(".")[0]):
        found = list(members)
        if "." in found[-1][0]:
            lines += ["", f"{section}: {sections[section]}", ""]
        for path, kind, value, about in found:
            shown = about if path != section or "." not in found[-1][0] else ""
            lines.append(f"{path}={value}  ({kind})" + (f"\n{_indent(shown)}" if shown else ""))
    if not wanted:
        lines += ["", f"one section: lockstep {options.verb} {options.target} --help trainer"]
    _print(options, [dict(zip(keys, row, strict=True)) for row in rows], "\n".join(lines).strip())


def _indent(text: str) -> str:
    return textwrap.indent(textwrap.fill(text, 92), "    ")


# -- the parser -----------------------------------------------------------------------------------

_TABLES = tables_beside(__file__)

COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "train": _train,
    "sft": _sft,
    "eval": _eval,
    "report": _report,
    "doctor": _doctor,
    "noise": _noise,
    "replay": _replay,
    "render": _render,
    "export": _export,
    "serve": _serve,
    "fetch": _fetch,
    "recipes": _recipes,
    "completion": _completion,
}
"""Verb -> its function. The docstring is the verb's help; `cli.toml` has its arguments."""


def _arguments(verb: str) -> dict[str, dict[str, Any]]:
    """Name of an argument -> the keywords of `add_argument`."""
    own, shared = dict(_TABLES[verb]), _TABLES["shared"]
    used = {name: shared[name] for name in own.pop("uses")}
    return {name: shared[name] for name in ("--json", "--plugin")} | own | used


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="Train tool-using language-model agents, with sampler and trainer in lockstep.",
        epilog=f"start here: lockstep train quickstart\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {lockstep.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, run in COMMANDS.items():
        about, _, example = (run.__doc__ or "").partition("\n\n")
        arguments = _arguments(name)
        has_settings = "--dry-run" in arguments
        made = verbs.add_parser(
            name,
            help=about,
            description=about,
            epilog=example.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=not has_settings,
        )
        made.set_defaults(run=run, parser=made)
        made.register("type", "int", int)
        if has_settings:
            text = "this text; with a target, every setting of it"
            made.add_argument("-h", "--help", action="store_true", help=text)
        for argument, keywords in arguments.items():
            made.add_argument(argument, **keywords)
    made = verbs.choices["completion"]
    made.add_argument("words", help=argparse.SUPPRESS, nargs=argparse.REMAINDER)
    return parser


def _options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments, with flags and settings in any order.

    `lockstep train from=RUN@3` has no target: a first word with an = in it is a setting.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if answer := _no_verb(words):
        parser.exit(BAD_INPUT, f"lockstep: {answer}\n")
    options, rest = parser.parse_known_args(words)
    takes_settings = hasattr(options, "settings")
    if unknown := [word for word in rest if word.startswith("-") or not takes_settings]:
        if takes_settings and unknown[0].startswith("-"):
            parser.exit(BAD_INPUT, f"lockstep: {_no_flag(options, unknown[0], words)}\n")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_settings:
        options.settings += rest
        if options.target and "=" in options.target and not Path(options.target).exists():
            options.settings.insert(0, options.target)
            options.target = None
    return options


def _no_verb(words: Sequence[str]) -> str:
    """The answer to a command line without a verb at its beginning; else empty."""
    first = words[0] if words else "--help"
    if first in (*COMMANDS, "-h", "--help", "--version"):
        return ""
    at = next((i for i, word in enumerate(words) if word in COMMANDS), 0)
    if first.startswith("-") and at:
        return f"the verb comes first: lockstep {shlex.join([*words[at:], *words[:at]])}"
    from lockstep.recipes.registry import RECIPES, SUPERVISED_RECIPES

    rest = shlex.join(words[1:])
    near = difflib.get_close_matches(first, COMMANDS, n=1)
    meant = VERBS.get(first) or (near[0] if near else "")
    for verb, recipes in (("train", RECIPES), ("sft", SUPERVISED_RECIPES)):
        if first in recipes:
            meant = f"{verb} {first}"
    known = f" Verbs: {', '.join(COMMANDS)}."
    hinted = f" Did you mean `lockstep {meant} {rest}".rstrip() + "`?" if meant else known
    return f"{first!r} is no verb.{hinted}"


def _no_flag(options: argparse.Namespace, flag: str, words: Sequence[str]) -> str:
    """The answer to a setting that is written as a flag."""
    from lockstep.recipes import find_recipe, find_supervised_recipe
    from lockstep.run_config import ServeConfig

    name, equals, value = flag.lstrip("-").partition("=")
    after = words[words.index(flag) + 1 :]
    if not equals:
        value = after[0] if after and not after[0].startswith("-") else "true"
    if name in ("config", "config-file", "config_file"):
        return f"a file of settings is given by its name: lockstep {options.verb} {value}"
    config = {"sft": lambda: find_supervised_recipe("sft"), "serve": ServeConfig}.get(
        options.verb, lambda: find_recipe("quickstart")
    )()
    tree = to_dict(config)
    hinted = hint(name, value, [*tree, *flatten(tree)])
    return f"{flag}: settings are written without dashes, as key=value.{hinted}"


# -- completion of words ---------------------------------------------------------------------------


def candidates(words: Sequence[str], flags: Mapping[str, Sequence[str]]) -> list[str]:
    """Completions of the last word. A complete word ends with a blank.

    flags: verb -> its flags.

    >>> candidates(["se"], {"train": [], "serve": []})
    ['serve ']
    """
    from lockstep.recipes.registry import RECIPES, SUPERVISED_RECIPES

    *before, last = words
    verbs: Mapping[str, Mapping[str, Any]] = {"train": RECIPES, "sft": SUPERVISED_RECIPES}
    recipes = verbs.get(before[0], {}) if before else {}
    target = next((word for word in before[1:] if word in recipes), "")
    if not before:
        found = [f"{verb} " for verb in flags]
    elif last.startswith("-"):
        found = [f"{flag} " for flag in flags.get(before[0], ())]
    elif target:
        found = _settings(recipes[target], last)
    else:
        found = [f"{name} " for name in recipes]
    return [word for word in found if word.startswith(last)]


def _settings(recipe: Any, last: str) -> list[str]:
    try:
        rows = [(path, kind) for path, kind, _, _ in describe(recipe())]
    except LockstepError:  # a recipe that is right with more settings alone
        return []
    if "=" not in last:
        return ["out=", "resume=", *(f"{path}=" for path, _ in rows)]
    choices = {path: kind.replace("bool", "true | false").split(" | ") for path, kind in rows}
    path = last.partition("=")[0]
    return [f"{path}={kind} " for kind in choices.get(path, ()) if len(choices[path]) > 1]


if __name__ == "__main__":
    command()
