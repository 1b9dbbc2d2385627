"""Supervised training: from dialogues to a checkpoint in Hugging Face's form.

The run directory has the form of `lockstep train`: config.json, metrics.jsonl, checkpoints, and the
model under `model/`, ready for `lockstep train model=RUN/model`; with lora, the adapter under
`adapter/`, ready for `lora.path=RUN/adapter`.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lockstep.config import flatten, overlaid, to_dict
from lockstep.errors import ConfigError
from lockstep.models.config import ModelConfig
from lockstep.observe.alarms import Health
from lockstep.observe.live import RunHeader, View, ViewKind, open_view
from lockstep.observe.metrics import is_step_row
from lockstep.recipes import find_supervised_recipe, fitted_supervised
from lockstep.recipes.fitting import rate_line, usual_rate
from lockstep.renderers.base import Renderer
from lockstep.renderers.registry import make_renderer
from lockstep.run.build import load_model, resolve_device, tokenizer_of
from lockstep.run.preflight import (
    ModelFiles,
    check_fallback,
    check_machine,
    check_memory,
    check_parallel,
    describe_memory,
    labelled,
    read_model_files,
    write_renderer,
)
from lockstep.run.train import check_out, continued, said_first
from lockstep.run_config import SupervisedConfig
from lockstep.store.checkpoints import POLICY
from lockstep.store.run import Outcome, RunDirectory, Status, default_run_path, is_run, load_run
from lockstep.training.config import SFTConfig
from lockstep.types import Sample

Rows = tuple[Iterator[Sample], Sequence[Sample]]
"""(rows of all steps in order, held-out rows)."""


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
    config = continued(config, out) if resume else config
    check_machine(config)
    with tempfile.TemporaryDirectory() as scratch:
        config = replace(config, dtype=config.compute_dtype)  # a run says which it was
        begun = _created(config, Path(scratch) / "created") if config.create else config
        resolve_device(config)
        model_files, (rows, held_out) = check_supervised(begun)
        from lockstep.run.training_run import finish_run  # imports torch

        facts, shown = model_files.facts(), open_view(view)
        if model_files.renderer_line:
            config = replace(config, renderer=model_files.renderer_config)
        if isinstance(model_files.model, ModelConfig):
            facts["learning"] = rate_line(config, model_files.model)
        opened = (
            RunDirectory.open(out, facts=facts)
            if resume
            else RunDirectory.create(out, to_dict(config), facts=facts)
        )
        with opened as directory:
            run = _Run(config, model_files, directory, shown, held_out)
            shown.start(run.header(facts))
            if resume:
                run.restore()
            status: Status = "interrupted"
            # An interrupted run is a model too. A step whose row is not written is made again.
            with suppress(KeyboardInterrupt):
                run.make_steps(rows)
                status = "done"
            if status == "interrupted" and run.done == run.trainer.num_updates:
                run.save()
            made = run.write_model()
        found = finish_run(out, shown, run.health)
        shown.close()
        losses = {k: run.last[k] for k in ("train/loss", "time/elapsed_seconds") if k in run.last}
        return Outcome(out, status, {"steps": run.done, made.name: str(made), **losses, **found})


def _created(config: SupervisedConfig, place: Path) -> SupervisedConfig:
    """The settings with the tiny model that `create` makes in `place`."""
    from lockstep.models.tiny import create_tiny_model

    assert config.renderer is not None, "checked with the settings"
    stages = config.data.stages(config.seed) if config.data else ()
    dialogues = [d for stage in stages for d in stage.dialogues]
    create_tiny_model(config.create, place, dialogues, renderer=config.renderer, seed=config.seed)
    return replace(config, model=str(place), create="")


def check_supervised(config: SupervisedConfig) -> tuple[ModelFiles, Rows]:
    """Checks dialogues, the model's files and the format before a model is loaded. Returns the
    files and the rows.

    Raises DataError `file:line`, ConfigError, CheckpointError or RendererError.
    """
    check_fallback(config)
    model_files = read_model_files(config)
    config.trainer.check_routers(model_files.model, has_adapter=config.lora is not None)
    check_parallel(config, model_files.model)
    check_memory(config, model_files)
    rows, held_out = _rows(config, model_files)
    first = list(islice(rows, config.sft.rows_per_step))  # a bad dialogue raises here
    return model_files, (chain(first, rows), held_out)


class _Run:
    """One supervised run in progress."""

    def __init__(
        self,
        config: SupervisedConfig,
        model_files: ModelFiles,
        directory: RunDirectory,
        view: View,
        held_out: Sequence[Sample],
    ) -> None:
        from lockstep.training.checkpoint import CheckpointStore
        from lockstep.training.trainer import Trainer

        self.config, self.model_files, self.path = config, model_files, directory.path
        self.directory, self.view, self.held_out = directory, view, held_out
        self.store = CheckpointStore(self.path / "checkpoints", config.checkpoint)
        self.trainer = Trainer(
            load_model(config, model_files),
            config.trainer,
            like=model_files.directory,
            total_updates=config.sft.steps,
        )
        self.health = Health(flatten(to_dict(config)))
        self.done, self.elapsed, self.lowest = 0, 0.0, math.inf
        """Steps that are made, their seconds, and the lowest held-out loss."""
        self.last: dict[str, Any] = {}
        """The row of the last step."""

    def header(self, facts: Mapping[str, Any]) -> RunHeader:
        """The lines that are shown once, at the start. facts: of environment.json."""
        said = {
            "renderer": facts.get("renderer", ""),
            "learning": facts.get("learning", ""),
            "memory": describe_memory(self.config, self.model_files),
            "tests": f"{len(self.held_out)} rows, never trained" if self.held_out else "",
            "run": str(self.path),
        }
        family, lines = self.model_files.model.family, tuple(labelled(said))
        return RunHeader(num_steps=self.config.sft.steps, architecture=family, lines=lines)

    def restore(self) -> None:
        """Continues from the newest checkpoint, or begins again without one."""
        if (newest := self.store.latest()) is not None:
            state = self.store.load(newest, self.trainer)
            self.done, self.elapsed = state["step"], state["elapsed_seconds"]
        self.directory.rewind(self.done - 1 if self.done else -2)
        self.directory.add_facts({"resumed_at": self.done})
        before = load_run(self.path)
        self.lowest = min(before.values("eval/loss"), default=self.lowest)
        for row in filter(is_step_row, before.metrics):
            self.health.take(row)

    def make_steps(self, rows: Iterator[Sample]) -> None:
        """All steps that are left, with their tests and checkpoints."""
        from lockstep.training.sft import run_sft

        sft, began = self.config.sft, time.perf_counter() - self.elapsed
        if self.held_out and not self.done:
            first = {"step": -1, **self.test()}
            self.directory.log(first)
            self.view.step(first)
            self.elapsed = time.perf_counter() - began
        left = islice(rows, self.done * sft.rows_per_step, None)
        for metrics in run_sft(self.trainer, left, sft, first_step=self.done):
            self.end_step(metrics, began=began)

    def end_step(self, metrics: Mapping[str, float], *, began: float) -> None:
        """Tests, records and saves after an update. began: the time at which the run began."""
        config, model = self.config, self.model_files.model
        row, is_last = {**metrics, "step": self.done}, self.done + 1 == config.sft.steps
        every, kept = config.evaluation.every, config.checkpoint
        if self.held_out and (is_last or (every and (self.done + 1) % every == 0)):
            row |= self.test()
        if isinstance(model, ModelConfig):
            row["train/lr_to_usual"] = config.trainer.lr / usual_rate(config, model)
        now = time.perf_counter() - began
        row |= {"time/step_seconds": now - self.elapsed, "time/elapsed_seconds": now}
        row |= self.health.take(row, is_last=is_last)
        self.directory.log(row)
        self.last, self.elapsed, self.done = row, now, self.done + 1
        self.view.step(row, self.health.alarms)
        is_best = kept.keep_best and row.get("eval/loss") == self.lowest
        if is_last or (kept.every and (is_best or self.done % kept.every == 0)):
            self.save(-row["eval/loss"] if "eval/loss" in row else None)

    def test(self) -> dict[str, float]:
        """The loss on the held-out rows."""
        from lockstep.training.sft import held_out_loss

        self.view.phase("evaluating")
        loss = held_out_loss(self.trainer, self.held_out)
        self.lowest = min(self.lowest, loss)
        return {"eval/loss": loss, "eval/loss_to_lowest": loss / self.lowest}

    def save(self, metric: float | None = None) -> None:
        """Writes a checkpoint. metric: the negative loss of the held-out rows."""
        state = {"step": self.done, "elapsed_seconds": self.elapsed}
        self.store.save(self.done, self.trainer, state, metric=metric)

    def write_model(self) -> Path:
        """Writes the model of the best checkpoint, or of the last step, to RUN/model; an adapter to
        RUN/adapter."""
        from lockstep.models.peft_io import save_policy

        made = self.path / ("model" if self.model_files.lora is None else "adapter")
        if (best := self.store.best()) is not None:
            shutil.copytree(best / POLICY, made, dirs_exist_ok=True)
            self.view.note(f"{made} has the weights of {best.name}: the lowest held-out loss.")
        else:
            save_policy(self.trainer.model, made, like=self.model_files.directory)
        write_renderer(made, self.model_files.renderer_config)
        return made


def _rows(config: SupervisedConfig, model_files: ModelFiles) -> Rows:
    """The rows of a file, or of one stage of `data` after another, and the held-out rows."""
    from lockstep.training.sft import SFTExample, fits, hold_out, sft_row, sft_rows

    renderer, sft, tests = _spelling(model_files, config), config.sft, config.evaluation
    examples = _load("sft.path", config, model_files) if sft.path else []
    if tests.path:
        held = _load("evaluation.path", config, model_files)[: tests.num_rows]
    else:
        examples, held = hold_out(examples, tests, seed=config.seed)
    limit = config.max_tokens
    tested = [sft_row(each, model_files.renderer) for each in held]
    tested = [row for row in tested if fits(row, sft, limit)]
    if config.data is None:
        return sft_rows(examples, renderer, sft, max_tokens=limit, seed=config.seed), tested
    streams: list[Iterator[Sample]] = []
    left = sft.steps
    stages = config.data.stages(config.seed)
    for number, stage in enumerate(stages):
        # Each dialogue is written once, with one spelling: writing it anew in each pass costs more
        # than it teaches, since the next dialogue spells the same words differently anyway.
        where = f"{config.name} stage {number} dialogue"
        written = [
            SFTExample(where=f"{where} {at}", messages=tuple(said), weights=(1.0,) * len(said))
            for at, said in enumerate(stage.dialogues)
        ]
        how = {"observed_weight": sft.observed_weight, "word_weights": stage.word_weights}
        examples = [sft_row(each, renderer, **how) for each in written]
        steps = left if number == len(stages) - 1 else round(stage.share * sft.steps)
        left -= steps
        own = replace(sft, observed_weight=0.0)
        rows = sft_rows(examples, renderer, own, max_tokens=limit, seed=config.seed + number)
        streams.append(islice(rows, steps * sft.rows_per_step))
    return chain.from_iterable(streams), tested


def _load(setting: str, config: SupervisedConfig, model_files: ModelFiles) -> list[Any]:
    """The examples of a file, or of a run whose ids are this model's."""
    from lockstep.training.sft import load_examples

    sft = config.sft
    path = Path(sft.path if setting == "sft.path" else config.evaluation.path).expanduser()
    if is_run(path):
        own, theirs = model_files.renderer.tokenizer, tokenizer_of(load_run(path).config)
        if own.all_token_bytes() != theirs.all_token_bytes():
            raise ConfigError(
                f"{setting}={path}: its model {load_run(path).config['model']} has another "
                f"tokenizer than {config.model}, and tokens are trained as they were sampled. Set "
                "model to the run's model or to the run."
            )
    elif setting == "sft.path" and sft.min_reward != SFTConfig.min_reward:
        raise ConfigError(
            f"sft.min_reward={sft.min_reward:g} chooses episodes of a run, and sft.path={path} is "
            "none. Set sft.path=RUN, or leave sft.min_reward out."
        )
    return load_examples(path, min_reward=sft.min_reward, setting=setting)


def _spelling(model_files: ModelFiles, config: SupervisedConfig) -> Renderer:
    """The run's renderer, with `spelling_dropout` in the replies."""
    if not config.spelling_dropout:
        return model_files.renderer
    loose = model_files.renderer.tokenizer.with_dropout(config.spelling_dropout, seed=config.seed)
    renderer = copy(model_files.renderer)
    renderer.render_reply = make_renderer(model_files.renderer_config, loose).render_reply
    return renderer
