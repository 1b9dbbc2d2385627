"""Replays one stored trajectory: its tokens, and whether its log-probs come back.

Without scoring only the record is read. Scoring loads the weights that sampled it, runs the
trainer's forward over its row, and asks the engine for every turn again, under the original seed.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.agent.tasks import derive_seed
from lockstep.config import from_dict
from lockstep.doctor.rebuilt import rebuild, running
from lockstep.doctor.stored_paths import first_leaf, trainer_logprobs
from lockstep.doctor.terminal import gap_style, gap_text, logprob_text, plain_table, token_text
from lockstep.errors import ConfigError, RunError, printable
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.report.document import to_document
from lockstep.run.build import Parts
from lockstep.run_config import Config
from lockstep.store.run import Run, load_run
from lockstep.store.trajectories import TrajectoryRecord, read_row
from lockstep.types import Float32Array, Int32Array, Request, Sample, Segment

NUM_NAMES = 2000
"""Ids that are compared with an unknown one, to suggest the nearest."""
NUM_TOKENS = 12
"""Tokens listed per turn, those with the largest difference; --tokens lists all."""

Source = Literal["trainer", "engine"]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probs of the sampled tokens, computed again by both sides."""

    weights: str
    """Name of the loaded weights."""
    version: int
    """Version of these weights; tokens of other versions are scored, but need not agree."""
    contract: bool
    """Whether the run's contract holds here: then every number must come back to the bit."""
    trainer: Float32Array
    """[T] the trainer's; NaN for tokens that were not sampled."""
    engine: Float32Array
    """[T] the engine's, up to the first token of a turn that it draws differently; NaN after it."""
    engine_ids: Int32Array
    """[T] the engine's draws; -1 for tokens that were not sampled, and after the end of a reply."""


@dataclass(kw_only=True)
class Replay:
    """A path of a stored trajectory, and its scores."""

    run: Run
    record: TrajectoryRecord
    split: str
    leaf: int
    tokenizer: Tokenizer | None
    scores: Scores | None = None

    @cached_property
    def row(self) -> Sample:
        """The path as a row."""
        return self.record.trajectory.row(self.leaf)

    @cached_property
    def stored_trainer(self) -> Float32Array:
        """[T] the trainer's log-probs as stored; NaN where there are none."""
        return trainer_logprobs(self.record, self.leaf)

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(segment, first place in the row, place after the last) along the path."""
        path = self.record.trajectory.path(self.leaf)
        ends = list(accumulate(len(self.record.trajectory.segments[i]) for i in path))
        return list(zip(path, [0, *ends[:-1]], ends, strict=True))

    def comparison(self, source: Source) -> dict[str, Any]:
        """Differences between the stored log-probs and those of `source`, over the tokens of the
        loaded version."""
        scores, row = self.scores, self.row
        assert scores is not None, "it was not scored"
        if source == "trainer":
            stored, again = self.stored_trainer, scores.trainer
        else:
            stored, again = row.columns["rollout_logprobs"], scores.engine
        same = row.columns["policy_version"] == scores.version
        d = np.where(same, np.abs(again.astype(np.float64) - stored), np.nan)
        out: dict[str, Any] = {
            "compared_tokens": int(np.isfinite(d).sum()),
            "unequal_tokens": int((d > 0).sum()),
            "max_abs_diff": float(np.nan_to_num(d).max(initial=0.0)),
            "first_unequal_token": _first(d > 0),
            "other_version_tokens": int((row.loss_mask & ~same).sum()),
        }
        if source == "engine":
            other = same & row.loss_mask & (scores.engine_ids != row.token_ids)
            out["drawn_otherwise_tokens"] = int(other.sum())
            out["first_drawn_otherwise"] = _first(other)
        return out

    @property
    def comes_back(self) -> bool | None:
        """Whether every number of the loaded version came back to the bit; None if the path was not
        scored, or nothing could be compared."""
        if self.scores is None:
            return None
        found = [self.comparison("trainer"), self.comparison("engine")]
        if not any(f["compared_tokens"] for f in found):
            return None
        return not any(f["unequal_tokens"] or f.get("drawn_otherwise_tokens") for f in found)

    def to_json(self) -> dict[str, Any]:
        """The trajectory as it is stored, the path's row, and the comparison if it was scored."""
        document = to_document(self.record, run=0, split=self.split, why=[])
        del document["why"]
        out: dict[str, Any] = {**document, "run": str(self.run.path), "leaf": self.leaf}
        if self.scores is not None:
            out["scores"] = {
                "weights": self.scores.weights,
                "version": self.scores.version,
                "contract": self.scores.contract,
                "comes_back": self.comes_back,
                "trainer": self.comparison("trainer"),
                "engine": self.comparison("engine"),
                "trainer_logprobs": _listed(self.scores.trainer),
                "engine_logprobs": _listed(self.scores.engine),
                "engine_ids": self.scores.engine_ids.tolist(),
            }
        return out


