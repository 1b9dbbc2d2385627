"""`lockstep replay`: finds one stored trajectory and prints it token by token, with the log-probs
of both sides. Only stored data is read: no model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.terminal import as_html, gap_style, token_table
from lockstep.doctor.tokenization import find_tokenization
from lockstep.errors import ConfigError, RunError, printable
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.report.document import to_document
from lockstep.store.run import Run, load_run
from lockstep.store.trajectories import TrajectoryRecord, read_row
from lockstep.types import Segment

NUM_NAMES = 2000
"""Ids that are compared with an unknown one, to suggest the nearest."""
NUM_TOKENS = 12
"""Tokens listed per turn, by the size of their difference; --tokens lists all."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Replay:
    """A path of a stored trajectory."""

    run: Run
    record: TrajectoryRecord
    split: str
    leaf: int

    def __repr__(self) -> str:
        return f"Replay({self.record.trajectory!r}, leaf {self.leaf})"

    def _repr_html_(self) -> str:
        """The output of the command, in its colours."""
        return as_html(self.show)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's model; None where it is not on this machine."""
        facts = Facts(trainer="lockstep", model=str(self.run.config.get("model", "")))
        return find_tokenization(facts).tokenizer

    def show(self, console: Console, *, has_all_tokens: bool = False) -> None:
        """Prints the dialogue, and its tokens coloured by trainer - rollout."""
        record, trajectory = self.record, self.record.trajectory
        path = {index: trajectory.segments[index] for index in trajectory.path(self.leaf)}
        console.print(Text(printable(trajectory.id), style="bold"))
        where = f"step {record.step}" + (f", {self.split}" if self.split != "train" else "")
        size = sum(map(len, path.values()))
        text = f"{where}, {trajectory.status}, reward {trajectory.reward:.4g}, {size} tokens"
        console.print(Text(text, style="dim"))
        if trajectory.error:
            console.print(Text(_lines(trajectory.error), style="red"))
        if others := [str(i) for i in trajectory.leaves() if i != self.leaf]:
            text = f"this is the path to leaf {self.leaf}; others: {', '.join(others)} (ID/LEAF)"
            console.print(Text(text, style="dim"))
        begin = 0
        for index, segment in path.items():
            self._show_dialogue(segment, begin, console)
            trainer, limit = record.trainer_logprobs[index], None if has_all_tokens else NUM_TOKENS
            self._show_tokens(segment, trainer, begin, console, limit)
            begin += len(segment)

    def _show_dialogue(self, segment: Segment, begin: int, console: Console) -> None:
        """The origin of a segment, and its messages."""
        sampled = f"turn {segment.turn + 1}, sampled by version {segment.policy_version}"
        origin = sampled if segment.is_sampled else "observed"
        head = f"\n{origin}, tokens {begin} to {begin + len(segment) - 1}"
        if segment.finish_reason not in (None, "stop"):
            head += f", ended by {segment.finish_reason}"
        console.print(Text(head, style="bold cyan" if segment.is_sampled else "dim"))
        for message in segment.messages:
            for text in message.lines():
                console.print(Text(f"  {_lines(text)}"))

    def _show_tokens(
        self, segment: Segment, trainer: Any, begin: int, console: Console, limit: int | None
    ) -> None:
        """Prints all tokens in their colours. A table below a sampled segment lists its tokens
        with the largest differences."""
        tokenizer, rollout = self.tokenizer, segment.logprobs
        gap = np.full(len(segment), np.nan, np.float32)
        if rollout is not None and trainer is not None:
            gap = trainer - rollout
        line = Text("  ")
        for id_, d in zip(segment.token_ids.tolist(), gap.tolist(), strict=True):
            text = f"{id_} " if tokenizer is None else _lines(tokenizer.decode([id_]))
            line.append(text, style=gap_style(d))
        console.print(line)
        if not segment.is_sampled:
            return
        worst_first = np.argsort(-np.nan_to_num(np.abs(gap)), kind="stable")
        chosen = sorted(worst_first.tolist()[:limit])
        table = token_table(chosen, segment.token_ids, rollout, trainer, tokenizer, begin=begin)
        if len(chosen) < len(segment):
            table.caption = f"{len(chosen)} of {len(segment)} tokens; --tokens lists all"
            table.caption_justify = "left"
        console.print(table)

    def to_json(self) -> dict[str, Any]:
        """The trajectory as it is stored, and the leaf of the path."""
        document = to_document(self.record, run=0, split=self.split, why=[])
        del document["why"]
        return {**document, "run": str(self.run.path), "leaf": self.leaf}


def find(target: str) -> Replay:
    """Finds the stored trajectory of RUN#NAME.

    NAME is its id, its id with /LEAF appended (as in messages about rows), the end of an id if only
    one ends so, or its number among the trajectories of training.

    Raises ConfigError for a target without a name, and RunError if there is no such trajectory,
    with the nearest name or the reason why it is gone.
    """
    path, hash_, name = target.partition("#")
    if not hash_:
        raise ConfigError(f"{target!r}: expected RUN#ID: runs/first#0 is its first trajectory.")
    run = load_run(path)
    stored = [each for split in run.splits() for each in run.summaries(split=split)]
    if not stored:
        raise RunError(
            f"{run.path} holds no trajectory: no step ended, or record.keep stores none."
        )
    known = {each.id: each for each in stored}  # evaluations of all steps have the same ids
    trained = [each for each in stored if each.split == "train"]
    ends = [id_ for id_ in known if name and id_.endswith(name)]
    head, _, rest = name.rpartition("/")
    rest = rest if name not in known and rest.isdigit() and head in known else ""
    found = known.get(head if rest else name)
    if found is None and name.isdigit():
        found = next(iter(trained[int(name) :]), None)
    elif found is None and len(ends) == 1:
        found = known[ends[0]]
    if found is None:
        steps, names = run.steps() or ["none"], list(known)
        near = get_close_matches(name, names[:NUM_NAMES], n=1) or names[:1]
        raise RunError(
            f"{run.path} holds no trajectory {name!r}; stored are steps {steps[0]} to {steps[-1]}, "
            f"{len(stored)} in all (record.keep). Did you mean {near[0]!r}?"
        )
    record = read_row(*found.address)
    trajectory = record.trajectory
    leaves = trajectory.leaves()
    if not leaves:
        raise RunError(f"trajectory {trajectory.id} has no tokens: {trajectory.error or 'empty'}.")
    leaf = int(rest) if rest else next((i for i in leaves if i in trajectory.rewards), leaves[-1])
    if leaf not in leaves:
        shown = ", ".join(map(str, leaves))
        raise RunError(f"trajectory {trajectory.id} has no leaf {leaf}; it has {shown}.")
    return Replay(run=run, record=record, split=found.split, leaf=leaf)


def _lines(text: str) -> str:
    """The text with characters that move a cursor escaped; lines are kept."""
    return "\n".join(printable(line) for line in text.split("\n"))
