"""Supervised training: from dialogues to a checkpoint in Hugging Face's form.

A run directory like that of `lockstep train`: config.json, metrics.jsonl, and the model under
`model/`, ready for `lockstep train model=RUN/model`; with lora, the adapter under `adapter/`, ready
for `lora.path=RUN/adapter`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.config import to_dict
from lockstep.observe.live import RunHeader, open_view
from lockstep.renderers.base import Renderer, TokenIds
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.build import load_model, resolve_device
from lockstep.run.plan import describe_memory
from lockstep.run.preflight import (
    ModelFiles,
    check_memory,
    check_parallel,
    expected_device,
    read_model_files,
    write_renderer,
)
from lockstep.run_config import SupervisedConfig
from lockstep.store.run import Outcome, RunDirectory, Status, default_run_path
from lockstep.types import Message, Sample, ToolSchema

if TYPE_CHECKING:
    from lockstep.training.trainer import Trainer


def train_supervised(
    config: SupervisedConfig,
    *,
    out: str | Path | None = None,
    view: Literal["live", "json"] = "live",
) -> Outcome:
    """Trains as `config` says and writes the model to RUN/model, or the adapter to
    RUN/adapter.

    Raises DataError `file:line` for malformed dialogues, before the model is loaded.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if config.create:
            from lockstep.models.tiny import create_tiny_model

            created = Path(scratch) / "created"
            stages = config.data.stages(config.seed) if config.data else ()
            dialogues = [d for stage in stages for d in stage.dialogues]
            create_tiny_model(
                config.create, created, dialogues, renderer=config.renderer, seed=config.seed
            )
            model_files = read_model_files(replace(config, model=str(created), create=""))
        else:
            model_files = read_model_files(config)
        check_parallel(config, model_files.model)
        check_memory(config, model_files, resolve_device(config))
        parts = _rows(config, model_files)
        return _train(config, model_files, parts, out=out, view=view)


def check_supervised(config: SupervisedConfig) -> None:
    """What can be wrong and be known without a model: the dialogues, the model's files, the format.

    Raises DataError `file:line`, ConfigError, CheckpointError or RendererError.
    """
    if not config.create:
        model_files = read_model_files(config)
        check_parallel(config, model_files.model)
        check_memory(config, model_files, expected_device(config))
        _rows(config, model_files)


def _train(
    config: SupervisedConfig,
    model_files: ModelFiles,
    parts: Sequence[_Part],
    *,
    out: str | Path | None,
    view: Literal["live", "json"],
) -> Outcome:
    from lockstep.models.peft_io import save_policy
    from lockstep.training.trainer import Trainer

    path = Path(out) if out else default_run_path(config.name)
    shown = open_view(is_json=view == "json")
    num_steps = sum(part.num_steps for part in parts)
    facts = {"architecture": model_files.model.architecture, "family": model_files.model.family}
    last: dict[str, float] = {}
    memory = describe_memory(config, model_files)
    with RunDirectory.create(path, to_dict(config), facts=facts) as run:
        trainer = Trainer(
            load_model(config, model_files),
            config.trainer,
            like=model_files.directory,
            total_updates=num_steps,
        )
        shown.start(
            RunHeader(
                name=path.name,
                num_steps=num_steps,
                architecture=model_files.model.family,
                lines=(
                    f"memory     {memory}",
                    f"run        {path}",
                ),
            )
        )
        began = time.perf_counter()
        try:
            for metrics in _steps(trainer, parts, config):
                elapsed = {"time/elapsed_seconds": time.perf_counter() - began}
                last = {**metrics, "step": int(metrics["step"]), **elapsed}
                run.log(last)
                shown.step(last)
            status: Status = "done"
        except KeyboardInterrupt:  # what was learnt so far is a model too
            status = "interrupted"
        shown.close()
        made = path / ("model" if model_files.lora is None else "adapter")
        save_policy(trainer.model, made, like=model_files.directory)
        write_renderer(made, model_files.renderer_config)
    summary = {k: last[k] for k in ("train/loss", "time/elapsed_seconds") if k in last}
    return Outcome(path, status, {"steps": num_steps, made.name: str(made), **summary})


