"""A report of runs: one HTML file that needs nothing else, and `report.json` with the same content.

Metrics keep every digit. A value that is not finite is "NaN", "Infinity" or "-Infinity", as in
metrics.jsonl.

The page holds its script and style, and its policy allows these two by their hash and nothing else:
the page sends no request, and text that a model wrote cannot run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import differences, flatten
from lockstep.errors import DataError, RunError
from lockstep.observe.alarms import (
    CRITICAL_LIMIT,
    LEVELS,
    WARNING_LIMIT,
    Alarm,
    Architecture,
    mismatch_alarm,
    normal_band,
    spells,
)
from lockstep.observe.metrics import find_metric, held_out_label, is_step_row
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.store.files import encode_number, write_atomically
from lockstep.store.run import Run
from lockstep.store.trajectories import (
    TRAINED,
    Address,
    TrajectoryRecord,
    TrajectorySummary,
    read_row,
)
from lockstep.tables import tables_beside
from lockstep.types import Float32Array

# Steps whose summaries are looked at. Beyond it every n-th step is, the last included.
_MAX_STEPS_READ = 400


NUM_TRAJECTORIES, NUM_TOKENS = 200, 120_000
"""Most trajectories and tokens of a report, about 25 bytes a token with two log-probs: a page of a
few megabytes opens at once, also on a phone."""


def select(runs: Sequence[Run], *, num_trajectories: int, num_tokens: int) -> dict[str, Any]:
    """Chooses trajectories within these limits, evenly over the runs, and reads only these.

    Returns the part of the report about them. From each run: the worst mismatches, the best and
    worst rewards of its second half, unfinished episodes, evaluations, and an even sample of the
    rest. Trajectories of a part that is damaged are left out.
    """
    documents, damaged = list[dict[str, Any]](), dict[str, None]()
    warn = damaged.setdefault
    num_stored = num_left_out = 0
    tokens_left = num_tokens
    for index, run in enumerate(runs):
        runs_left = len(runs) - index
        candidates = _candidates(run, warn)
        num_stored += len(candidates)
        spent = 0
        num_left = num_trajectories - len(documents)
        has_alarm = worst_alarm(run).level in LEVELS[LEVELS.index("notice") :]
        for candidate, reasons in _choose(candidates, num_left // runs_left, has_alarm=has_alarm):
            size = candidate.num_tokens
            # One is always shown, however long.
            if spent and spent + size > tokens_left // runs_left:
                num_left_out += 1
                continue
            try:
                record = read_row(*candidate.address)
            except DataError as error:
                _warn_of(error, warn)
                continue
            spent += size
            documents.append(to_document(record, run=index, split=candidate.split, why=reasons))
        tokens_left -= spent
    return {
        "trajectories": documents,
        "first": _first(documents, runs),
        "num_stored_trajectories": num_stored,
        "num_left_out_for_size": num_left_out,
        "damaged": list(damaged),
    }


def _candidates(run: Run, warn: Callable[[str], object]) -> list[TrajectorySummary]:
    out: list[TrajectorySummary] = []
    for split in run.splits():
        steps = run.steps(split=split)
        stride = -(-len(steps) // _MAX_STEPS_READ) if steps else 1
        for step in steps[::-1][::stride][::-1]:
            try:
                out += run.summaries(step, split=split)
            except DataError as error:
                _warn_of(error, warn)
    return out


def _warn_of(error: DataError, warn: Callable[[str], object]) -> None:
    """Warns of a damaged part. A part that a running run deleted meanwhile is not damaged."""
    if not isinstance(error.__cause__, FileNotFoundError):
        warn(str(error))


def _choose(
    candidates: Sequence[TrajectorySummary], number: int, *, has_alarm: bool
) -> list[tuple[TrajectorySummary, list[str]]]:
    """Up to `number` candidates, each with why it was chosen, the most telling first.

    That is the worst mismatch after an alarm; else a success in a group that also failed, of the
    last step that has one, with the most turns.
    """
    trained = [c for c in candidates if c.split == "train"]
    middle = np.median([c.step for c in trained]) if trained else 0
    late = [c for c in trained if c.step >= middle and math.isfinite(c.reward)]
    measured = [c for c in trained if c.max_abs_logprob_diff]
    part = max(1, number * 15 // 100)
    chosen: dict[Address, tuple[TrajectorySummary, list[str]]] = {}

    def take(label: str, found: Sequence[TrajectorySummary]) -> None:
        for candidate in found:
            if candidate.address in chosen:
                chosen[candidate.address][1].append(label)
            elif len(chosen) < number:
                chosen[candidate.address] = (candidate, [label])

    if not has_alarm:
        take(_SUCCESS, _successes(trained)[:1])
    worst = sorted(measured, key=lambda c: -(c.max_abs_logprob_diff or 0.0))
    take(_MISMATCH, worst[:part])
    take("worst reward", sorted(late, key=lambda c: c.reward)[:part])
    take("best reward", sorted(late, key=lambda c: -c.reward)[:part])
    take("unfinished", _spread([c for c in candidates if c.status != "finished"], part))
    take("evaluation", _spread([c for c in candidates if c.split != "train"], part))
    rest = [c for c in trained if c.address not in chosen]
    take("sample", _spread(rest, number - len(chosen)))
    return list(chosen.values())


_SUCCESS, _MISMATCH = "success beside failures", "worst mismatch"
_FIRST = {
    _SUCCESS: "the success with the most turns in a group that also failed, of the last step that "
    "has such a group",
    _MISMATCH: "the largest difference between the sampler's and the trainer's log-probs",
}
"""Why a trajectory is the first one shown."""


def _successes(trained: Sequence[TrajectorySummary]) -> list[TrajectorySummary]:
    """The best of each group with unequal rewards, of the last step that has one; most turns
    first."""
    groups: dict[tuple[int, int], list[TrajectorySummary]] = {}
    for each in trained:
        if math.isfinite(each.reward):
            groups.setdefault((each.step, each.group), []).append(each)
    best: list[TrajectorySummary] = []
    for (step, _), members in groups.items():
        top = max(each.reward for each in members)
        if any(each.reward < top for each in members):
            best = [each for each in best if each.step == step]
            best += [each for each in members if each.reward == top]
    top = max((each.reward for each in best), default=0.0)
    best = [each for each in best if each.reward == top]
    return sorted(best, key=lambda each: -each.num_turns)


def _first(documents: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> dict[str, Any] | None:
    """The trajectory that is shown first, and why: of the run with the worst alarm."""
    if not documents:
        return None
    levels = [LEVELS.index(worst_alarm(run).level) for run in runs]
    index = max(range(len(documents)), key=lambda at: (levels[documents[at]["run"]], -at))
    reason = documents[index]["why"][0]
    return {"index": index, "why": _FIRST.get(reason, reason)}


def _spread(candidates: Sequence[TrajectorySummary], number: int) -> list[TrajectorySummary]:
    """`number` of them at even distances, first and last included."""
    if len(candidates) <= number:
        return list(candidates)
    places = np.linspace(0, len(candidates) - 1, max(number, 0)).round().astype(int)
    return [candidates[place] for place in places]


_SHOWN = ["parent", "is_sampled", "turn", "policy_version", "finish_reason", "stop", "reason"]


def to_document(
    record: TrajectoryRecord, *, run: int, split: str, why: Sequence[str]
) -> dict[str, Any]:
    """One trajectory as JSON. Log-probs are the shortest decimals that are the same float32."""
    trajectory = record.trajectory
    trained = {name: getattr(record, name) for name in TRAINED}
    return {
        "run": run,
        "split": split,
        "why": list(why),
        "step": record.step,
        "group": record.group,
        "task_id": record.task.id,
        "task": dict(record.task.payload),
        "reference": record.task.reference,
        "id": trajectory.id,
        "status": trajectory.status,
        "error": trajectory.error,
        "reward": encode_number(trajectory.reward),
        "rewards": [[leaf, encode_number(reward)] for leaf, reward in trajectory.rewards.items()],
        "parts": {name: encode_number(value) for name, value in trajectory.reward_parts.items()},
        "metrics": {name: encode_number(value) for name, value in trajectory.metrics.items()},
        "segments": [
            {
                **{name: getattr(segment, name) for name in _SHOWN},
                "reward": encode_number(segment.reward),
                "token_ids": segment.token_ids.tolist(),
                "rollout_logprobs": shortest(segment.logprobs),
                **{name: shortest(values[index]) for name, values in trained.items()},
                "messages": [message.to_dict() for message in segment.messages],
            }
            for index, segment in enumerate(trajectory.segments)
        ],
    }


def shortest(values: Float32Array | None) -> list[Any] | None:
    """As JSON, in the shortest decimals that are the same float32."""
    if values is None:
        return None
    # str of a float32 is the shortest text that reads back as the same float32.
    return [encode_number(float(str(value))) for value in values]


DOCUMENT_VERSION = 1

NUM_LAST_STEPS = 10
"""A single step's mean reward is noisy: results are means of the first and last ten."""

