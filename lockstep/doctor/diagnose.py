"""From an input to a diagnosis. No torch unless a model is given."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config import did_you_mean
from lockstep.doctor.checks.base import Setting
from lockstep.doctor.checks.examine import Stage, examine
from lockstep.doctor.checks.suite import stages as all_stages
from lockstep.doctor.diagnosis import Diagnosis
from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.numerics.judgements import NUMERICS
from lockstep.doctor.numerics.rescore import Rescoring, open_model
from lockstep.doctor.numerics.weights import OWN
from lockstep.doctor.row_choice import RowChoice
from lockstep.doctor.tokenization import Tokenization, find_tokenization
from lockstep.errors import ConfigError
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer


def diagnose(
    source: Dump | str | Path,
    *,
    format: str = "",
    tokenizer: Tokenizer | str | None = None,
    renderer: Renderer | str | None = None,
    facts: Facts | None = None,
    model: str | Path | Rescoring = "",
    adapter: str | Path = "",
    against: Sequence[str | Path] = (),
    only: Sequence[str] = (),
) -> Diagnosis:
    """Examines a run, or a dump of any trainer. `lockstep.diagnose` is this function.

    source: a directory or a file (`inputs.registry.FORMATS`), or a `Dump` of your own. tokenizer,
    renderer: for the checks of ids against text, or names of them
    (`tokenization.find_tokenization`); None takes those of the model that the input names, if it is
    on this machine. facts: in place of what the input says of itself. model: what a sample of the
    rows is scored by again, a directory or a shipped name, or one that is open already; "own" is
    what a run has of itself; empty leaves out the checks that need one. adapter: in PEFT's form, on
    that model. against: other weights that may be behind a difference. only: names of checks; empty
    makes all.
    Raises DataError if the input cannot be read, ConfigError if `only` names no check, or what is
    named is not there.
    """
    began = time.perf_counter()
    dump = source if isinstance(source, Dump) else open_dump(source, format=format)
    facts = facts or dump.facts
    of_model = facts if str(model) in ("", OWN) else replace(facts, model=str(model), tokenizer="")
    words = _tokenization(of_model, tokenizer, renderer)
    setting = make_setting(facts, words, tuple(dump.step_metrics()))
    stages = [Stage(checks=checks) for checks in all_stages().values()]
    numerics = Stage(checks=NUMERICS)
    _check_names(only, [*stages, numerics])

    if isinstance(model, Rescoring) or model:
        opened = open_model(
            dump, dump.read, facts, model=model, adapter=adapter, against=against, seed=setting.seed
        )
        setting = replace(setting, model=opened)
        if isinstance(opened, Rescoring):
            stages = opened.stages(stages, dump.has)
            numerics = replace(numerics, chunks=opened.sample)
        else:
            numerics = replace(numerics, chunks=tuple)
    # What the training does with the gap is judged behind what is behind the gap.
    stages.insert(len(stages) - 1, numerics)
    choice = RowChoice()
    examination = examine(
        dump.read,
        stages,
        setting,
        has=dump.has,
        only=only,
        on_rows=choice.add,
    )
    return Diagnosis(
        dump=dump,
        setting=setting,
        examination=examination,
        seconds=time.perf_counter() - began,
        only=tuple(only),
        choice=choice,
        options=tuple(
            word
            for name, value in (
                ("--format", format),
                ("--tokenizer", tokenizer),
                ("--renderer", renderer),
                ("--model", model),
                ("--adapter", adapter),
                *(("--against", weights) for weights in against),
            )
            if isinstance(value, str | Path) and value
            for word in (name, str(value))
        ),
        lacks={**words.lacks, **dump.lacks},
    )


def _tokenization(
    facts: Facts, tokenizer: Tokenizer | str | None, renderer: Renderer | str | None
) -> Tokenization:
    if renderer is not None and not isinstance(renderer, str):
        return Tokenization(tokenizer=renderer.tokenizer, renderer=renderer)
    if isinstance(tokenizer, Tokenizer):
        return Tokenization(tokenizer=tokenizer, lacks={"renderer": "none was given"})
    return find_tokenization(facts, tokenizer=tokenizer or "", renderer=renderer or "")


def _check_names(only: Sequence[str], stages: Sequence[Stage]) -> None:
    known = [kind.name for stage in stages for kind in stage.checks]
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name}: there is no such check.{did_you_mean(name, known)}")


def make_setting(
    facts: Facts, words: Tokenization, step_metrics: Sequence[Mapping[str, Any]] = ()
) -> Setting:
    """What the checks may know: what the input says, and what the user gave."""
    setting = Setting(
        trainer=facts.trainer,
        tokenizer=words.tokenizer,
        renderer=words.renderer,
        stop_ids=facts.stop_ids,
        pad_id=words.pad_id if facts.pad_id is None else facts.pad_id,
        temperature=facts.temperature,
        top_p=facts.top_p,
        top_k=facts.top_k,
        is_moe=facts.is_moe,
        is_one_process=facts.is_one_process,
        max_staleness=facts.max_staleness,
        step_metrics=step_metrics,
    )
    if words.renderer is not None and not setting.stop_ids:
        setting = replace(setting, stop_ids=frozenset(words.renderer.stop_ids))
    return setting
