"""From an input to a diagnosis. No torch unless a model is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.checks.base import Setting
from lockstep.checks.examine import Stage, examine
from lockstep.checks.rows import Rows
from lockstep.checks.suite import STRUCTURE, TRAINING, VALUES
from lockstep.doctor.diagnosis import Diagnosis
from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.inputs.registry import open_dump
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer


def diagnose(
    source: Dump | str | Path,
    *,
    format: str = "",
    tokenizer: Tokenizer | None = None,
    renderer: Renderer | None = None,
    facts: Facts | None = None,
    on_rows: Callable[[Rows], None] = lambda _: None,
) -> Diagnosis:
    """Examines a run, or a dump of any trainer.

    source: a directory or a file (`inputs.registry.FORMATS`), or a `Dump` of your own. tokenizer,
    renderer: for the checks of ids against text; None leaves these out. facts: in place of what
    the input says of itself. on_rows: called with every chunk that was read, for progress.
    Raises DataError if the input cannot be read.
    """
    began = time.perf_counter()
    dump = source if isinstance(source, Dump) else open_dump(source, format=format)
    setting = make_setting(facts or dump.facts, tokenizer=tokenizer, renderer=renderer)
    examination = examine(
        dump.chunks,
        [Stage(checks=STRUCTURE), Stage(checks=VALUES), Stage(checks=TRAINING)],
        setting,
        has=dump.has,
        on_rows=on_rows,
    )
    return Diagnosis(
        dump=dump,
        setting=setting,
        examination=examination,
        seconds=time.perf_counter() - began,
    )


def make_setting(
    facts: Facts, *, tokenizer: Tokenizer | None, renderer: Renderer | None
) -> Setting:
    """What the checks may know: what the input says, and what the user gave."""
    setting = Setting(
        trainer=facts.trainer,
        tokenizer=tokenizer,
        renderer=renderer,
        stop_ids=facts.stop_ids,
        pad_id=facts.pad_id,
        temperature=facts.temperature,
        top_p=facts.top_p,
        top_k=facts.top_k,
        is_moe=facts.is_moe,
    )
    if renderer is not None and not setting.stop_ids:
        setting = replace(setting, stop_ids=frozenset(renderer.stop_ids))
    return setting
