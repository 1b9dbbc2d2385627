"""The setting that somebody means who writes it as another library does, or not quite right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

SETTINGS = {
    "adv_estimator": "advantage",
    "batch_size": "groups_per_step: tasks per step; each is played group_size times",
    "beta": "objective.kl_coef",
    "bf16": "dtype=bfloat16",
    "checkpoint_every": "checkpoint.every",
    "clip_ratio": "objective.clip: how far below and above 1, as 0.2,0.2",
    "cliprange": "objective.clip: how far below and above 1, as 0.2,0.2",
    "entropy_coeff": "objective.entropy_coef",
    "epsilon": "objective.clip: how far below and above 1, as 0.2,0.2",
    "eval_steps": "evaluation.every",
    "fp16": "dtype=float16",
    "gpus": "parallel.processes",
    "gradient_accumulation_steps": (
        "trainer.max_tokens_per_microbatch: a step is cut into pieces of so many tokens"
    ),
    "gradient_checkpointing": "trainer.recompute=blocks",
    "hub_model_id": "model",
    "kl_beta": "objective.kl_coef",
    "kl_loss_coef": "objective.kl_coef",
    "learning_rate": "trainer.lr",
    "logger": "record.loggers",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "loss": "objective",
    "loss_type": "objective.aggregate",
    "lr": "trainer.lr",
    "lr_scheduler_type": "trainer.schedule",
    "max_completion_length": "agent.max_turn_tokens",
    "max_epochs": "steps: a step takes the next groups_per_step tasks",
    "max_grad_norm": "trainer.grad_clip",
    "max_length": "max_tokens",
    "max_new_tokens": "agent.max_turn_tokens",
    "max_response_length": "agent.max_turn_tokens",
    "max_seq_length": "max_tokens",
    "max_steps": "steps",
    "mini_batch_size": "trainer.updates_per_batch: a step's batch in so many updates",
    "model_name": "model",
    "model_name_or_path": "model",
    "model_path": "model",
    "n": "group_size",
    "n_gpus_per_node": "parallel.processes",
    "num_epochs": "steps: a step takes the next groups_per_step tasks",
    "num_generations": "group_size",
    "num_processes": "parallel.processes",
    "num_train_epochs": "steps: a step takes the next groups_per_step tasks",
    "output_dir": "out",
    "per_device_train_batch_size": "groups_per_step",
    "ppo_epochs": "trainer.updates_per_batch",
    "precision": "dtype",
    "project": "record.project",
    "report_to": "record.loggers",
    "reward_funcs": "task: its kind says how an episode is rewarded",
    "rollouts_per_example": "group_size",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "temp": "agent.temperature",
    "tensor_parallel_size": "engine.tensor_parallel",
    "total_epochs": "steps: a step takes the next groups_per_step tasks",
    "total_training_steps": "steps",
    "train_batch_size": "groups_per_step",
    "use_vllm": "engine=vllm",
    "use_wandb": "record.loggers=wandb",
    "vllm": "engine=vllm",
    "wandb": "record.loggers=wandb",
    "warmup_steps": "trainer.warmup_updates",
}
"""The last part of a name in TRL, verl, prime-rl or another library -> a setting, one with its
value, or a sentence that begins with it."""

VERBS = {
    "check": "doctor",
    "debug": "doctor",
    "diagnose": "doctor",
    "evaluate": "eval",
    "finetune": "sft",
    "fit": "train",
    "help": "--help",
    "list": "recipes",
    "push": "export",
    "rl": "train",
    "run": "train",
    "save": "export",
    "show": "replay",
    "start": "train",
    "test": "eval",
    "version": "--version",
}
"""Words for a verb of the command line elsewhere -> ours."""

WHOLE = {
    "actor_rollout_ref.model.path": "model",
    "out": "out",
    "resume": "resume",
    "resume_from_checkpoint": "resume: lockstep train RUN resume=true",
    "resume_mode": "resume: lockstep train RUN resume=true",
}
"""The same for whole names, which come first."""

VALUES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "gpu": "cuda",
    "ppo": "gae",
    "hf": "embedded",
}

KINDS = {
    "objective=grpo": "advantage=grpo",
    "objective=rloo": "advantage=rloo",
    "objective=ppo": "objective=ppo_clip",
    "advantage=ppo": "advantage=gae objective=ppo_clip",
}
"""Methods that are called by one name elsewhere, and are an advantage and a loss here."""


def hint(key: str, text: str, paths: Iterable[str]) -> str:
    """' Did you mean x?', to end a message about an unknown setting with; a list without a guess.

    text: the value that was given; "" if the setting stands in a file. paths: the known settings.

    >>> hint("learning_rate", "1e-5", ["steps", "trainer.lr"])
    " Did you mean 'trainer.lr=1e-5'?"
    """
    known = {path: path.rpartition(".")[2] for path in paths if not path.endswith(".type")}
    plain = key.lstrip("+~-").replace("-", "_")
    room, _, last = plain.rpartition(".")
    meant = WHOLE.get(plain) or SETTINGS.get(last, "")
    if re.split(r"\W", meant)[0] not in {"out", "resume", *(p.split(".")[0] for p in known)}:
        meant = ""
    if plain in known:
        found = [plain]
    elif ":" in meant:
        return f" Lockstep has {meant}."
    elif meant:
        found = [meant]
    elif not (found := [path for path, end in known.items() if end == last]):
        found = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
        ends = difflib.get_close_matches(last, known.values(), n=1, cutoff=0.6)
        found = found or [path for path, end in known.items() if end in ends]
    if found:
        written = [f"{p}={text}" if text and "=" not in p else p for p in found[:3]]
        return f" Did you mean {' or '.join(map(repr, written))}?"
    beside = [path.removeprefix(f"{room}.") for path in known if path.startswith(f"{room}.")]
    return f" Known: {', '.join(dict.fromkeys(p.split('.')[0] for p in beside or known))}."
