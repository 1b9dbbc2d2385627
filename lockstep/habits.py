"""The setting that somebody means who writes it as another library does, or not quite right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_EPOCHS = "steps: a step takes the next groups_per_step tasks"


def _by_word(words: dict[str, str]) -> dict[str, str]:
    return {each: ours for ours, theirs in words.items() for each in theirs.split()}


SETTINGS = _by_word(
    {
        "trainer.lr": "learning_rate lr",
        "trainer.schedule": "lr_scheduler_type",
        "trainer.warmup_updates": "warmup_steps lr_warmup_steps",
        "trainer.grad_clip": "max_grad_norm",
        "trainer.updates_per_batch": "ppo_epochs num_iterations",
        "trainer.updates_per_batch: a step's batch is trained on in so many updates": (
            "mini_batch_size ppo_mini_batch_size"
        ),
        "trainer.max_tokens_per_microbatch: a step is cut into pieces of so many tokens": (
            "gradient_accumulation_steps micro_batch_size"
        ),
        "trainer.recompute=blocks": "gradient_checkpointing enable_gradient_checkpointing",
        "groups_per_step": "train_batch_size per_device_train_batch_size",
        "groups_per_step: tasks per step; each is played group_size times": "batch_size",
        "group_size": "num_generations n rollouts_per_example",
        "steps": "max_steps total_training_steps",
        _EPOCHS: "num_train_epochs num_epochs max_epochs total_epochs",
        "max_tokens": "max_seq_length max_length max_model_len",
        "agent.max_turn_tokens": "max_completion_length max_new_tokens max_response_length",
        "agent.temperature": "temp",
        "advantage": "adv_estimator",
        "objective": "loss",
        "objective.aggregate": "loss_type loss_agg_mode",
        "objective.kl_coef": "beta kl_beta kl_loss_coef",
        "objective.entropy_coef": "entropy_coeff",
        "objective.clip: how far below and above 1, as 0.2,0.2": "clip_ratio cliprange epsilon",
        "model": "hub_model_id model_name model_name_or_path model_path",
        "dtype": "precision",
        "dtype=bfloat16": "bf16",
        "dtype=float16": "fp16",
        "lora.rank": "lora_r lora_rank",
        "lora.alpha": "lora_alpha",
        "engine=vllm": "use_vllm vllm",
        "engine.tensor_parallel": "tensor_parallel_size",
        "parallel.processes": "gpus n_gpus_per_node num_processes",
        "evaluation.every": "eval_steps test_freq",
        "checkpoint.every": "checkpoint_every save_steps save_freq",
        "record.loggers": "logger report_to",
        "record.loggers=wandb": "use_wandb wandb",
        "record.project": "project project_name",
        "name": "run_name experiment_name",
        "out": "output_dir default_local_dir",
        "task: its kind says how an episode is rewarded": "reward_funcs reward_function",
    }
)
"""The last part of a name in TRL, verl, prime-rl or another library -> a setting, one with its
value, or a sentence that begins with it."""

WHOLE = _by_word(
    {
        "model": "actor_rollout_ref.model.path",
        "out": "out",
        "resume": "resume",
        "resume: lockstep train RUN resume=true": "resume_from_checkpoint resume_mode",
    }
)
"""The same for whole names, which come first."""

VERBS = _by_word(
    {
        "doctor": "check debug diagnose",
        "eval": "evaluate test",
        "export": "push save",
        "recipes": "list",
        "replay": "show",
        "sft": "finetune",
        "train": "fit rl run start",
        "--help": "help",
        "--version": "version",
    }
)
"""Words for a verb of the command line elsewhere -> ours."""

VALUES = _by_word(
    {
        "float16": "fp16 half",
        "bfloat16": "bf16",
        "float32": "fp32 float",
        "cuda": "gpu",
        "embedded": "hf",
    }
)

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