def _steps(
    trainer: Trainer, parts: Sequence[_Part], config: SupervisedConfig
) -> Iterator[dict[str, float]]:
    """The metrics of every step of every stage, as it is done."""
    from lockstep.training.sft import run_sft

    first = 0
    for part in parts:
        end = first + part.num_steps
        yield from run_sft(trainer, part.rows, replace(config.sft, steps=end), first_step=first)
        first = end


@dataclass(frozen=True, slots=True)
class _Part:
    """Steps that draw from one stream of rows."""

    num_steps: int
    rows: Iterator[Sample]


def _rows(config: SupervisedConfig, model_files: ModelFiles) -> list[_Part]:
    """The rows of each stage; a file is one stage."""
    from lockstep.training.sft import SFTExample, SFTRows, load_examples, sft_row

    renderer = _spelling(model_files, config)

    def stream(examples, sft, seed):
        return SFTRows(examples, lambda _: renderer, sft, max_tokens=config.max_tokens, seed=seed)

    if config.data is None:
        return [
            _Part(config.sft.steps, stream(load_examples(config.sft.path), config.sft, config.seed))
        ]
    parts: list[_Part] = []
    done = 0
    stages = config.data.stages(config.seed)
    for number, stage in enumerate(stages):
        # Written once, with one spelling each: writing them anew in each pass costs more than it
        # teaches, since the next dialogue spells the same words differently anyway.
        examples = []
        for at, dialogue in enumerate(stage.dialogues):
            where = f"{config.name} stage {number} dialogue {at}"
            example = SFTExample(
                where=where,
                messages=tuple(dialogue),
                message_weights=(1.0,) * len(dialogue),
            )
            row = sft_row(
                example,
                renderer,
                observed_weight=config.sft.observed_weight,
                word_weights=stage.word_weights,
            )
            examples.append(SFTExample(where=where, sample=row))
        is_last = number == len(stages) - 1
        steps = config.sft.steps - done if is_last else round(stage.share * config.sft.steps)
        done += steps
        sft = replace(config.sft, observed_weight=0.0, word_weights={})
        parts.append(_Part(steps, stream(examples, sft, config.seed + number)))
    return parts


def _spelling(model_files: ModelFiles, config: SupervisedConfig) -> Renderer:
    """The run's renderer, with `spelling_dropout` in what the model is to say."""
    if not config.spelling_dropout:
        return model_files.renderer
    loose = model_files.renderer.tokenizer.with_dropout(config.spelling_dropout, seed=config.seed)
    return LooseReplies(model_files.renderer, make_renderer(model_files.renderer_config, loose))


class LooseReplies:
    """One renderer for what the model reads, another spelling for what it says."""

    def __init__(self, strict: Renderer, loose: Renderer) -> None:
        self.name, self.stop_ids = strict.name, strict.stop_ids
        self.tokenizer: Tokenizer = strict.tokenizer
        self._strict, self._loose = strict, loose

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        return self._strict.render(messages, tools)

    def extend(self, sampled_ids: TokenIds, messages: Sequence[Message]) -> list[int]:
        return self._strict.extend(sampled_ids, messages)

    @property
    def thinking_opening(self) -> tuple[int, ...]:
        return self._strict.thinking_opening

    def forgets(self, messages: Sequence[Message]) -> bool:
        return self._strict.forgets(messages)

    def without_thinking(self, sampled_ids: TokenIds) -> list[int]:
        return self._strict.without_thinking(sampled_ids)

    def parse(self, sampled_ids: TokenIds) -> Message:
        return self._strict.parse(sampled_ids)

    def render_reply(self, message: Message) -> list[int]:
        return self._loose.render_reply(message)
