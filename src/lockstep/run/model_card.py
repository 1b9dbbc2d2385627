"""The model card of an exported checkpoint, and its way to the Hugging Face hub."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import flatten
from lockstep.errors import ConfigError, RunError
from lockstep.models import peft_format
from lockstep.observe.metrics import held_out_label
from lockstep.run.build import recipe_of
from lockstep.store.run import Run, step_of
from lockstep.tables import tables_beside

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NOT_SETTINGS = ("name", "model")
_TEXTS = tables_beside(__file__)


def write_card(directory: Path, run: Run, *, checkpoint: str, hub: str) -> None:
    """Writes README.md, the last file of an export: where it stands, the export is whole.

    checkpoint: its name, "step-000030"; held-out figures are those measured on it. hub: the
    repository it is meant for; "" if none. The licence is left to its owner.
    """
    from huggingface_hub import EvalResult, ModelCardData

    model = str(run.config["model"])
    is_adapter = (directory / peft_format.CONFIG).is_file()
    kind = "adapter" if is_adapter else "finetune"
    method = str(run.config.get("objective", {"type": "sft"})["type"])
    held_out = _held_out(run, checkpoint)
    task = str(run.config.get("task", {}).get("type", "")) or "written dialogues"
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=task,
            dataset_name=f"{task}, held-out tasks",
            metric_type="pass@k" if "pass@" in label else "reward",
            metric_name=label,
            metric_value=value,
        )
        for label, (_, value) in held_out.items()
    ]
    data = ModelCardData(
        model_name=run.name if results else None,
        base_model=model if _is_hub_name(model) else None,
        base_model_relation=kind if _is_hub_name(model) else None,
        datasets=_datasets(run) or None,
        eval_results=results or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["lockstep", *(["lora"] if is_adapter else []), method],
    )
    step = step_of(checkpoint)
    rows = [row for row in run.metrics if step < 0 or row["step"] < step]  # until the checkpoint
    text = _TEXTS["card"].format(
        name=run.name,
        checkpoint=checkpoint,
        what=_TEXTS["what"][kind],
        how="reinforcement learning" if "objective" in run.config else "supervised training",
        task=task,
        version=run.environment.get("versions", {}).get("lockstep-rl", ""),
        model=_shown(model),
        figures=_figures_text(run, rows, held_out),
        exactness=_exactness(rows),
        use=_TEXTS["use"][kind].format(name=hub or directory.name, model=_shown(model)),
        settings=_settings(run),
    )
    (directory / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{text}", "utf-8")


def check_hub_name(name: str) -> None:
    """Raises ConfigError if `name` cannot be a repository of the hub."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--hub {name}: expected ORG/NAME or NAME. {error}") from None


def push(directory: Path, name: str, *, is_private: bool) -> str:
    """Uploads an export to the hub. Returns its address there.

    Raises RunError if the hub refuses or cannot be reached; the export stays as it is.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        repository = api.create_repo(name, exist_ok=True, private=is_private)
        message = "Upload of `lockstep export`"
        api.upload_folder(repo_id=repository.repo_id, folder_path=directory, commit_message=message)
        return str(repository)
    except Exception as error:  # the hub's client raises a dozen kinds; each means the same here
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise RunError(
            f"{name} was not uploaded ({type(error).__name__}: {reason}). Nothing is lost: the "
            f"model and its card are in {directory}. Later, after `hf auth login` if need be: "
            f"hf upload {shlex.quote(name)} {shlex.quote(str(directory))}"
        ) from error


# -- the parts of a card --------------------------------------------------------------------------


def _held_out(run: Run, checkpoint: str) -> dict[str, tuple[float | None, float]]:
    """Label -> (value before training, value of the checkpoint), where it was measured on it."""
    step = step_of(checkpoint)
    out: dict[str, tuple[float | None, float]] = {}
    for name in dict.fromkeys(name for row in run.metrics for name in row):
        label = held_out_label(name)
        values = dict(zip(*run.column(name), strict=True))
        value = values.get(step, math.nan)
        if label and math.isfinite(value):
            first = next(iter(values.items()))
            out[label] = (first[1] if first[0] < 0 else None, value)
    return out


def _figures_text(
    run: Run, rows: Sequence[Mapping[str, Any]], held_out: Mapping[str, tuple[float | None, float]]
) -> str:
    texts, parts = _TEXTS["figures"], list[str]()
    if held_out:
        lines = [
            f"| {label} | {'' if before is None else f'{before:.4g}'} | {value:.4g} |"
            for label, (before, value) in held_out.items()
        ]
        parts.append(texts["held_out"].format(rows="\n".join(lines)))
        tasks = run.config.get("evaluation")
        if isinstance(tasks, dict) and tasks.get("num_tasks"):
            parts.append(texts["tasks"].format(num_tasks=tasks["num_tasks"]))
    else:
        parts.append(texts["none"])
    if rewards := [row["reward/mean"] for row in rows if "reward/mean" in row]:
        last = rewards[-10:]
        ends = {"first": rewards[0], "last": sum(last) / len(last)}
        parts.append(texts["reward"].format(**ends, num_last=len(last), num_steps=len(rewards)))
    return "\n\n".join(parts)


def _exactness(rows: Sequence[Mapping[str, Any]]) -> str:
    texts = _TEXTS["exactness"]
    if not (compared := [row for row in rows if row.get("mismatch/compared_tokens", 0) > 0]):
        return texts["none"]
    unequal = sum(int(row["mismatch/unequal_tokens"]) for row in compared)
    worst = max(row["mismatch/k3"] for row in compared)
    gap = max(row["mismatch/max_abs_diff"] for row in compared)
    found = texts["differ" if unequal or gap else "equal"]
    return texts["compared"].format(
        num_steps=len(compared),
        num_tokens=int(sum(row["mismatch/compared_tokens"] for row in compared)),
        found=found.format(unequal=unequal, gap=gap, worst=worst),
    )


def _settings(run: Run) -> str:
    config, recipe = flatten(run.config), recipe_of(run)
    shown = {name: _public(value) for name, value in config.items() if name not in _NOT_SETTINGS}
    if recipe is not None:
        shown = {name: value for name, value in shown.items() if recipe.get(name) != config[name]}
        head = f"Recipe `{run.config['name']}`" + (", with these changes:" if shown else ".")
    else:
        head = "All of them:"
    text = json.dumps(shown, indent=2, ensure_ascii=False)
    versions = run.environment.get("versions", {})
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    return head + (f"\n\n```json\n{text}\n```" if shown else "") + f"\n\nVersions: {made}."


def _public(value: Any) -> Any:
    """A setting without the directories of the machine that trained."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _datasets(run: Run) -> list[str]:
    """Data sets of the hub that the tasks came from."""
    from lockstep.envs.math.problem_sets import PUBLIC

    task = flatten(run.config.get("task", {}) | {"sft": run.config.get("sft") or {}})
    named = [value for key, value in task.items() if key.endswith("path") and _is_hub_name(value)]
    if not named:
        sources = [PUBLIC.get(str(v)) for k, v in task.items() if k.endswith("source")]
        named = [source.repository for source in sources if source and source.repository]
    return list(dict.fromkeys(named))


def _is_hub_name(name: Any) -> bool:
    return isinstance(name, str) and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _shown(model: str) -> str:
    """A model's name without the directories of the machine that trained it."""
    return model if _is_hub_name(model) else Path(model).name
