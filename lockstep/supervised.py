"""Supervised training: from dialogues to a checkpoint in Hugging Face's form.

A run directory like that of `lockstep train`: config.json, metrics.jsonl, checkpoints, and the
model under `model/`, ready for `lockstep train model=RUN/model`; with lora, the adapter under
`adapter/`, ready for `lora.path=RUN/adapter`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from lockstep.config import flatten, overlaid, to_dict
from lockstep.launch.gpu import Device
from lockstep.models.config import ModelConfig
from lockstep.observe.live import RunHeader, ViewKind, open_view
from lockstep.recipes import find_supervised_recipe, fitted_supervised
from lockstep.recipes.fitting import rate_line
from lockstep.renderers.base import Renderer
from lockstep.renderers.registry import make_renderer
from lockstep.run.build import load_model, resolve_device
from lockstep.run.preflight import (
    ModelFiles,
    check_fallback,
    check_machine,
    check_memory,
    check_parallel,
    describe_memory,
    read_model_files,
    write_renderer,
)
from lockstep.run.train import check_out, said_first
from lockstep.run_config import SupervisedConfig
from lockstep.store.run import Outcome, RunDirectory, Status, default_run_path
from lockstep.types import Sample


@said_first()
def train_supervised(
    config: SupervisedConfig | str = "sft",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    view: ViewKind = "live",
    **settings: Any,
) -> Outcome:
    """Trains as `config` says, or the recipe of that name, and writes the model to RUN/model, or
    the adapter to RUN/adapter. settings: others than the config's, as in a file. resume: continue
    the run in `out` from its newest checkpoint, to the same bits as without a stop.

    Raises DataError `file:line` for malformed dialogues, before the model is loaded.
    """
    if isinstance(config, str):
        config = overlaid(find_supervised_recipe(config), settings)
        config = fitted_supervised(config, flatten(settings))
    else:
        config = overlaid(config, settings)
    out = Path(out) if out else default_run_path(config.name)
    check_out(out, resume=resume)
    check_machine(config)
    with tempfile.TemporaryDirectory() as scratch:
        begun = config = replace(config, dtype=config.compute_dtype)  # a run says which it was
        if config.create:
            from lockstep.models.tiny import create_tiny_model

            assert config.renderer is not None, "checked with the settings"
            created = Path(scratch) / "created"
            stages = config.data.stages(config.seed) if config.data else ()
            dialogues = [d for stage in stages for d in stage.dialogues]
            create_tiny_model(
                config.create, created, dialogues, renderer=config.renderer, seed=config.seed
            )
            begun = replace(config, model=str(created), create="")
        model_files, rows = check_supervised(begun, device=resolve_device(config))
        return _train(config, model_files, rows, out=out, resume=resume, view=view)


def check_supervised(
    config: SupervisedConfig, *, device: Device | None = None
) -> tuple[ModelFiles, Iterator[Sample]]:
    """Checks what is known before a model is loaded: dialogues, the model's files, the format.
    Returns the files and the rows. device: None is the expected one.

    Raises DataError `file:line`, ConfigError, CheckpointError or RendererError.
    """
    check_fallback(config)
    model_files = read_model_files(config)
    config.trainer.check_routers(model_files.model, has_adapter=config.lora is not None)
    check_parallel(config, model_files.model)
    check_memory(config, model_files, device or config.expected_device)
    return model_files, _rows(config, model_files)


def _train(
    config: SupervisedConfig,
    model_files: ModelFiles,
    rows: Iterator[Sample],
    *,
    out: Path,
    resume: bool,
    view: ViewKind,
) -> Outcome:
    from lockstep.models.peft_io import save_policy
    from lockstep.training.checkpoint import CheckpointStore
    from lockstep.training.sft import run_sft
    from lockstep.training.trainer import Trainer

    path = out
    shown = open_view(is_json=view == "json")
    facts = {"architecture": model_files.model.architecture, "family": model_files.model.family}
    if chosen := model_files.renderer_line:
        facts["renderer"] = chosen
        config = replace(config, renderer=model_files.renderer_config)
    if isinstance(model_files.model, ModelConfig):
        facts["learning"] = rate_line(config, model_files.model)
    last: dict[str, float] = {}
    memory = describe_memory(config, model_files)
    kept = config.checkpoint
    store = CheckpointStore(
        path / "checkpoints", keep_last=kept.keep_last, keep_best=kept.keep_best
    )
    opened = (
        RunDirectory.open(path, facts=facts)
        if resume
        else RunDirectory.create(path, to_dict(config), facts=facts)
    )
    with opened as run:
        trainer = Trainer(
            load_model(config, model_files),
            config.trainer,
            like=model_files.directory,
            total_updates=config.sft.steps,
        )
        shown.start(
            RunHeader(
                num_steps=config.sft.steps,
                architecture=model_files.model.family,
                lines=(
                    *(
                        f"{name:<11}{facts[name]}"
                        for name in ("renderer", "learning")
                        if name in facts
                    ),
                    f"memory     {memory}",
                    f"run        {path}",
                ),
            )
        )
        done, elapsed = 0, 0.0
        if resume:
            if (newest := store.latest()) is not None:
                state = store.load(newest, trainer)
                done, elapsed = state["step"], state["elapsed_seconds"]
            run.rewind(done - 1)
            run.add_facts({"resumed_at": done})
        rows = islice(rows, done * config.sft.rows_per_step, None)
        began = time.perf_counter() - elapsed
        status: Status = "interrupted"
        # What was learnt so far is a model too. A step whose row is not written is made again.
        with suppress(KeyboardInterrupt):
            for metrics in run_sft(trainer, rows, config.sft, first_step=done):
                elapsed = time.perf_counter() - began
                last = {**metrics, "step": done, "time/elapsed_seconds": elapsed}
                run.log(last)
                done += 1
                shown.step(last)
                if done == config.sft.steps or (kept.every and done % kept.every == 0):
                    store.save(done, trainer, {"step": done, "elapsed_seconds": elapsed})
            status = "done"
        shown.close()
        if status == "interrupted" and done == trainer.num_updates:
            store.save(done, trainer, {"step": done, "elapsed_seconds": elapsed})
        made = path / ("model" if model_files.lora is None else "adapter")
        save_policy(trainer.model, made, like=model_files.directory)
        write_renderer(made, model_files.renderer_config)
    summary = {k: last[k] for k in ("train/loss", "time/elapsed_seconds") if k in last}
    return Outcome(path, status, {"steps": config.sft.steps, made.name: str(made), **summary})


def _rows(config: SupervisedConfig, model_files: ModelFiles) -> Iterator[Sample]:
    """The rows of all steps: those of a file, or of one stage of `data` after another."""
    from lockstep.training.sft import SFTExample, load_examples, sft_row, sft_rows

    renderer, sft = _spelling(model_files, config), config.sft
    if config.data is None:
        examples = load_examples(sft.path)
        return sft_rows(examples, renderer, sft, max_tokens=config.max_tokens, seed=config.seed)
    streams: list[Iterator[Sample]] = []
    left = sft.steps
    stages = config.data.stages(config.seed)
    for number, stage in enumerate(stages):
        # Each dialogue is written once, with one spelling: writing it anew in each pass costs more
        # than it teaches, since the next dialogue spells the same words differently anyway.
        examples = []
        for at, dialogue in enumerate(stage.dialogues):
            where = f"{config.name} stage {number} dialogue {at}"
            weights = (1.0,) * len(dialogue)
            row = sft_row(
                SFTExample(where=where, messages=tuple(dialogue), weights=weights),
                renderer,
                observed_weight=sft.observed_weight,
                word_weights=stage.word_weights,
            )
            examples.append(row)
        steps = left if number == len(stages) - 1 else round(stage.share * sft.steps)
        left -= steps
        written = replace(sft, observed_weight=0.0, word_weights={})
        seed = config.seed + number
        rows = sft_rows(examples, renderer, written, max_tokens=config.max_tokens, seed=seed)
        streams.append(islice(rows, steps * sft.rows_per_step))
    return chain.from_iterable(streams)


def _spelling(model_files: ModelFiles, config: SupervisedConfig) -> Renderer:
    """The run's renderer, with `spelling_dropout` in the replies."""
    if not config.spelling_dropout:
        return model_files.renderer
    loose = model_files.renderer.tokenizer.with_dropout(config.spelling_dropout, seed=config.seed)
    spelled = make_renderer(model_files.renderer_config, loose)
    return cast(Renderer, LooseReplies(model_files.renderer, spelled))


class LooseReplies:
    """A renderer whose replies are spelled by another one."""

    def __init__(self, strict: Renderer, loose: Renderer) -> None:
        self._strict, self.render_reply = strict, loose.render_reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strict, name)