def _first(mask: npt.NDArray[np.bool_]) -> int | None:
    return int(mask.argmax()) if mask.any() else None


def _listed(values: Float32Array) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in values]


# -- finding it ---------------------------------------------------------------------------------


def find(path: Path, name: str, *, tokenizer: Tokenizer | None = None) -> Replay:
    """The stored trajectory with this name: its id, its id with /LEAF appended (as messages about
    rows have it), the end of an id that only one has, or its number among those of training.

    Raises RunError if there is none, with the nearest name or the reason why it is gone.
    """
    run = load_run(path)
    stored = [
        (summary.id, address, split)
        for split in run.splits()
        for summary, address in run.summaries(split=split)
    ]
    if not stored:
        raise RunError(
            f"{run.path} holds no trajectory: no step ended, or record.keep stores none."
        )
    known = {entry[0]: entry for entry in stored}  # evaluations of all steps have the same ids
    trained = [entry for entry in stored if entry[2] == "train"]
    ends = [id_ for id_ in known if name and id_.endswith(name)]
    head, _, leaf_name = name.rpartition("/")
    rest = ""
    if name in known:
        _, address, split = known[name]
    elif leaf_name.isdigit() and head in known:
        (_, address, split), rest = known[head], leaf_name
    elif name.isdigit() and int(name) < len(trained):
        _, address, split = trained[int(name)]
    elif not name.isdigit() and len(ends) == 1:
        _, address, split = known[ends[0]]
    else:
        steps, names = run.steps() or ["none"], list(known)
        near = get_close_matches(name, names[:NUM_NAMES], n=1) or names[:1]
        raise RunError(
            f"{run.path} holds no trajectory {name!r}; stored are steps {steps[0]} to {steps[-1]}, "
            f"{len(stored)} in all (record.keep). Did you mean {near[0]!r}?"
        )
    record = read_row(*address)
    leaf = int(rest) if rest else first_leaf(record)
    if rest and leaf not in (leaves := record.trajectory.leaves()):
        shown = ", ".join(map(str, leaves))
        raise RunError(f"trajectory {record.trajectory.id} has no leaf {leaf}; it has {shown}.")
    return Replay(run=run, record=record, split=split, leaf=leaf, tokenizer=tokenizer)


# -- scoring it ---------------------------------------------------------------------------------


def score(replay: Replay, *, step: int | None = None) -> Scores:
    """Runs both sides over the row again, and keeps the result in `replay.scores`.

    step: checkpoint to load; None takes the weights that sampled the row's first turn. Raises
    RunError if these are gone.
    """
    sampled = replay.row.columns["policy_version"][replay.row.loss_mask]
    if not len(sampled):
        raise RunError(f"trajectory {replay.record.trajectory.id} has no sampled token to score.")
    weights, version, text = _weights(replay.run, int(sampled[0]), step)
    config, parts = rebuild(from_dict(Config, replay.run.config), weights)
    trainer = parts.trainer.forward([replay.row], column=None)[0]
    engine, engine_ids = asyncio.run(_decode_again(replay, parts, config.seed))
    replay.scores = Scores(
        weights=text,
        version=version,
        contract=parts.numerics.is_kept,
        trainer=trainer,
        engine=engine,
        engine_ids=engine_ids,
    )
    return replay.scores