_MAX_POINTS = 1000
# Runs of one experiment may differ in these settings: they are repeats of each other.
_REPEAT_KEYS = frozenset({"seed", "out", "name", "run_name", "resume"})


def build_document(
    runs: Sequence[Run],
    *,
    tokenizers: Sequence[Tokenizer | None] | None = None,
    recipes: Sequence[Mapping[str, Any] | None] | None = None,
    title: str = "",
    num_trajectories: int = NUM_TRAJECTORIES,
    num_tokens: int = NUM_TOKENS,
) -> dict[str, Any]:
    """The whole report as JSON.

    tokenizers: one per run, for the texts of its token ids; None shows ids. recipes: one per run,
    the settings of its recipe by dotted key; the settings that differ are marked.
    """
    if not runs:
        raise RunError("a report needs at least one run.")
    tokenizers = tokenizers or [None] * len(runs)
    if len(tokenizers) != len(runs):
        raise RunError(f"{len(runs)} runs, but {len(tokenizers)} tokenizers: give one per run.")
    chosen = select(runs, num_trajectories=num_trajectories, num_tokens=num_tokens)
    used: list[set[int]] = [set() for _ in runs]
    for document in chosen["trajectories"]:
        used[document["run"]].update(*(segment["token_ids"] for segment in document["segments"]))
    return {
        "document_version": DOCUMENT_VERSION,
        "title": title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        "generated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **build_figures(runs, recipes=recipes or [None] * len(runs)),
        **chosen,
        "vocabularies": [
            to_vocabulary(ids, tokenizer) for ids, tokenizer in zip(used, tokenizers, strict=True)
        ],
    }


