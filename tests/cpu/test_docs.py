"""Every snippet of README and docs/ runs, and prints what the page says.

    python tests/cpu/test_docs.py       rewrites the outputs and generated tables in the pages

Blocks of one page run in order, in one directory; its Python blocks share one namespace. Executed
are ```python blocks and, in ```sh and ```console blocks, the commands `lockstep ...` and
`python -m lockstep...`. A ```text block that follows one (or the lines after `$ ...` in a console
block) is what it prints; `...` stands for anything. A comment before a block tells more:

    <!-- run: steps=2 out=runs/a -->     settings that the commands are given besides, to be quick
    <!-- run: exit 2 -->                 the exit code that the page speaks of
    <!-- run: no, REASON -->             not executed
    <!-- run: needs NAME ... -->         only where `lockstep fetch NAME` was called before
    <!-- file: my_task.py -->            written to this file instead
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
import tomllib
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from lockstep.errors import CheckpointError
from lockstep.models.gguf import packaged

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("reference/*.md"))]

FENCE = re.compile(
    r"(?:^<!-- (?P<directive>(?:run|file): .*?) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)
TABLE = re.compile(r"<!-- generated: (?P<name>\S+) -->\n(?P<body>.*?)<!-- end -->", re.S)
TAKES_SETTINGS = ("train", "sft", "eval")


# -- reading a page -------------------------------------------------------------------------------


@dataclass
class Block:
    """One fenced block, and what it must print."""

    language: str
    body: str
    line: int
    """Of its first line of content, from 1."""
    span: tuple[int, int]
    """Of its content in the page."""
    directive: str = ""
    expected: Block | None = None
    printed: list[tuple[tuple[int, int], str, str]] = field(default_factory=list)
    """(place in the page, expected, printed) of what ran."""


def read_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        block = Block(
            language=match["language"],
            body=match["body"],
            line=text.count("\n", 0, match.start("body")) + 1,
            span=match.span("body"),
            directive=match["directive"] or "",
        )
        follows = blocks and not text[end : match.start()].strip()
        if block.language == "text" and follows and blocks[-1].language in ("python", "sh"):
            blocks[-1].expected = block
        else:
            blocks.append(block)
        end = match.end()
    return blocks


def commands(block: Block) -> list[tuple[str, tuple[int, int] | None]]:
    """(command, place of its output in the page or None) of a shell block."""
    if block.language == "sh":
        joined = re.sub(r"\\\n\s*", " ", block.body)
        lines = [line.removeprefix("$ ") for line in joined.splitlines()]
        return [(line, None) for line in lines if line.strip()]
    out: list[tuple[str, tuple[int, int] | None]] = []
    at = block.span[0]
    parts = re.split(r"^\$ ", block.body, flags=re.M)
    assert not parts[0], f"line {block.line}: a console block begins with `$ `"
    for part in parts[1:]:
        command, newline, output = part.partition("\n")
        begin = at + 2 + len(command) + len(newline)
        out.append((command, (begin, begin + len(output))))
        at = begin + len(output)
    return out


# -- running it -----------------------------------------------------------------------------------


def run_page(page: Path, directory: Path) -> list[Block]:
    """Runs all blocks in `directory`, which is the current one and has the examples. Returns them
    with what they printed."""
    (directory / "examples").symlink_to(ROOT / "examples")
    text = page.read_text(encoding="utf-8")
    module = types.ModuleType(f"docs_{page.stem}")
    sys.modules[module.__name__] = module
    blocks = read_blocks(text)
    for block in blocks:
        where = f"{page.name}:{block.line}"
        kind, _, directive = block.directive.partition(": ")
        if kind == "file":
            path = directory / directive
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        elif directive.startswith("no"):
            assert directive.startswith("no, "), f"{where}: `run: no` needs a reason"
        elif block.language == "python":
            printed = run_python(block, page, module)
            span = block.expected.span if block.expected else None
            record(block, span, block.expected.body if block.expected else "", printed)
        elif block.language in ("sh", "console"):
            run_shell(block, directive, where, text)
    return blocks


def run_python(block: Block, page: Path, module: types.ModuleType) -> str:
    out = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.body, str(page), "exec")
    with contextlib.redirect_stdout(out):
        exec(code, module.__dict__)
    return out.getvalue()


def run_shell(block: Block, directive: str, where: str, text: str) -> None:
    code = 0
    if match := re.match(r"needs (\S+)\s*", directive):
        directive = directive[match.end() :]
        try:
            packaged(match[1])
        except CheckpointError as error:
            return warnings.warn(f"{where} is skipped: {error}", stacklevel=1)
    if match := re.match(r"exit (\d+)\s*", directive):
        code, directive = int(match[1]), directive[match.end() :]
    all_printed = ""
    ran = False
    for command, span in commands(block):
        words = shlex.split(command, comments=True)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            if words[:1] == ["lockstep"]:
                found = run_lockstep(words[1:], shlex.split(directive))
                assert found == code, f"{where}: {command}: exit code {found}\n{out.getvalue()}"
            elif words[:2] == ["python", "-m"] and words[2].startswith("lockstep"):
                run_module(words[2], words[3:])
            else:
                continue
        ran = True
        all_printed += out.getvalue()
        if span is not None:
            record(block, span, text[slice(*span)], out.getvalue())
    if block.expected is not None:
        assert ran, f"{where}: an output is given, but no command of it runs here"
        record(block, block.expected.span, block.expected.body, all_printed)


def run_lockstep(words: list[str], settings: list[str]) -> int:
    from lockstep.cli import main

    is_run = words[:1] and words[0] in TAKES_SETTINGS and not {"--help", "--dry-run"} & set(words)
    try:
        return main([*words, *(settings if is_run else [])])
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)


def run_module(name: str, words: list[str]) -> None:
    before, sys.argv = sys.argv, [name, *words]
    try:
        with contextlib.suppress(SystemExit):
            runpy.run_module(name, run_name="__main__")
    finally:
        sys.argv = before


def record(block: Block, span: tuple[int, int] | None, expected: str, printed: str) -> None:
    if span is not None:
        block.printed.append((span, expected, printed))


def agrees(expected: str, printed: str) -> bool:
    """Line by line, without blanks at line ends; `...` stands for anything."""
    lines = [line.rstrip() for line in expected.strip("\n").splitlines()]
    parts = [re.escape(part) for part in "\n".join(lines).split("...")]
    found = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    return re.fullmatch(".*?".join(parts), found, re.S) is not None


# -- generated tables -----------------------------------------------------------------------------

PROOFS = DOCS / "proof"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"| {head} " if head else "| " for head in heads)
    lines = [f"{head}|", "|---" * len(heads) + "|"]
    body = (f"| {' | '.join(map(str, row))} |".replace("|  ", "| ") for row in rows)
    return "\n".join([*lines, *body, ""])


def proved(name: str, default: Any = None) -> Any:
    """The figures of a proof; the default where it has not run."""
    path = PROOFS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() or default is None else default


def metrics_table() -> str:
    from lockstep.observe.metrics import METRICS

    arrow = {"up": "higher", "down": "lower", "none": ""}
    return table(
        ("name", "unit", "better", "what it is"),
        ((f"`{m.name}`", m.unit, arrow[m.better], m.meaning) for m in METRICS),
    )


def sandbox_table() -> str:
    kinds = proved("sandbox")["kinds"]
    names = list(next(iter(kinds.values()))["endings"])
    rows = ([name, *(kind["endings"][name] for kind in kinds.values())] for name in names)
    return table(["program", *kinds], rows)


def gpu_host_table() -> str:
    heads = (
        "model",
        "launches of a layer in a decode step, 1 row and 64 ragged ones",
        "waits and copies of a step",
        "launches of attention's backward",
        "registers, at most: sm_80, sm_90, sm_100, sm_120",
        "spilled bytes",
    )
    rows = []
    for name, chips in proved("gpu_host")["models"].items():
        of = chips["sm_90"]
        step = of["decode"]["64 ragged rows"]
        kernels = [list(chip["kernels"].values()) for chip in chips.values()]
        registers = ", ".join(str(max(used["registers"] for used in each)) for each in kernels)
        spilled = max(used["spilled"] for each in kernels for used in each)
        launches = of["launches per layer"]
        waits = (
            f"{step['syncs']:g} wait, {step['copies to the GPU']:g} copy in, "
            f"{step['copies to the host']:g} out"
        )
        layer = f"{launches['1 row']:g}, {launches['64 ragged rows']:g}"
        rows.append((name, layer, waits, f"{of[BACKWARD]['launches']:g}", registers, spilled))
    return table(heads, rows)


BACKWARD = "attention's backward"


def columns_table() -> str:
    from lockstep.types import COLUMNS

    rows = []
    for name, spec in COLUMNS.items():
        dtype = f"{spec.dtype}, any number" if spec.is_ragged else spec.dtype
        dtype += f" [{', '.join(map(str, spec.trailing_shape))}]" if spec.trailing_shape else ""
        rows.append((f"`{name}`", dtype, "none" if spec.fill is None else f"{spec.fill:g}"))
    return table(("column", "dtype", "where there is nothing to say"), rows)


def fields_table(dialect: str) -> str:
    from lockstep.agent.gateway.fields import FIELDS

    order = ("honoured", "accepted", "ignored", "refused")
    found = FIELDS[dialect].items()
    rows = []
    for name, spec in sorted(found, key=lambda f: order.index(f[1].treatment)):
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in spec.neutral)
        about = f"{spec.about} Harmless: {neutral}." if neutral else spec.about
        rows.append((f"`{name}`", spec.treatment, about))
    return table(("field", "", "how, why, or what instead"), rows)


def rooms_table() -> str:
    from test_layers import ROWS

    rows = ((at, " ".join(f"`{room}`" for room in row)) for at, row in enumerate(ROWS))
    return table(("row", "rooms"), rows)


def figures_table() -> str:
    """What `make proof` measured of the quickstart; a token in place of what it has not."""
    runs = proved("quickstart", {"figures": {}})["figures"]
    models = ("tiny-gpt-oss", "tiny-qwen3")

    def of(model: str, *, is_kept: bool = True) -> list[dict]:
        of_model = {key: run for key, run in runs.items() if key.startswith(f"{model} seed")}
        return [run for key, run in of_model.items() if key.endswith("none") != is_kept]

    def cell(model: str, name: str, at: int | None = None, *, is_kept: bool = True) -> str:
        values = [run[name] for run in of(model, is_kept=is_kept)]
        values = [value if at is None else value[at] for value in values]
        if not values:
            return f"[[{model}.{name}{'' if at is None else f'.{at}'}]]"
        low, high = f"{min(values):.3g}", f"{max(values):.3g}"
        return low if low == high else f"{low} .. {high}"

    def change(name: str) -> list[str]:
        return [f"{cell(model, name, 0)} -> {cell(model, name, 1)}" for model in models]

    def figure(name: str, *, is_kept: bool = True) -> list[str]:
        return [cell(model, name, is_kept=is_kept) for model in models]

    def unequal() -> list[str]:
        totals = [[sum(r[f"{n}_tokens"] for r in of(m)) for n in ("unequal", "compared")]
                  for m in models]  # fmt: skip
        return [f"{differ} of {total:,}" for differ, total in totals]

    rows = {
        "mean reward of step 0": figure("reward_step_0"),
        "mean reward of the last ten steps": figure("reward_last_10"),
        "held-out reward, sampled, before -> after": change("held_out_sampled"),
        "held-out reward, greedy, before -> after": change("held_out_greedy"),
        "two-hop questions right, sampled, before -> after": change("two_hop_correct_sampled"),
        "tokens whose two log-probs differ in a bit": unequal(),
        "seconds of training": figure("training_seconds"),
        "`contract=none`: mean reward of the last ten steps": figure(
            "reward_last_10", is_kept=False
        ),
        "`contract=none`: seconds of training": figure("training_seconds", is_kept=False),
        "`contract=none`: worst log-prob difference of a token": figure(
            "max_abs_diff_worst", is_kept=False
        ),
        "`contract=none`: worst k3 of a step": figure("k3_worst", is_kept=False),
    }
    return table(("seeds 0, 1, 2", *models), ([name, *cells] for name, cells in rows.items()))


def task_table(name: str) -> str:
    """What `python docs/proof/tasks.py` measured of a recipe, a column per seed."""
    recipes = proved("tasks", {"recipes": {}})["recipes"]
    if name not in recipes:
        return f"[[{name}: run python docs/proof/tasks.py {name}]]\n"
    runs = recipes[name]["runs"] | recipes[name]["other_runs"]
    first = next(iter(runs.values()))

    def reward(estimate: dict[str, float]) -> str:
        return f"{estimate['mean']:.3f} ({estimate['low']:.3f} .. {estimate['high']:.3f})"

    def change(values: list[Any], show: Callable[[Any], str] = "{:.3g}".format) -> str:
        return " -> ".join(map(show, values))

    rows: dict[str, list[str]] = {}
    for how in ("sampled", "greedy"):
        tests = [run["held_out_reward"][how] for run in runs.values()]
        rows[f"held-out reward, {how}, before -> after"] = [change(t, reward) for t in tests]
    for figure in first["held_out"]:
        found = [run["held_out"][figure] for run in runs.values()]
        rows[f"held out, sampled: {figure}"] = [change(values) for values in found]
    for how in first["played_again"]:
        again = [run["played_again"].get(how) for run in runs.values()]
        rows[f"after, {how}: reward, sampled"] = [reward(a["sampled"]) if a else "" for a in again]
    for figure in first["first_and_last_10"]:
        found = [run["first_and_last_10"][figure] for run in runs.values()]
        rows[f"{figure}, first 10 steps -> last 10"] = [change(values) for values in found]
    rows["tokens whose two log-probs differ in a bit"] = [
        f"{run['unequal_tokens']} of {run['compared_tokens']:,}" for run in runs.values()
    ]
    for figure in ("minutes", "cpu_minutes"):
        rows[figure.replace("_", " ")] = [f"{run[figure]:.1f}" for run in runs.values()]
    return table(["", *runs], ([row, *cells] for row, cells in rows.items()))


TASKS = {
    "quickstart": ("document search", "tiny-gpt-oss", "quickstart.md"),
    "math": ("word problems in two or three steps", "tiny-math", "tasks.md#mathematics"),
    "retool": ("problems with a Python tool, over several turns", "tiny-math", "tasks.md#retool"),
    "instructions": ("one to three of nine kinds of instructions", "tiny-instructions",
                     "tasks.md#instruction-following"),
}  # fmt: skip
"""Recipe -> what is learnt, by which shipped model, and the page about it."""


def span(values: list[float], digits: int = 2) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} .. {high}"


def tasks_table() -> str:
    """What `python docs/proof/tasks.py` measured of all recipes, in a line each."""
    recipes = proved("tasks", {"recipes": {}})["recipes"]
    heads = ("command", "learns", "by", "held out, before", "after", "greedy", "rise", "apart",
             "minutes")  # fmt: skip
    rows = []
    for name, (learns, model, page) in TASKS.items():
        cells = [f"`lockstep train {name}`", f"[{learns}]({page})", model]
        if name not in recipes:
            rows.append([*cells, "not measured yet", *[""] * 5])
            continue
        found = recipes[name]
        runs = list(found["runs"].values())
        tests = {
            how: [run["held_out_reward"][how] for run in runs] for how in ("sampled", "greedy")
        }
        for at in (0, 1):
            both = [test[at] for test in tests["sampled"]]
            low, high = min(t["low"] for t in both), max(t["high"] for t in both)
            cells.append(f"{span([t['mean'] for t in both])} ({low:.2f} .. {high:.2f})")
        greedy = [span([test[at]["mean"] for test in tests["greedy"]]) for at in (0, 1)]
        cells += [" -> ".join(greedy), f"{found['smallest_rise_of_a_seed']:+.2f} or more"]
        cells += ["yes" if found["intervals_apart"] else "no"]
        rows.append([*cells, span([r["minutes"] for r in runs], 1)])
    return table(heads, rows)


STUDIES = tomllib.loads((PROOFS / "studies.toml").read_text("utf-8"))
"""Studies with the columns of their tables, and the heads of these."""


def methods_table() -> str:
    """What each method sets in a run of max_tokens=256 and groups_per_step=8."""
    from lockstep.config import flatten
    from lockstep.recipes import find_recipe
    from lockstep.recipes.methods import METHODS, settings_of

    config = find_recipe("quickstart")
    rows = []
    for name, method in METHODS.items():
        settings = " ".join(
            f"`{path}={_written(value)}`"
            for path, value in flatten(settings_of(name, config)).items()
        ).replace(".type=", "=")
        rows.append((f"`{name}`", settings, method["source"]))
    return table(("method", "settings", "source"), rows)


def _written(value: Any) -> str:
    """As it is written on the command line."""
    if isinstance(value, list):
        return ",".join(f"{entry:g}" for entry in value)
    return str(value).lower()


def study_table(name: str) -> str:
    """What `make studies` found: mean over the seeds, and in brackets the least and the largest."""
    study = proved("studies")["studies"].get(name)
    if study is None:
        return f"[[not run yet: python docs/proof/studies.py {name}]]\n"

    def cell(seeds: list[dict[str, Any]], figure: str) -> str:
        values = [seed.get(figure) for seed in seeds]
        found = [value for value in values if value is not None]
        if not found or (len(found) < len(values) and figure != "collapse_step"):
            return ""
        least, middle, most = min(found), fmean(found), max(found)
        low, mid, high = (f"{value:.3g}" for value in (least, middle, most))
        return mid if low == high else f"{mid} ({low} .. {high})"

    def label(arm: str, num_seeds: int) -> str:
        planned = study["num_seeds"]
        if num_seeds == planned:
            return arm
        of = f" of {planned}" if num_seeds < planned else ""
        return f"{arm} ({num_seeds}{of} seeds)"

    columns, conditions = STUDIES["studies"][name]["columns"].split(), study["conditions"]
    has_arms = any(len(arms) > 1 for arms in conditions.values())
    heads = ["condition", *(["arm"] if has_arms else []), *map(STUDIES["heads"].get, columns)]
    rows = []
    for condition, arms in conditions.items():
        for arm, found in arms.items():
            seeds = list(found["seeds"].values())
            names = [condition, arm] if has_arms else [condition]
            names[-1] = label(names[-1], len(seeds))
            rows.append(names + [cell(seeds, figure) for figure in columns])
    return table(heads, rows)


def claims_table(document: str) -> str:
    """What `make claims` found of one document: a row per comparison."""
    rows = []
    for claim in proved("claims")["claims"]:
        if claim["document"] == document:
            first, last = [claim["claim"], claim["theirs"]], claim["commands"]
            for ours, verdict in zip_longest(claim["ours"], claim["verdicts"], fillvalue=""):
                told = ", ".join(f"`{command}`" for command in last)
                rows.append((*first, ours, f"**{verdict}**" if verdict else "", told))
                first, last = ["", ""], []
    return table(("claim", "theirs", "ours", "verdict", "`docs/proof/`"), rows)


def claims_count() -> str:
    claims = proved("claims")["claims"]
    verdicts = [verdict for claim in claims for verdict in claim["verdicts"]]
    counts = Counter(re.split(r" \(| beyond", verdict)[0] for verdict in verdicts)
    told = ", ".join(f"{count} **{verdict}**" for verdict, count in counts.most_common())
    few = sum("too few seeds" in verdict for verdict in verdicts)
    return f"{len(claims)} claims, {len(verdicts)} comparisons: {told}. {few} have too few seeds.\n"


def noise_rows() -> str:
    """What `python docs/proof/noise.py` found."""
    heads = ("diff", "var rollout", "var train", "of probabilities", "abs diff of one pass")
    figures = ("diff", "var_rollout", "var_train")
    rows = []
    for name, row in proved("noise")["rows"].items():
        probs = ", ".join(f"{row[f'prob_{f}']:.2g}" for f in figures)
        three = (f"{row[f]:.2g}" for f in figures)
        rows.append((name, *three, probs, f"{row['single_diff']:.2g}"))
    return table(("engine", *heads), rows)


FALLBACKS = {
    "of Lockstep too": "Lockstep's own decoder has these",
    "attention": "attention",
    "experts": "mixtures of experts",
    "states": "states, convolutions, linear attention",
}


def fallbacks_table() -> str:
    """What `python docs/proof/fallbacks.py` found: the largest mismatch of each group."""
    rows = proved("fallbacks")["rows"]
    lines: list[tuple[Any, ...]] = []
    for group, about in FALLBACKS.items():
        ran = {k: r for k, r in rows.items() if r["group"] == group and "fails" not in r}
        figures = [
            max(max(row[name], row[f"{name}_after"]) for row in ran.values())
            for name in ("k3", "max_abs_diff")
        ]
        ratios = [row["train_ratio"] for row in ran.values()]
        names = " ".join(f"`{kind}`" for kind in ran)
        times = f"{median(ratios):.1f} ({min(ratios):.1f} .. {max(ratios):.1f})"
        lines.append((f"{about}: {names}", len(ran), *(f"{x:.1e}" for x in figures), times))
    lines += [(f"`{kind}`", row["fails"], "", "", "") for kind, row in rows.items()
              if "fails" in row]  # fmt: skip
    return table(("", "trained", "k3", "a token", "training"), lines)


def investigation_rows() -> str:
    """What `python docs/proof/investigation.py` found."""
    models = proved("investigation")["models"]
    rows = []
    for name in next(iter(models.values()))["rungs"]:
        rungs = [model["rungs"][name] for model in models.values()]
        figures = [(f"{r['k1']:.2g}", f"{r['k2']:.2g}", f"{r['match']:.1%}") for r in rungs]
        rows.append([name, *(cell for cells in figures for cell in cells)])
    heads = ("re-rendered tokens that stay", "k1", "k2", "that stay")
    return table(("rung", "k1", "k2", *heads), rows)


def doctor_wild_table() -> str:
    """Verdicts of `python docs/proof/doctor_wild.py --half held`, by part and level."""
    names = ("right", "undecided", "not shown", "wrong", "consistent")
    rows: list[list[object]] = []
    for part, by_level in proved("doctor-wild-held")["figures"].items():
        for level, found in by_level.items():
            if part == "healthy" and isinstance(found, dict):
                quiet = f"{found['without_a_cause']} of {found['dumps']} without a cause"
                rows.append([f"{level}: nothing is wrong", quiet, *[""] * 5])
            elif isinstance(found, dict):
                for kind in ("moves the gap", "moves little or nothing"):
                    count = found[kind]
                    told = f"{level}: {'two faults' if part == 'pairs' else 'one fault'}, {kind}"
                    rows.append([told, sum(count.values()), *(count.get(n, 0) for n in names)])
    return table(("level", "dumps", *names), rows)


def trl_curves() -> str:
    """Rewards and tokens of `trl_equal.py --curves`."""
    rows: list[list[object]] = []
    for run in proved("trl_curves")["runs"]:
        rewards = [f"{fmean(part):.2f}" for part in (run["rewards"][:10], run["rewards"][-10:])]
        tokens = (
            f"{run['unequal_tokens']} of {run['compared_tokens']:,}" if "largest_kl" in run else ""
        )
        rows.append([run["side"], run["seed"], *rewards, tokens])
    heads = ("GRPOTrainer", "seed", "first ten steps", "last ten steps", "unequal tokens")
    return table(heads, rows)


def pretrained_runs(part: str) -> str:
    seeds = dict(sorted(proved("pretrained")[part].items()))

    def cells(name: str, of: Callable[[dict[str, Any]], object]) -> list[object]:
        return [name, *map(of, seeds.values())]

    def held_out(name: str, run: str, at: int) -> list[object]:
        return cells(name, lambda r: "{} / {}".format(*list(r[run]["held_out"].values())[at]))

    def unequal(runs: dict[str, Any]) -> str:
        return f"{runs['rl']['unequal_tokens']} of {runs['rl']['compared_tokens']:,}"

    def minutes(runs: dict[str, Any]) -> str:
        return f"{sum(run['minutes'] for run in runs.values() if 'minutes' in run):.0f}"

    steps = len(next(iter(seeds.values()))["rl"]["reward"])
    begun = [held_out("as published", "rl" if part == "sums" else "base", 0)]
    if part != "sums":
        begun.append(held_out("after 8 steps on demonstrations", "rl", 0))
    return table(
        ["held-out reward, sampled / greedy", *(f"seed {seed}" for seed in seeds)],
        [
            *begun,
            held_out(f"after {steps} steps of RL", "rl", -1),
            cells("sampled tokens whose two log-probs differ in a bit", unequal),
            cells("minutes", minutes),
        ],
    )


def gaps_table(head: str, gaps: dict[str, dict[str, float]]) -> str:
    rows = ((name, f"{gap['k1']:.2g}", f"{gap['k2']:.2g}") for name, gap in gaps.items())
    return table((head, "k1", "k2"), rows)


def pretrained_rungs() -> str:
    return gaps_table("rung", proved("pretrained")["story"]["0"]["rungs"])


def pretrained_faults() -> str:
    runs = proved("pretrained")["faults"]["0"].items()
    gaps = {f"`{name}`": run for name, run in runs if isinstance(run, dict) and "k1" in run}
    return gaps_table("`--fault`", gaps)


def pretrained_noise() -> str:
    noise = proved("pretrained")["story"]["0"]["noise"]
    counts = list(next(iter(noise.values())))
    heads = [head for count in counts for head in (f"mean of {count}", "seconds")]
    rows = []
    for name, by_count in noise.items():
        found = [by_count[count] for count in counts]
        pairs = [(f"{one['diff']:.1e}", f"{one['seconds']:.0f}") for one in found]
        single, spread = f"{found[-1]['single_diff']:.1e}", f"{found[-1]['var_rollout']:.1e}"
        rows.append([name, single, *(cell for pair in pairs for cell in pair), spread])
    return table(["sampler", "one log-prob", *heads, "variance of a scoring"], rows)


def causes_table() -> str:
    from lockstep.doctor.causes import CAUSES

    faults = tomllib.loads((PROOFS / "doctor.toml").read_text())
    rows = []
    for cause in CAUSES.values():
        name = f"`{cause.name}`"
        if cause.equivalents != cause.name:
            name += f" (class `{cause.equivalents}`)"
        strengths = [f"`--fault {fault}`" for fault in faults.get(cause.name, ())] or [""]
        fault = re.sub(r",share=[\d.]+", "", strengths[len(strengths) // 2])
        rows.append((name, cause.title, cause.remedy, fault))
    return table(("cause", "what is wrong", "what to do", "inject it"), rows)


def doctor_runs_table() -> str:
    """What `python docs/proof/doctor.py` found: a line for each cause."""
    found: dict[str, list[Any]] = {}
    for run in proved("doctor")["runs"]:
        found.setdefault(run["cause"], []).append(run)
    rows = []
    for cause, runs in found.items():
        gaps = " .. ".join(f"{runs[at]['k2']:.1e}" for at in (0, -1))
        others = [
            f"`{run['named'][0]}`" if run["named"] else "none"
            for run in runs
            if not run["is_right"]
        ]
        rows.append(
            (
                f"`{cause}`",
                gaps,
                f"{sum(r['is_right'] for r in runs)} of {len(runs)}",
                ", ".join(dict.fromkeys(others)),
            )
        )
    return table(("injected", "k2", "right", "otherwise named first"), rows)


def doctor_formats_table() -> str:
    from lockstep.doctor.inputs.registry import FORMATS

    rows = ((f"`{kind.format}`", _first_paragraph(kind)) for kind in FORMATS)
    return table(("`--format`", "what it is"), rows)


def doctor_facts_table() -> str:
    from lockstep.config import field_docs
    from lockstep.doctor.inputs.base import Facts

    rows = ((f"`{name}`", " ".join(doc.split())) for name, doc in field_docs(Facts).items())
    return table(("fact", "what it is"), rows)


def _first_paragraph(kind: type) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


SOAKED = {
    "hook": "a hook of an environment, tool, judge or agent, whose tasks misbehave in 32 ways",
    "tracker": "a tracker that misbehaves as it begins, gets a row, or ends",
    "console": "a console that is full, closed, or read for some lines only",
    "fault": "a fault that every trainer meets, by its tests",
    "kill": "a run that is killed at some moment and continued, against one that was not",
    "server": "a server with 500 clients, 1 in 100 hostile",
}


def soak_table() -> str:
    proof = proved("soak", {"problems": {}, "figures": []})
    found: dict[str, list[bool]] = {kind: [] for kind in SOAKED}
    for name, problems in proof["problems"].items():
        kind = re.split(r"[.-]", name)[0]
        if kind not in SOAKED:
            kind = "hook" if name.isidentifier() and name.islower() else "fault"
        found[kind].append(bool(problems))
    rows = [(SOAKED[kind], len(each), sum(each)) for kind, each in found.items() if each]
    told = [(figure, "", "") for figure in proof["figures"]]
    return table(("what", "runs", "with a problem"), [*rows, *told])


TABLES = {
    "trl-curves": trl_curves,
    "doctor-formats": doctor_formats_table,
    "doctor-facts": doctor_facts_table,
    "noise": noise_rows,
    "claims-count": claims_count,
    **{
        f"claims-{name}": partial(claims_table, name)
        for name in ("tinker", "slime", "retrospective", "kwaikat", "tokens", "newer")
    },
    "causes": causes_table,
    "doctor-runs": doctor_runs_table,
    "doctor-wild": doctor_wild_table,
    "methods": methods_table,
    "fallbacks": fallbacks_table,
    "investigation": investigation_rows,
    **{
        f"pretrained-{part}": partial(pretrained_runs, part)
        for part in ("calculator", "search", "sums")
    },
    "pretrained-rungs": pretrained_rungs,
    "pretrained-faults": pretrained_faults,
    "pretrained-noise": pretrained_noise,
    "metrics": metrics_table,
    "sandbox": sandbox_table,
    "gpu_host": gpu_host_table,
    "columns": columns_table,
    "rooms": rooms_table,
    "figures": figures_table,
    "soak": soak_table,
    "task-math": partial(task_table, "math"),
    "task-retool": partial(task_table, "retool"),
    **{
        f"gateway-{name}": partial(fields_table, name)
        for name in ("chat", "responses", "messages", "others")
    },
    "task-instructions": partial(task_table, "instructions"),
    "task-quickstart": partial(task_table, "quickstart"),
    "tasks": tasks_table,
    **{f"study-{name}": partial(study_table, name) for name in STUDIES["studies"]},
}


# -- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "100")
    for block in run_page(page, tmp_path):
        for span, expected, printed in block.printed:
            line = page.read_text(encoding="utf-8").count("\n", 0, span[0]) + 1
            assert agrees(expected, printed), (
                f"{page.name}:{line} says\n{expected}\nand its snippet prints\n{printed}\n"
                "`python tests/cpu/test_docs.py` writes what it prints into the page."
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_tables_are_up_to_date(page):
    for match in TABLE.finditer(page.read_text(encoding="utf-8")):
        assert match["body"] == TABLES[match["name"]](), (
            f"{page.name}: the table {match['name']} is out of date; "
            "`python tests/cpu/test_docs.py` writes it."
        )


def test_no_seed_of_a_study_is_left_out():
    studies = proved("studies")["studies"]
    assert set(studies) <= set(STUDIES["studies"])
    for study in studies.values():
        for arms in study["conditions"].values():
            for arm in arms.values():
                assert list(arm["seeds"]) == [str(seed) for seed in range(len(arm["seeds"]))]


def test_every_table_stands_on_a_page():
    found = [match["name"] for page in PAGES for match in TABLE.finditer(page.read_text("utf-8"))]
    assert set(found) == set(TABLES)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"], ids=lambda page: page.stem
)
def test_every_link_and_named_file_exists(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    files = re.findall(r"`((?:lockstep|tests|examples|docs|benchmarks)/[\w./-]+\.\w+)", text)
    missing += [file for file in files if not (ROOT / file).exists()]
    missing += [
        f"{file}::{name}"
        for file, name in re.findall(r"`(tests/[\w./-]+\.py)::(\w+)", text)
        if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    names = [page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)]
    assert [name for name in names if f"({name})" not in index] == ["index.md"]


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [requirement for group in groups for requirement in group]
    names = {re.split(r"[<>=\[ ]", requirement)[0] for requirement in wanted}
    text = (DOCS / "install.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `([^`]+)` \|", text, re.M))
    assert names == explained


def test_the_page_of_the_command_line_has_every_verb_and_exit_code():
    from lockstep import cli

    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert set(cli.COMMANDS) == set(re.findall(r"^\| `lockstep (\w+)", text, re.M))
    codes = {cli.OK, cli.FAILED, cli.BAD_INPUT, cli.STOPPED, cli.INTERRUPTED, cli.READER_LEFT}
    assert codes == set(map(int, re.findall(r"^\| (\d+) \|", text, re.M)))


def test_an_output_that_differs_is_found():
    assert agrees("reward ...\nend", "reward 0.27\nmore\nend\n")
    assert agrees("a\n", "a  \n\n")
    assert not agrees("reward 0.3\n", "reward 0.27\n")
    assert not agrees("a\n", "a\nb\n")


# -- writing what is printed into the pages -------------------------------------------------------


def rewrite(page: Path, directory: Path) -> None:
    directory.mkdir()
    os.chdir(directory)
    text = page.read_text(encoding="utf-8")
    changes = [(match.span("body"), TABLES[match["name"]]()) for match in TABLE.finditer(text)]
    for block in run_page(page, directory):
        for span, expected, printed in block.printed:
            if agrees(expected, printed):
                continue
            if "..." in expected:  # what matters of it was chosen by hand
                print(f"{page.name}:{block.line} needs a hand: its snippet prints\n{printed}")
            else:
                changes.append((span, printed.strip("\n") + "\n"))
    for (begin, end), body in sorted(changes, reverse=True):
        text = text[:begin] + body + text[end:]
    page.write_text(text, encoding="utf-8")
    print(f"{page.name}: {len(changes)} written")


if __name__ == "__main__":
    import tempfile

    sys.path.insert(0, str(ROOT))
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="100", TOKENIZERS_PARALLELISM="false")
    wanted = [Path(name).resolve() for name in sys.argv[1:]] or PAGES
    with tempfile.TemporaryDirectory() as scratch:
        for each in wanted:
            rewrite(each, Path(scratch) / each.stem)
        os.chdir(ROOT)
