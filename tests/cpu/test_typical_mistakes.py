"""Sixty lines that users of TRL, verl, prime-rl, hydra, wandb and argparse type, and the hint that
each must be answered with. No model is loaded.
"""

import os
import shlex
from pathlib import Path

import pytest

from lockstep.cli import BAD_INPUT, OK, main

# What is typed after `lockstep`, what the answer must name, and the exit code.
MISTAKES = [
    # verbs and their order
    ("trian quickstart", "lockstep train", BAD_INPUT),
    ("run quickstart", "lockstep train", BAD_INPUT),
    ("quickstart", "lockstep train quickstart", BAD_INPUT),
    ("evaluate runs/x", "lockstep eval", BAD_INPUT),
    ("help", "--help", BAD_INPUT),
    ("list", "lockstep recipes", BAD_INPUT),
    ("--plugin mine.py train quickstart", "train quickstart --plugin mine.py", BAD_INPUT),
    ("export runs/x", "--hf", BAD_INPUT),
    ("eval quickstart", "lockstep train quickstart", BAD_INPUT),
    ("report runs/none", "runs/none is not a run directory: it does not exist", BAD_INPUT),
    ("doctor runs", "runs/b", BAD_INPUT),
    # what is trained
    ("train quikstart", "quickstart", BAD_INPUT),
    ("train Qwen/Qwen3-0.6B", "model=Qwen/Qwen3-0.6B", BAD_INPUT),
    ("train mine.py", "--plugin mine.py", BAD_INPUT),
    ("train missing.yaml", "missing.yaml: there is no such file", BAD_INPUT),
    ("train --config missing.yaml", "lockstep train missing.yaml", BAD_INPUT),
    ("train @ missing.toml", "lockstep train missing.toml", BAD_INPUT),
    ("train quickstart --plugin missing.py", "there is no such file", BAD_INPUT),
    ("train recipe=quickstart", "lockstep train quickstart", BAD_INPUT),
    # how a setting is written
    ("train quickstart --steps 10", "steps=10", BAD_INPUT),
    ("train quickstart --steps=10", "steps=10", BAD_INPUT),
    ("train quickstart --learning-rate 1e-5", "trainer.lr=1e-5", BAD_INPUT),
    ("train quickstart --trainer.lr 1e-5", "trainer.lr=1e-5", BAD_INPUT),
    ("train quickstart --out runs/y", "out=runs/y", BAD_INPUT),
    ("train quickstart --output_dir runs/y", "out=runs/y", BAD_INPUT),
    ("train quickstart --resume", "resume=true", BAD_INPUT),
    ("train quickstart +trainer.lr=1e-3", "trainer.lr=1e-3", BAD_INPUT),
    ("train quickstart steps = 10", "steps=10", BAD_INPUT),
    ("train quickstart steps: 10", "steps=10", BAD_INPUT),
    ("train quickstart steps=1e3", "steps=1000", BAD_INPUT),
    ("train quickstart trainer.lr=1,5e-4", "float", BAD_INPUT),
    # names of other libraries
    ("train quickstart lr=1e-4", "trainer.lr=1e-4", BAD_INPUT),
    ("train quickstart trainer.learning_rate=1e-4", "trainer.lr=1e-4", BAD_INPUT),
    ("train quickstart actor_rollout_ref.actor.optim.lr=1e-6", "trainer.lr=1e-6", BAD_INPUT),
    ("train quickstart data.train_batch_size=256", "groups_per_step=256", BAD_INPUT),
    ("train quickstart actor_rollout_ref.rollout.n=8", "group_size=8", BAD_INPUT),
    ("train quickstart --orchestrator.rollouts-per-example 8", "group_size=8", BAD_INPUT),
    ("train quickstart algorithm.adv_estimator=grpo", "advantage=grpo", BAD_INPUT),
    ("train quickstart trainer.n_gpus_per_node=2", "parallel.processes=2", BAD_INPUT),
    ("train quickstart num_generations=8", "group_size=8", BAD_INPUT),
    ("train quickstart num_train_epochs=1", "Lockstep has steps: a step takes", BAD_INPUT),
    ("train quickstart beta=0.04", "objective.kl_coef=0.04", BAD_INPUT),
    ("train quickstart epsilon=0.2", "objective.clip", BAD_INPUT),
    ("train quickstart max_completion_length=256", "agent.max_turn_tokens=256", BAD_INPUT),
    ("train quickstart max_seq_length=2048", "max_tokens=2048", BAD_INPUT),
    (
        "train quickstart gradient_accumulation_steps=4",
        "trainer.max_tokens_per_microbatch",
        BAD_INPUT,
    ),
    ("train quickstart temperature=0.7", "agent.temperature=0.7", BAD_INPUT),
    ("train quickstart lora_r=16", "lora.rank=16", BAD_INPUT),
    ("train quickstart model_name_or_path=tiny-qwen3", "model=tiny-qwen3", BAD_INPUT),
    ("train quickstart use_vllm=true", "engine=vllm", BAD_INPUT),
    ("train quickstart report_to=wandb", "record.loggers=wandb", BAD_INPUT),
    ("train quickstart wandb.project=mine", "record.project=mine", BAD_INPUT),
    ("train quickstart resume_from_checkpoint=runs/x", "resume=true", BAD_INPUT),
    # values
    ("train quickstart dtype=fp16", "Did you mean 'float16'", BAD_INPUT),
    ("train quickstart bf16=true", "dtype=bfloat16", BAD_INPUT),
    ("train quickstart device=cuda:0", "device=cuda", BAD_INPUT),
    ("train quickstart objective=grpo", "advantage=grpo", BAD_INPUT),
    ("train quickstart advantage=ppo", "advantage=gae", BAD_INPUT),
    ("train quickstart evaluation=none --dry-run", "num_tasks: 0", OK),
    ("train quickstart out=/proc/1/none", "/proc/1/none", BAD_INPUT),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with two empty runs and a module."""
    monkeypatch.chdir(tmp_path)
    make_place()


def make_place():
    for name in ("a", "b"):
        os.makedirs(f"runs/{name}")
        for file in ("config.json", "environment.json"):
            Path(f"runs/{name}/{file}").write_text("{}")
    Path("mine.py").touch()


def answer(words):
    """The exit code of `lockstep WORDS`, that of argparse too."""
    try:
        return main(shlex.split(words))
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(("words", "hint", "code"), MISTAKES, ids=lambda value: str(value))
def test_a_typical_mistake_is_answered_with_the_right_name(place, capsys, words, hint, code):
    found = answer(words)
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    assert "Traceback" not in said
    assert hint in said
    assert found == code
    assert sorted(os.listdir("runs")) == ["a", "b"]


def test_there_are_sixty_mistakes():
    assert len(MISTAKES) == 60 == len({words for words, _, _ in MISTAKES})