def build_figures(
    runs: Sequence[Run], *, recipes: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """The part of the report that is not about trajectories."""
    configs = [flatten(run.config) for run in runs]
    found = differences(*configs)
    groups = _groups(runs, configs, [*found])
    group_of = {run: index for index, group in enumerate(groups) for run in group["runs"]}
    series, pairs = [_series(run) for run in runs], zip(configs, recipes, strict=True)
    changed = [None if own is None else _listed(differences(config, own)) for config, own in pairs]
    return {
        "limits": {"warning": WARNING_LIMIT, "critical": CRITICAL_LIMIT},
        "runs": [
            {**_identity(run), **series[at], "group": group_of[at], "changed": changed[at]}
            for at, run in enumerate(runs)
        ],
        "groups": groups,
        "metrics": _meanings(series),
        "held_out": _held_out(runs),
        "headlines": _headlines(runs, groups),
        "config_differences": _listed(found),
    }


# ---------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------


def _identity(run: Run) -> dict[str, Any]:
    environment, config = run.environment, run.config
    alarm = worst_alarm(run)
    family, is_one_process = _family(run)
    band = normal_band(family or "dense", is_one_process=is_one_process)
    return {
        "name": run.name,
        "recipe": _words(config.get("recipe") or config.get("name")),
        "model": _words(config.get("model")),
        "seed": config.get("seed"),
        **{key: environment.get(key, "") for key in ("host", "cpu", "device", "started_at")},
        "num_resumes": len(environment.get("resumes", ())),
        "num_steps": len({row["step"] for row in run.metrics if is_step_row(row)}),
        "seconds": encode_number(_seconds(run)),
        "sync": environment.get("sync", {}).get("line", ""),
        # The normal k3 of the run; None if the run does not name its kind.
        "mismatch_band": list(band) if family or is_one_process else None,
        "alarm": {"level": alarm.level, "value": encode_number(alarm.value), "text": alarm.text},
        "health": _health(run),
        "config": config,
        "environment": environment,
    }


def _health(run: Run) -> list[dict[str, Any]]:
    """Says what silently ate the learning, the last stretch of steps of each trigger."""
    found = spells(run.metrics, flatten(run.config))
    return [{"text": text, "level": "warning" if still else "ok"} for text, still in found]


def _words(value: Any) -> str:
    """A setting in a few words: a choice is its tag, or its path."""
    if isinstance(value, Mapping):
        return " ".join(str(value[k]) for k in ("type", "name", "path") if value.get(k))
    return "" if value is None else str(value)


def _family(run: Run) -> tuple[Architecture | None, bool]:
    """(family, whether sampler and trainer were one process)."""
    family = run.environment.get("family")
    is_one_process = bool(run.environment.get("is_one_process"))
    return family if family in ("dense", "moe") else None, is_one_process


def worst_alarm(run: Run) -> Alarm:
    """The verdict on the step with the largest mismatch."""
    family, is_one_process = _family(run)
    judge = partial(mismatch_alarm, architecture=family or "dense", is_one_process=is_one_process)
    return max(
        [judge(row) for row in run.metrics],
        # NaN compares with nothing: within one level, a value that is not a number is the worst.
        key=lambda a: (LEVELS.index(a.level), float("inf") if a.value != a.value else a.value),
        default=judge({}),
    )


def _seconds(run: Run) -> float:
    """Seconds of the run: by its own clock, else the sum of its steps; 0 if unknown."""
    elapsed = run.values("time/elapsed_seconds")
    return elapsed[-1] if elapsed else sum(run.values("time/step_seconds"))


def _series(run: Run) -> dict[str, Any]:
    """The metrics by column. Rows of one step are joined; very long runs are thinned to means."""
    rows: dict[int, dict[str, Any]] = {}
    for row in run.metrics:
        rows.setdefault(row["step"], {}).update(row)
    names = list(dict.fromkeys(name for row in rows.values() for name in row if name != "step"))
    stride = -(-len(rows) // _MAX_POINTS) if rows else 1
    steps = list(rows)
    buckets = [steps[start : start + stride] for start in range(0, len(steps), stride)]
    return {
        "stride": stride,
        "steps": [bucket[0] for bucket in buckets],
        "columns": {
            name: [
                encode_number(_mean([rows[step][name] for step in bucket if name in rows[step]]))
                for bucket in buckets
            ]
            for name in names
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    if len(values) == 1:
        return values[0]  # an int stays an int, and no digit moves
    return statistics.fmean(values) if values else None


def _meanings(series: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(name for part in series for name in part["columns"])
    known = {name: find_metric(name) for name in names}
    return {
        name: {"unit": metric.unit, "better": metric.better, "meaning": metric.meaning}
        for name, metric in known.items()
        if metric is not None
    }


# ---------------------------------------------------------------------------------------------
# Groups of repeats, and how their configs differ
# ---------------------------------------------------------------------------------------------


def _groups(
    runs: Sequence[Run], configs: Sequence[Mapping[str, Any]], differing: Sequence[str]
) -> list[dict[str, Any]]:
    """Runs whose configs differ only in the seed (and the place) are one group, in order."""
    varied = [key for key in differing if key not in _REPEAT_KEYS]
    members: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        members.setdefault(repr([config.get(key) for key in varied]), []).append(index)
    out = []
    for indices in members.values():
        first = indices[0]
        label = (
            ", ".join(f"{_short(key, varied)}={configs[first].get(key)}" for key in varied[:3])
            or _words(runs[first].config.get("recipe"))
            or runs[first].name
        )
        if len(varied) > 3:
            label += f" (+{len(varied) - 3})"
        seeds = [runs[index].config.get("seed") for index in indices]
        out.append({"label": label, "runs": indices, "seeds": seeds})
    return out


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a dotted key, or all of it where another key ends the same."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _listed(found: Mapping[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [{"key": key, "values": [*values]} for key, values in found.items()]


# ---------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------


def _held_out(runs: Sequence[Run]) -> dict[str, str]:
    """Held-out means and pass rates, in order of first appearance, each with its label."""
    names = dict.fromkeys(name for run in runs for row in run.metrics for name in row)
    return {name: label for name in names if (label := held_out_label(name))}


def _speed(run: Run) -> float | None:
    """Over the whole run, so that a slow step counts as much as it took."""
    seconds = sum(run.values("time/sample_seconds"))
    return sum(run.values("tokens/sampled")) / seconds if seconds else None


Ends = tuple[float | None, float | None]
"""(value at the start, value at the end) of one run; None where it was not measured."""

_WORST = "mismatch"


def _headlines(runs: Sequence[Run], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The few figures of `headlines.toml` that a reader wants first, where they were measured."""
    alarms = [worst_alarm(run) for run in runs]
    ends: dict[str, list[Ends]] = {
        "reward": [_ends(run.values("reward/mean"), NUM_LAST_STEPS) for run in runs],
        _WORST: [(None, None if math.isnan(alarm.value) else alarm.value) for alarm in alarms],
        "time": [(None, _seconds(run) or None) for run in runs],
        "speed": [(None, _speed(run)) for run in runs],
    }
    if all(final is None for _, final in ends["reward"]):  # supervised
        ends["loss"] = [_ends(run.values("train/loss"), NUM_LAST_STEPS) for run in runs]
    names = _held_out(runs)
    for arm in ("sampled", "greedy"):
        if name := next((n for n in names if f"/{arm}/mean" in n), ""):
            ends[arm] = [_ends(run.values(name), 1) for run in runs]
    limits = {"warning": WARNING_LIMIT, "critical": CRITICAL_LIMIT, "num_last": NUM_LAST_STEPS}
    out: list[dict[str, Any]] = []
    for name, texts in tables_beside(__file__, "headlines.toml").items():
        if name not in ends:
            continue
        of_runs = list(zip(ends[name], alarms, strict=True))
        values = [_tile(name, [of_runs[i] for i in group["runs"]]) for group in groups]
        if any(value["value"] is not None for value in values):
            told = {key: text.format(**limits) for key, text in texts.items()}
            out.append({**told, "values": values})
    return out


def _ends(values: Sequence[float], size: int) -> Ends:
    """(mean of the first `size`, mean of the last); no start if there is one measurement."""
    if not values:
        return None, None
    start = statistics.fmean(values[:size]) if len(values) > size else None
    return start, statistics.fmean(values[-size:])


def _tile(name: str, members: Sequence[tuple[Ends, Alarm]]) -> dict[str, Any]:
    """One group's figure in a headline: over its runs, with its range and where it started."""
    starts = [start for (start, _), _ in members if start is not None]
    finals = [final for (_, final), _ in members if final is not None]
    is_worst = name == _WORST
    level = max((alarm.level for _, alarm in members), key=LEVELS.index) if is_worst else None
    choose = max if is_worst else statistics.fmean
    return {
        "value": encode_number(choose(finals)) if finals else None,
        "low": encode_number(min(finals)) if len(finals) > 1 else None,
        "high": encode_number(max(finals)) if len(finals) > 1 else None,
        "start": encode_number(statistics.fmean(starts)) if starts else None,
        "level": level,
    }


# ---------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------


def to_vocabulary(ids: set[int], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """How these ids read: their texts, and which of them belong to the protocol (turn ends, channel
    marks) and are shown apart from text. None without a tokenizer, and ids are shown."""
    if tokenizer is None:
        return None
    return {
        # A text that has no UTF-8 is written with its escapes, as a reader would see it.
        "texts": {
            str(i): tokenizer.decode([i]).encode("utf-8", "backslashreplace").decode()
            for i in sorted(ids)
        },
        "control_ids": sorted(ids & tokenizer.control_ids),
    }


@dataclass(frozen=True, kw_only=True)
class Template:
    """The files of this package that make one kind of page."""

    page: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]
    label: str
    """Kind of page, shown after its title."""
    is_served: bool = False
    """True if it may ask the server that it came from."""


REPORT = Template(
    page="page.html",
    styles=("style.css",),
    scripts=("base.js", "charts.js", "trajectories.js", "page.js"),
    label="Lockstep report",
)


_CONNECT = "connect-src 'self'; "


def write_report(
    runs: Sequence[Run],
    out: str | os.PathLike[str],
    *,
    warn: Callable[[str], object] = warnings.warn,
    **about: Any,
) -> Path:
    """Writes `out` (an .html file) and the same content beside it as .json; returns `out`.

    warn: gets a sentence for each damaged file of trajectories, which the report then lacks.
    about: see `build_document`.
    """
    document = build_document(runs, **about)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    page, data = render_page(document), dump(document)
    for problem in document["damaged"]:
        warn(problem)
    write_atomically(out, lambda file: file.write(page.encode()))
    write_atomically(out.with_suffix(".json"), lambda file: file.write(data.encode()))
    return out


def render_page(document: dict[str, Any], template: Template = REPORT) -> str:
    """The HTML of a document."""
    style = "".join(_read(name) for name in template.styles)
    script = "".join(_read(name) for name in template.scripts)
    # JSON has "<" only inside strings, where its escape means the same. So no text can end the
    # script element, or open a comment in it.
    data = dump(document).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"{_CONNECT if template.is_served else ''}base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(f"{document['title']} - {template.label}"),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
    }
    # One pass over the template: a mark inside of a filled-in part stays unchanged.
    return re.sub(r"%([A-Z]+)%", lambda match: parts[match[1]], _read(template.page))


def dump(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return files("lockstep.report").joinpath(name).read_text("utf-8")
