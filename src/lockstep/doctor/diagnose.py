"""Turns an input into a diagnosis. Loads torch only if a model is given."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.config import did_you_mean
from lockstep.doctor.diagnosis import Diagnosis
from lockstep.doctor.examine import examine, names
from lockstep.doctor.findings import Setting
from lockstep.doctor.inputs.base import Dump, Facts, RunFacts
from lockstep.doctor.inputs.registry import open_dump
from lockstep.doctor.scoring.model import Model, open_model
from lockstep.doctor.scoring.weights import OWN
from lockstep.doctor.tokenization import Tokenization, find_tokenization, why_beyond, why_unlike
from lockstep.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer

HEAD_TOKENS = 1 << 15
"""Number of tokens that show whether the tokenizer belongs to the rows."""


def diagnose(
    source: Dump | str | Path,
    *,
    format: str = "",
    tokenizer: Tokenizer | str | None = None,
    renderer: Renderer | str | None = None,
    facts: Facts | None = None,
    model: str | Path | Model = "",
    adapter: str | Path = "",
    against: Sequence[str | Path] = (),
    only: Sequence[str] = (),
) -> Diagnosis:
    """Examines a run, or a dump of any trainer. `lockstep.diagnose` is this function.

    source: a directory, a file, or a `Dump`. format: name of a dump format; empty recognises it.
    tokenizer, renderer: objects, or names (`tokenization.find_tokenization`); None takes those of
    the model that the input names, if it is on this machine. facts: replace those of the input.
    model: scores a sample of the rows again: a directory, a shipped name, "own" for the weights of
    a run, or an open `Model`; empty skips the hypotheses that need one. adapter: in PEFT's form,
    for that model. against: other weights that may explain a difference. only: names of facts and
    hypotheses; empty reports all. Raises DataError if the input cannot be read, or is of another
    model or vocabulary than those given; ConfigError for unknown names.
    """
    began = time.perf_counter()
    dump = source if isinstance(source, Dump) else open_dump(source, format=format)
    facts = facts or dump.facts
    of_model = facts if str(model) in ("", OWN) else replace(facts, model=str(model), tokenizer="")
    words = find_tokenization(of_model, tokenizer=tokenizer, renderer=renderer)
    words = _of_rows(words, dump, is_given=tokenizer is not None)
    setting = make_setting(facts, words, tuple(dump.step_metrics()))
    for name in only:
        if name not in names():
            near = did_you_mean(name, names())
            raise ConfigError(f"--only {name}: there is no such fact or hypothesis.{near}")
    lacks = {**words.lacks, **dump.lacks}
    unjudged = [why for why in (words.lacks.get("messages"),) if why]
    read = dump.chunks
    if isinstance(model, Model) or model:
        try:
            opened = open_model(dump, facts, model=model, adapter=adapter, against=against)
            setting = replace(setting, model=opened)
            read = lambda: opened.rows_of(dump, facts)  # noqa: E731
        except (CheckpointError, MissingExtraError) as error:
            lacks["model"] = str(error)
            unjudged.append(f"the model cannot be used: {error}")
    examination = examine(read, setting, has=dump.has, only=only)
    if examination.num_rows and not examination.num_tokens:
        raise DataError(
            f"{dump.path}: all {examination.num_rows} rows are empty: there is no token to judge."
        )
    named = {"format": format, "tokenizer": tokenizer, "renderer": renderer, "model": model}
    given = [*named.items(), ("adapter", adapter), *(("against", each) for each in against)]
    texts = [(name, value) for name, value in given if isinstance(value, str | Path) and value]
    return Diagnosis(
        dump=dump,
        setting=setting,
        examination=examination,
        seconds=time.perf_counter() - began,
        only=tuple(only),
        options=tuple(word for name, value in texts for word in (f"--{name}", str(value))),
        lacks=lacks,
        unjudged=tuple(unjudged),
    )


def _of_rows(words: Tokenization, dump: Dump, *, is_given: bool) -> Tokenization:
    """`words` if the first rows do not contradict them, else the reason. Raises DataError for ids
    beyond a tokenizer that was given."""
    if (tokenizer := words.tokenizer) is None:
        return words
    for rows in islice(dump.chunks(max_tokens=HEAD_TOKENS), 1):
        beyond = why_beyond(tokenizer, rows)
        if why := beyond or why_unlike(tokenizer, rows):
            told = f"{why} Name the tokenizer of the rows: --tokenizer DIR"
            if beyond and is_given:
                raise DataError(f"{dump.path}: {told}.")
            lacks = {"tokenizer": told, "renderer": told}
            return Tokenization(lacks=lacks if beyond else lacks | {"messages": why})
    return words


def make_setting(
    facts: Facts, words: Tokenization, step_metrics: Sequence[Mapping[str, Any]] = ()
) -> Setting:
    """All that is known besides the rows: the facts of the input, and the user's choices."""
    known = {fact.name: getattr(facts, fact.name) for fact in fields(RunFacts)}
    known["pad_id"] = words.pad_id if facts.pad_id is None else facts.pad_id
    setting = Setting(
        **known,
        tokenizer=words.tokenizer,
        renderer=words.renderer,
        step_metrics=step_metrics,
        generation_defaults=words.generation_defaults,
    )
    if words.renderer is not None:
        # A trainer often names one stop id, and not the template's second one.
        stop_ids = setting.stop_ids | frozenset(words.renderer.stop_ids) | words.eos_ids
        setting = replace(setting, stop_ids=stop_ids)
    return setting
