"""The command line: verbs only. Each imports what it needs when it runs, so that help is fast."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lockstep

EXIT_CODES = """\
exit codes: 0 done; 1 the run failed; 2 a setting, a file or a checkpoint is wrong (nothing was
started), or a process of several was lost; 3 stopped by an alarm that was asked to; 130 interrupted
(go on with resume=true). doctor: 0 sampler and trainer are consistent, 1 they differ, 2 no check
could be made, or the input is wrong."""

OK, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130

RESERVED = ("out", "from", "resume")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command `lockstep`. Returns the exit code."""
    from lockstep.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LockstepError,
        MissingExtraError,
        RankError,
        RendererError,
        RunError,
    )
    from lockstep.launch.processes import end_by_sigterm

    parser = _parser()
    options = _options(parser, argv)
    if options.verb is None:
        parser.print_help()
        return BAD_INPUT
    end_by_sigterm()
    try:
        with _faults(options):
            return options.run(options)
    except (
        ConfigError,
        DataError,
        CheckpointError,
        RendererError,
        MissingExtraError,
        RankError,
        RunError,
    ) as e:
        _complain(e, options)
        return BAD_INPUT
    except LockstepError as error:
        _complain(error, options)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return INTERRUPTED


def _faults(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """What `--fault` asks for, around the verb."""
    if not getattr(options, "fault", None):
        return contextlib.nullcontext()
    from lockstep.testing.faults import injected, parse_fault

    _load_plugins(options.plugin)
    return injected(*map(parse_fault, options.fault))


def _complain(error: Exception, options: argparse.Namespace) -> None:
    from lockstep.errors import printable
    from lockstep.launch.processes import is_follower

    if is_follower():
        return
    if getattr(options, "json", False):
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
    text = textwrap.fill(
        f"{type(error).__name__}: {error}", 100, break_long_words=False, break_on_hyphens=False
    )
    print("\n".join(map(printable, text.splitlines())), file=sys.stderr)


def _say(text: str) -> None:
    """Prints what is long enough for `| head`: a reader who has gone is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- the verbs ----------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> int:
    from lockstep.config import resolve

    _load_plugins(options.plugin)
    settings, reserved = _split(options.settings)
    if options.help:
        return _show_settings(options, settings)
    config, run, start = _training_config(options.target, settings, reserved)
    config = resolve(config, settings)
    if options.dry_run:
        return _dry_run(config, options)
    outcome = lockstep.train(
        config, out=reserved.get("out") or run, resume=run is not None, start=start,
        view="json" if options.json else "live",
    )  # fmt: skip
    return _finish(outcome, options)


def _finish(outcome: Any, options: argparse.Namespace) -> int:
    """The last line of a run is its directory; with --json an object whose `run` key holds it."""
    from lockstep.launch.processes import is_follower

    if is_follower():
        pass
    elif options.json:
        print(json.dumps({"run": str(outcome.path), **outcome.summary}))
    else:
        print(outcome.path)
    return {"done": OK, "interrupted": INTERRUPTED, "stopped": STOPPED}[outcome.status]


def _sft(options: argparse.Namespace) -> int:
    from lockstep.config import resolve
    from lockstep.recipes import find_supervised_recipe

    _load_plugins(options.plugin)
    settings, reserved = _split(options.settings)
    _refuse(reserved, "sft", allowed=("out",))
    if options.help:
        if not options.target:
            _HELP["sft"].print_help()
            return OK
        return _print_settings(resolve(find_supervised_recipe(options.target), settings), options)
    config = resolve(find_supervised_recipe(options.target or "sft"), settings)
    if options.dry_run:
        from lockstep.supervised import check_supervised

        check_supervised(config)
        return _print_config(config)
    from lockstep.supervised import train_supervised

    outcome = train_supervised(
        config, out=reserved.get("out"), view="json" if options.json else "live"
    )
    return _finish(outcome, options)


def _eval(options: argparse.Namespace) -> int:
    from lockstep.config import from_dict, resolve
    from lockstep.run_config import Config
    from lockstep.store.run import load_run

    _load_plugins(options.plugin)
    settings, reserved = _split(options.settings)
    _refuse(reserved, "eval")
    path, step = _run_at(options.target)
    config = resolve(from_dict(Config, load_run(path).config), settings)
    from lockstep.run.train import evaluate_run

    metrics, name = evaluate_run(config, path, step=step)
    if options.json:
        print(json.dumps({"run": str(path), "checkpoint": name, "metrics": metrics}))
    else:
        print(f"{path} at {name}")
        for key, value in metrics.items():
            print(f"  {key:<40} {value:8.4f}")
    return OK


def _report(options: argparse.Namespace) -> int:
    if options.serve:
        return _serve_rows(options)
    from lockstep.report.page import write_report
    from lockstep.run.build import vocabulary_of
    from lockstep.store.run import load_run

    runs = [load_run(path) for path in options.runs]
    out = Path(options.out or (Path(options.runs[0]) / "report.html" if len(runs) == 1 else
                               "report.html"))  # fmt: skip
    write_report(runs, out, vocabulary=[vocabulary_of(run.config) for run in runs])
    print(json.dumps({"report": str(out)}) if options.json else out)
    return OK


def _serve_rows(options: argparse.Namespace) -> int:
    """All rows of a run or a dump, on demand, until Ctrl-C."""
    from lockstep.doctor.browse import BrowsedRows
    from lockstep.doctor.diagnose import diagnose
    from lockstep.doctor.progress import Reading
    from lockstep.errors import ConfigError
    from lockstep.report.server import RowServer

    if len(options.runs) > 1 or options.out:
        raise ConfigError("--serve serves one run or one dump, and writes no file.")
    with Reading() as reading:
        found = diagnose(
            options.runs[0], format=options.format, tokenizer=options.tokenizer,
            on_rows=reading.on_rows,
        )  # fmt: skip
        rows = BrowsedRows(found)
    try:
        server = RowServer(rows, host=options.host, port=options.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {options.host} --port {options.port}: {error}.") from error
    with server:
        if options.json:
            print(json.dumps({"url": server.url}), flush=True)
        else:
            print(f"{server.url} serves {options.runs[0]}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return OK


def _serve(options: argparse.Namespace) -> int:
    """Ctrl-C is its ordinary end."""
    from lockstep.config import to_dict
    from lockstep.errors import ConfigError
    from lockstep.model_server import find_served, serve

    _load_plugins(options.plugin)
    settings = list(options.settings)
    for name in ("host", "port"):
        if (value := getattr(options, name)) is not None:
            settings.append(f"gateway.{name}={value}")
    if options.help and not options.target:
        _HELP["serve"].print_help()
        return OK
    if not options.target:
        raise ConfigError("which model? For example: lockstep serve tiny-qwen3.")
    served = find_served(options.target, settings)
    if options.help:
        return _print_settings(served.config, options)
    if options.dry_run:
        if options.json:
            print(json.dumps({"config": to_dict(served.config)}))
            return OK
        return _print_config(served.config)
    key = options.key or os.environ.get("LOCKSTEP_KEY", "")
    with contextlib.suppress(KeyboardInterrupt):
        serve(served, key=key, out=options.out, is_json=options.json)
    return OK


def _ladder(options: argparse.Namespace) -> int:
    from lockstep.config import resolve
    from lockstep.doctor.diagnosis import EXIT_CODES
    from lockstep.doctor.ladder import climb
    from lockstep.run.build import checkpoint_of
    from lockstep.store.run import load_run

    settings, reserved = _split(options.settings)
    _refuse(reserved, "doctor --ladder")
    path, step = _run_at(options.target)
    weights = None
    if (path / "environment.json").is_file():
        weights = checkpoint_of(load_run(path), step) / "policy"
    config, _, _ = _training_config(str(path), [], {})
    ladder = climb(
        resolve(config, settings),
        weights=weights,
        dump=options.dump,
        on_rung=lambda text: None if options.json else print(f"{text} ...", file=sys.stderr),
    )
    if options.json:
        print(json.dumps(ladder.to_json()))
    else:
        print(ladder.summary())
    return EXIT_CODES["differs" if ladder.culprits else "consistent"]


def _doctor(options: argparse.Namespace) -> int:
    from lockstep.errors import ConfigError

    if options.ladder:
        return _ladder(options)
    if options.settings or options.dump:
        raise ConfigError(
            f"{(options.settings or ['--dump'])[0]} belongs to --ladder, which plays a recipe; a "
            "run or a dump is only read."
        )
    from rich.console import Console

    from lockstep.doctor.diagnose import diagnose
    from lockstep.doctor.diagnosis import EXIT_CODES
    from lockstep.doctor.progress import Reading
    from lockstep.doctor.terminal import show, summary

    _import_plugins(options.plugin)
    with Reading() as reading:
        diagnosis = diagnose(
            options.target, format=options.format, only=options.only,
            tokenizer=options.tokenizer, renderer=options.renderer, model=options.model,
            adapter=options.adapter, against=options.against, on_rows=reading.on_rows,
        )  # fmt: skip
    bisection = None
    if options.bisect is not None:
        from lockstep.doctor.numerics.bisecting import bisect_row

        bisection = bisect_row(diagnosis.setting.model, options.bisect)
    page = ""
    if options.out:
        from lockstep.doctor.html_page import write_page

        page = str(write_page(diagnosis, options.out))
    if options.json:
        more = {} if bisection is None else {"bisect": bisection.to_json()}
        print(json.dumps(diagnosis.to_json() | {"page": page} | more, allow_nan=False))
        return EXIT_CODES[diagnosis.outcome]
    if (console := Console(highlight=False)).is_terminal:
        show(diagnosis, console, page=page)
    else:
        _say(summary(diagnosis, page=page))
    if bisection is not None:
        _say(bisection.describe())
    return EXIT_CODES[diagnosis.outcome]


def _replay(options: argparse.Namespace) -> int:
    import io

    from rich.console import Console

    from lockstep.doctor.inputs.base import Facts
    from lockstep.doctor.replay import find, parse_target, score, show
    from lockstep.doctor.tokenization import find_tokenization
    from lockstep.store.run import load_run

    _load_plugins(options.plugin)
    path, step, name = parse_target(options.target)
    facts = Facts(trainer="lockstep", model=str(load_run(path).config.get("model", "")))
    tokenizer = find_tokenization(facts).tokenizer
    replay = find(path, name, tokenizer=tokenizer)
    scores = score(replay, step=step) if options.score or step is not None else None
    if options.json:
        print(json.dumps(replay.to_json(), allow_nan=False))
    elif (console := Console(highlight=False)).is_terminal:
        show(replay, console, has_all_tokens=options.tokens)
    else:
        out = io.StringIO()
        show(replay, Console(file=out, highlight=False, width=100), has_all_tokens=options.tokens)
        _say("\n".join(line.rstrip() for line in out.getvalue().splitlines()))
    is_broken = scores is not None and scores.contract and replay.comes_back is False
    return FAILED if is_broken else OK


def _render(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lockstep.doctor.rendering import find_renderer, read_dialogue, show, text_of, to_json
    from lockstep.renderers.origins import trace

    _import_plugins(options.plugin)
    messages, tools = read_dialogue(options.messages, tools_path=options.tools)
    renderer = find_renderer(options.model, renderer=options.renderer)
    rendering = trace(renderer, messages, tools)
    if options.json:
        print(json.dumps(to_json(rendering, renderer, options.model)))
    elif (console := Console(highlight=False)).is_terminal:
        show(rendering, renderer, options.model, console)
    else:
        print(text_of(rendering, renderer, options.model))
    return OK


def _export(options: argparse.Namespace) -> int:
    from lockstep.run.build import export_checkpoint

    path, step = _run_at(options.target)
    name = export_checkpoint(path, Path(options.hf), step=step, is_merged=options.merged)
    if options.json:
        print(json.dumps({"run": str(path), "checkpoint": name, "hf": options.hf}))
    else:
        print(f"{path} at {name} -> {options.hf}")
    return OK


def _recipes(options: argparse.Namespace) -> int:
    from lockstep.recipes import RECIPES, SUPERVISED_RECIPES

    _load_plugins(options.plugin)
    rows = [(name, "train", recipe) for name, recipe in RECIPES.items()]
    rows += [(name, "sft", recipe) for name, recipe in SUPERVISED_RECIPES.items()]
    described = [(verb, name, " ".join((r.__doc__ or "").split())) for name, verb, r in rows]
    if options.json:
        print(json.dumps([{"verb": v, "name": n, "about": d} for v, n, d in described]))
        return OK
    for verb, name, text in described:
        print(f"lockstep {verb} {name}")
        print(textwrap.indent(textwrap.fill(text, 92), "    "))
    return OK


# -- what a run starts from -----------------------------------------------------------------------


def _training_config(
    target: str | None, settings: list[str], reserved: dict[str, str]
) -> tuple[Any, Path | None, tuple[Path, int | None] | None]:
    """(config, run to continue or None, (run, step) to fork from or None)."""
    from lockstep.config import differences, from_dict, resolve, to_dict
    from lockstep.errors import ConfigError
    from lockstep.recipes import find_recipe
    from lockstep.run_config import Config
    from lockstep.store.run import load_run

    is_resume = _truth(reserved.get("resume", "false"))
    fork = _run_at(reserved["from"]) if "from" in reserved else None
    if is_resume and fork:
        raise ConfigError("resume=true continues a run and from=RUN@STEP starts one: choose one.")
    if fork and target is None:
        config = from_dict(Config, load_run(fork[0]).config)
    elif target is None:
        raise ConfigError(
            "which recipe? For example: lockstep train quickstart. `lockstep recipes` lists them."
        )
    elif (path := _config_file(target)) is not None:
        try:
            config = from_dict(Config, json.loads(path.read_text()))
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise ConfigError(f"{path}: {error}") from None
            raise ConfigError(f"{path} is not JSON: {error}.") from None
    else:
        config = find_recipe(target)
    if not is_resume:
        return config, None, fork
    where = reserved.get("out") or (str(path.parent) if (path := _config_file(target)) else "")
    if not where:
        raise ConfigError(
            "resume=true needs the run: lockstep train RUN resume=true, or out=RUN with the recipe."
        )
    stored = load_run(where).config
    asked = resolve(config, settings)
    # A run goes on with any number of processes, anywhere: what it computes stays the same.
    stored |= {name: to_dict(asked)[name] for name in ("parallel", "placement")}
    changed = differences(stored, to_dict(asked))
    if changed:
        listed = ", ".join(f"{k}: {a} -> {b}" for k, (a, b) in changed.items())
        raise ConfigError(
            f"resume=true continues {where} as it was, and these settings differ: {listed}. To go "
            f"on with other settings start a new run from its checkpoint: from={where}@STEP."
        )
    return from_dict(Config, stored), Path(where), None


def _config_file(target: str | None) -> Path | None:
    """The config.json that a target means: a file, or a run directory that holds one."""
    if target is None:
        return None
    path = Path(target)
    if path.is_dir():
        path = path / "config.json"
    return path if path.suffix == ".json" and path.is_file() else None


def _run_at(text: str) -> tuple[Path, int | None]:
    """`RUN@STEP` or `RUN`: the step is None for the checkpoint that the verb prefers."""
    from lockstep.errors import ConfigError

    path, at, step = text.rpartition("@")
    if not at:
        return Path(text), None
    if not step.isdigit():
        raise ConfigError(f"{text!r}: expected RUN@STEP with a whole number for STEP.")
    return Path(path), int(step)


def _split(settings: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(settings of the config, the command's own: out, from, resume)."""
    own = {k: v for k, eq, v in (s.partition("=") for s in settings) if eq and k in RESERVED}
    return [s for s in settings if s.partition("=")[0] not in own], own


def _refuse(reserved: dict[str, str], verb: str, allowed: Sequence[str] = ()) -> None:
    from lockstep.errors import ConfigError

    if extra := [k for k in reserved if k not in allowed]:
        raise ConfigError(f"lockstep {verb} takes no {extra[0]}=.")


def _truth(text: str) -> bool:
    from lockstep.errors import ConfigError

    if text.lower() not in ("true", "false", "1", "0"):
        raise ConfigError(f"resume={text}: expected true or false.")
    return text.lower() in ("true", "1")


def _load_plugins(names: Sequence[str]) -> None:
    """Imports plugins after the package's own kinds, which they may extend."""
    import lockstep.recipes  # noqa: F401  with them come the kinds of tasks and dialogues

    _import_plugins(names)


def _import_plugins(names: Sequence[str]) -> None:
    """Imports a user's files and modules, and the modules that installed packages name under the
    entry point `lockstep.plugins`. Their kinds (tasks, losses, dump formats) are known then."""
    import importlib
    from importlib.metadata import entry_points

    from lockstep.errors import ConfigError

    for point in entry_points(group="lockstep.plugins"):
        point.load()
    sys.path.insert(0, "")  # a module in the working directory is importable, as with `python -m`
    for name in names:
        path = Path(name).resolve() if name.endswith(".py") else None
        if path is not None:
            sys.path.insert(0, str(path.parent))
        try:
            module = importlib.import_module(name if path is None else path.stem)
        except ModuleNotFoundError as error:
            if error.name and not (name if path is None else path.stem).startswith(error.name):
                raise
            kind = "module here" if path is None else "file"
            raise ConfigError(f"--plugin {name}: there is no such {kind}.") from None
        if path is not None and Path(module.__file__ or "").resolve() != path:
            raise ConfigError(
                f"--plugin {name}: another module is called {path.stem}. Rename the file."
            )


# -- showing settings -----------------------------------------------------------------------------


def _dry_run(config: Any, options: argparse.Namespace) -> int:
    from lockstep.run.plan import plan
    from lockstep.run.preflight import preflight

    lines = plan(config, preflight(config))
    if options.json:
        from lockstep.config import to_dict

        print(json.dumps({"config": to_dict(config), "plan": lines}))
        return OK
    _print_config(config)
    print(*lines, sep="\n")
    return OK


def _print_config(config: Any) -> int:
    from lockstep.config import dumps

    print(dumps(config), end="")
    return OK


def _show_settings(options: argparse.Namespace, settings: list[str]) -> int:
    from lockstep.config import resolve
    from lockstep.recipes import find_recipe

    if not options.target:
        _HELP["train"].print_help()
        return OK
    return _print_settings(resolve(find_recipe(options.target), settings), options)


def _print_settings(config: Any, options: argparse.Namespace) -> int:
    from lockstep.config import describe

    rows = list(describe(config))
    if options.json:
        keys = ("path", "type", "value", "about")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
        return OK
    for path, kind, value, doc in rows:
        print(f"{path}={value}  ({kind})")
        if doc:
            print(textwrap.indent(textwrap.fill(doc, 92), "    "))
    return OK


# -- the parser -----------------------------------------------------------------------------------

_HELP: dict[str, argparse.ArgumentParser] = {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="Train tool-using language-model agents, with sampler and trainer in lockstep.",
        epilog=f"start here: lockstep train quickstart\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    def verb(name: str, run: Any, about: str, example: str, *, own_help: bool = False):
        made = verbs.add_parser(
            name,
            help=about,
            description=about,
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=not own_help,
        )
        made.set_defaults(run=run)
        made.add_argument("--json", action="store_true", help="print JSON, no progress")
        if own_help:
            made.add_argument("-h", "--help", action="store_true",
                              help="this text; with a recipe, every setting of it")  # fmt: skip
            made.add_argument("--dry-run", action="store_true",
                              help="print the resolved config and plan, start nothing")  # fmt: skip
        made.add_argument("--plugin", action="append", default=[], metavar="PLUGIN",
                          help="Python file or module with kinds of your own")  # fmt: skip
        if name in ("train", "eval", "doctor"):
            made.add_argument(
                "--fault",
                action="append",
                metavar="KIND[,SETTING=VALUE...]",
                help="break the run on purpose: docs/reference/faults.md",
            )
        _HELP[name] = made
        return made

    train = verb(
        "train",
        _train,
        "Train an agent by reinforcement learning.",
        "lockstep train quickstart steps=30 seed=1 model=tiny-qwen3",
        own_help=True,
    )
    train.add_argument("target", nargs="?", metavar="RECIPE|config.json|RUN")
    train.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="settings of the recipe, and: out=DIR, resume=true, from=RUN@STEP",
    )
    sft = verb(
        "sft",
        _sft,
        "Train on written dialogues (supervised).",
        "lockstep sft model=tiny-qwen3 sft.path=dialogues.jsonl sft.steps=200",
        own_help=True,
    )
    sft.add_argument("target", nargs="?", metavar="RECIPE")
    sft.add_argument("settings", nargs="*", metavar="key=value")
    evaluate = verb(
        "eval",
        _eval,
        "Play held-out tasks with a run's best checkpoint (or RUN@STEP).",
        "lockstep eval runs/quickstart-20260101-120000 evaluation.num_tasks=512",
    )
    evaluate.add_argument("target", metavar="RUN[@STEP]")
    evaluate.add_argument("settings", nargs="*", metavar="key=value")
    report = verb(
        "report",
        _report,
        "Write one HTML file about one run, or several side by side.",
        "lockstep report runs/a runs/b --out both.html",
    )
    report.add_argument("runs", nargs="+", metavar="RUN")
    report.add_argument("--out", metavar="FILE", help="default: RUN/report.html, or report.html")
    report.add_argument("--serve", action="store_true",
                        help="in place of a file, serve every row of a run or a dump on this "
                             "machine: sort, filter, open")  # fmt: skip
    report.add_argument("--format", default="", help="of a dump that is served; default: found out")
    report.add_argument("--tokenizer", default="", metavar="DIR",
                        help="of a dump that is served, to show text for ids; default: that of the "
                             "model that it names, if it is here")  # fmt: skip
    report.add_argument("--port", type=int, default=0, help="of --serve; default: a free one")
    report.add_argument("--host", default="127.0.0.1",
                        help="of --serve; default: this machine only. Anybody who reaches another "
                             "address reads all rows")  # fmt: skip
    doctor = verb(
        "doctor",
        _doctor,
        "Say why sampler and trainer differ: of a run, or of another trainer's dump.",
        "lockstep doctor runs/quickstart-20260101-120000",
    )
    doctor.add_argument("target", metavar="RUN|DUMP|example", help="what to examine (example: "
                        "a shipped dump with two defects); with --ladder: "
                        "RECIPE|config.json|RUN[@STEP]")  # fmt: skip
    doctor.add_argument("settings", nargs="*", metavar="key=value", help="of --ladder: settings of "
                        "the recipe")  # fmt: skip
    doctor.add_argument("--ladder", action="store_true",
                        help="play plain text, one turn, several turns and the training path with "
                             "a recipe's model, template and engine")  # fmt: skip
    doctor.add_argument("--dump", metavar="DUMP",
                        help="with --ladder: what your trainer wrote, in place of the training "
                             "path of Lockstep")  # fmt: skip
    doctor.add_argument("--format", default="", help="of a dump; default: found out")
    doctor.add_argument("--out", metavar="FILE.html",
                        help="also write the diagnosis as one HTML file: curves, proof, "
                             "rows")  # fmt: skip
    doctor.add_argument("--only", action="append", default=[], metavar="CHECK",
                        help="make this check alone, by its name in the summary; may be "
                             "repeated")  # fmt: skip
    doctor.add_argument("--model", default="", metavar="DIR",
                        help="score a sample of the rows again by this model; own: by the run's "
                             "own model and checkpoints")  # fmt: skip
    doctor.add_argument(
        "--adapter",
        default="",
        metavar="DIR",
        help="with --model: the adapter on it, in PEFT's form",
    )
    doctor.add_argument("--bisect", nargs="?", const="", metavar="ROW",
                        help="with --model: the first op that differs, of this row or of the one "
                             "that deviates most")  # fmt: skip
    doctor.add_argument("--against", action="append", default=[], metavar="DIR",
                        help="with --model: other weights that one side may have run; may be "
                             "repeated")  # fmt: skip
    doctor.add_argument("--tokenizer", default="", metavar="DIR",
                        help="directory with a tokenizer.json, such a file, or ORGANISATION/NAME "
                             "to fetch it; default: that of the model that the input names, if it "
                             "is here")  # fmt: skip
    doctor.add_argument("--renderer", default="", metavar="NAME",
                        help="format of the dialogues: harmony, chatml, ..., settings as JSON, or "
                             "a renderer.json; default: the model's")  # fmt: skip
    replay = verb(
        "replay",
        _replay,
        "Show one stored trajectory token by token, and try whether its log-probs come back.",
        "lockstep replay 'runs/quickstart-20260101-120000#0' --score",
    )
    replay.add_argument("target", metavar="RUN[@STEP]#ID",
                        help="a trajectory by its id, the end of one, or its number; with @STEP it "
                             "is scored by that checkpoint")  # fmt: skip
    replay.add_argument("--score", action="store_true",
                        help="load the weights that sampled it, and run trainer and engine on it "
                             "again; exit code 1 if a contract is broken")  # fmt: skip
    replay.add_argument("--tokens", action="store_true", help="list every sampled token")
    render = verb(
        "render",
        _render,
        "Show a dialogue as tokens, by origin, and whether rendering it anew changes them.",
        "lockstep render tiny-gpt-oss messages.json",
    )
    render.add_argument("model", metavar="MODEL",
                        help="a shipped model, a directory with a tokenizer.json, or "
                             "ORGANISATION/NAME")  # fmt: skip
    render.add_argument("messages", metavar="messages.json",
                        help="a list of chat messages, an object with `messages` and `tools`, or "
                             "a JSONL file, of which the first line is read")  # fmt: skip
    render.add_argument("--tools", default="", metavar="FILE",
                        help="the tools that are declared: a JSON list")  # fmt: skip
    render.add_argument("--renderer", default="", metavar="NAME",
                        help="harmony, chatml, jinja, ..., settings as JSON, or a renderer.json; "
                             "default: the model's")  # fmt: skip
    export = verb(
        "export",
        _export,
        "Write a run's checkpoint as a Hugging Face model, or its adapter in PEFT's form.",
        "lockstep export runs/quickstart-20260101-120000 --hf my-model",
    )
    export.add_argument("target", metavar="RUN[@STEP]")
    export.add_argument("--hf", required=True, metavar="DIR", help="directory to write")
    export.add_argument("--merged", action="store_true",
                        help="of a run with lora: the model with the adapter in its weights, in "
                             "place of the adapter alone")  # fmt: skip
    serve = verb(
        "serve",
        _serve,
        "Serve a model or a run's checkpoint to agents over HTTP, and keep what they do as "
        "trajectories.",
        "lockstep serve tiny-qwen3 --port 8000 --out runs/served",
        own_help=True,
    )
    serve.add_argument("target", nargs="?", metavar="MODEL|RUN[@STEP]")
    serve.add_argument("settings", nargs="*", metavar="key=value")
    serve.add_argument("--port", type=int, metavar="N", help="gateway.port; default: a free one")
    serve.add_argument("--host", metavar="ADDRESS",
                       help="gateway.host; default: this machine only. Any other needs a "
                            "key")  # fmt: skip
    serve.add_argument("--key", default="", metavar="KEY",
                       help="opens every session; better in the environment, as LOCKSTEP_KEY, "
                            "where other users of this machine do not see it")  # fmt: skip
    serve.add_argument("--out", metavar="DIR",
                       help="keep finished sessions there, for report and doctor")  # fmt: skip
    verb("recipes", _recipes, "List the recipes.", "lockstep recipes")
    return parser


def _options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed arguments, where flags and settings may stand in any order.

    `lockstep train from=RUN@3` has no target: a first word with an = in it is a setting.
    """
    options, rest = parser.parse_known_args(argv)
    takes_settings = hasattr(options, "settings")
    if unknown := [word for word in rest if word.startswith("-") or not takes_settings]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_settings:
        options.settings += rest
        if options.target and "=" in options.target and not Path(options.target).exists():
            options.settings.insert(0, options.target)
            options.target = None
    return options


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"lockstep {version('lockstep-rl')}"
    except PackageNotFoundError:
        return "lockstep (not installed)"


if __name__ == "__main__":
    sys.exit(main())