def _weights(run: Run, version: int, step: int | None) -> tuple[Path | None, int, str]:
    """(directory, or None for the model that the run began from; version; name)."""
    stored = {c.step: (c.path, _version_of(c.path)) for c in run.checkpoints()}
    if step is not None:
        if step not in stored:
            steps = ", ".join(map(str, stored)) or "none"
            raise RunError(f"{run.path} has no checkpoint of step {step}; it has {steps}.")
        path, found = stored[step]
        return path / "policy", found, f"checkpoint {path.name}, version {found}"
    for path, found in stored.values():
        if found == version:
            return path / "policy", found, f"checkpoint {path.name}, version {found}"
    if version == 0 and "from" not in run.environment:
        return None, 0, f"{run.config.get('model')}, which the run began from"
    have = ", ".join(f"@{step} (version {found})" for step, (_, found) in stored.items()) or "none"
    raise RunError(
        f"the weights of version {version}, which sampled this, are in no checkpoint (there are: "
        f"{have}; see checkpoint.every and checkpoint.keep_last). RUN@STEP#ID takes another one."
    )


def _version_of(checkpoint: Path) -> int:
    try:
        return int(json.loads((checkpoint / "trainer.json").read_text())["version"])
    except (OSError, ValueError, KeyError):
        return -1  # torn: loading it says so


async def _decode_again(
    replay: Replay, parts: Parts, run_seed: int
) -> tuple[Float32Array, Int32Array]:
    """Draws every sampled segment of the path again, after the same ids and under the same seed:
    (log-probs, ids), each [T]."""
    trajectory = replay.record.trajectory
    split, step, rest = trajectory.id.split("/", 2)
    task, _, number = rest.rpartition("/")
    seed = derive_seed(run_seed, split, int(step), task, int(number))
    ids = replay.row.token_ids
    logprobs = np.full(len(ids), np.nan, np.float32)
    drawn = np.full(len(ids), -1, np.int32)
    async with running(parts):
        for index, begin, end in replay.spans:
            segment = trajectory.segments[index]
            if not segment.is_sampled or segment.sampling is None:
                continue
            request = Request(
                id=f"replay/{trajectory.id}/{index}",
                prompt_ids=ids[:begin],
                sampling=segment.sampling,
                seed=derive_seed(seed, segment.turn),
            )
            deltas = [delta async for delta in parts.engine.generate(request)]
            again = np.concatenate([delta.token_ids for delta in deltas])[: end - begin]
            values = np.concatenate([delta.logprobs for delta in deltas])[: end - begin]
            drawn[begin : begin + len(again)] = again
            other = np.flatnonzero(again != ids[begin : begin + len(again)])
            same = int(other[0]) if len(other) else len(again)
            logprobs[begin : begin + same] = values[:same]
    return logprobs, drawn


# -- showing it ---------------------------------------------------------------------------------


def show(replay: Replay, console: Console, *, has_all_tokens: bool = False) -> None:
    """Prints the dialogue, the tokens coloured by trainer - rollout, and the comparison."""
    record, trajectory = replay.record, replay.record.trajectory
    console.print(Text(printable(trajectory.id), style="bold"))
    where = f"step {record.step}" + (f", {replay.split}" if replay.split != "train" else "")
    size = f"reward {trajectory.reward:.4g}, {len(replay.row)} tokens"
    console.print(Text(f"{where}, {trajectory.status}, {size}", style="dim"))
    if trajectory.error:
        console.print(Text(_lines(trajectory.error), style="red"))
    if others := [str(i) for i in trajectory.leaves() if i != replay.leaf]:
        text = f"this is the path to leaf {replay.leaf}; others: {', '.join(others)} (ID/LEAF)"
        console.print(Text(text, style="dim"))
    for index, begin, end in replay.spans:
        _show_segment(replay, console, trajectory.segments[index], begin, end, has_all_tokens)
    _show_verdict(replay, console)


def _show_segment(
    replay: Replay, console: Console, segment: Segment, begin: int, end: int, has_all_tokens: bool
) -> None:
    gap = replay.stored_trainer - replay.row.columns["rollout_logprobs"]
    sampled = f"turn {segment.turn + 1}, sampled by version {segment.policy_version}"
    head = f"\n{sampled if segment.is_sampled else 'observed'}, tokens {begin} to {end - 1}"
    if segment.finish_reason not in (None, "stop"):
        head += f", ended by {segment.finish_reason}"
    console.print(Text(head, style="bold cyan" if segment.is_sampled else "dim"))
    for message in segment.messages:
        calls = (f"{c.name}({c.arguments})" for c in message.tool_calls)
        for text in filter(None, (message.thinking, message.content, *calls)):
            who = printable(f"{message.role} {message.name}".strip())
            console.print(Text(f"  {who}: {_lines(text)}"))
    tokens = Text("  ")
    for at in range(begin, end):
        id_ = int(replay.row.token_ids[at])
        known = replay.tokenizer
        text = f"{id_} " if known is None else _lines(known.decode([id_]))
        tokens.append(text, style=gap_style(gap[at]) if segment.is_sampled else "dim")
    console.print(tokens)
    if segment.is_sampled:
        console.print(_token_table(replay, begin, end, gap, has_all_tokens))


def _token_table(
    replay: Replay, begin: int, end: int, gap: Float32Array, has_all_tokens: bool
) -> Table:
    """Every token, or those with the largest differences, in their order."""
    rollout, trainer = replay.row.columns["rollout_logprobs"], replay.stored_trainer
    places = begin + np.argsort(-np.nan_to_num(np.abs(gap[begin:end])), kind="stable")
    chosen = np.sort(places if has_all_tokens else places[:NUM_TOKENS]).tolist()
    table = plain_table("place", "token", "rollout", "trainer", "difference")
    for at in chosen:
        token = token_text(int(replay.row.token_ids[at]), replay.tokenizer)
        logprobs = logprob_text(float(rollout[at])), logprob_text(float(trainer[at]))
        table.add_row(str(at), token, *logprobs, gap_text(float(gap[at])))
    if len(chosen) < end - begin:
        table.caption = f"{len(chosen)} of {end - begin} tokens; --tokens lists all"
        table.caption_justify = "left"
    return table


def _show_verdict(replay: Replay, console: Console) -> None:
    scores = replay.scores
    if scores is None:
        name = printable(f"{replay.run.path}#{replay.record.trajectory.id}")
        text = f"\nscore it again, by trainer and engine: lockstep replay {name} --score"
        console.print(Text(text, style="dim"))
        return
    console.print(Text(f"\nscored by {printable(scores.weights)}", style="bold"))
    sides: tuple[tuple[Source, str], ...] = (("trainer", "trainer"), ("engine", "sampler"))
    for source, who in sides:
        found = replay.comparison(source)
        compared, unequal = found["compared_tokens"], found["unequal_tokens"]
        text, style = f"all {compared} came back, bit for bit", "green"
        if not compared:
            text, style = "nothing to compare: none are stored for these weights", "yellow"
        elif unequal:
            text = (
                f"{unequal} of {compared} differ, by {found['max_abs_diff']:.2g} at most, first at "
                f"token {found['first_unequal_token']}"
            )
            style = "bold red" if scores.contract else "yellow"
        if found.get("drawn_otherwise_tokens"):
            text += f"; from token {found['first_drawn_otherwise']} on others were drawn"
        if found["other_version_tokens"]:
            text += f" ({found['other_version_tokens']} tokens of other weights left out)"
        console.print(Text.assemble(f"the {who}'s log-probs: ", (text, style)))


def _lines(text: str) -> str:
    """The text with characters that move a cursor escaped; lines are kept."""
    return "\n".join(printable(line) for line in text.split("\n"))


def parse_target(text: str) -> tuple[Path, int | None, str]:
    """RUN#ID or RUN@STEP#ID. Raises ConfigError for anything else."""
    where, hash_, name = text.partition("#")
    if not hash_:
        raise ConfigError(f"{text!r}: expected RUN#ID, as 'runs/first#0' for its first trajectory.")
    path, at, step = where.rpartition("@")
    if at and step.isdigit():
        return Path(path), int(step), name
    return Path(where), None, name
