"""The recipes that come with Lockstep. Importing this file also registers all kinds of tasks
and sandboxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lockstep.agent.judge
import lockstep.agent.sandbox.bubblewrap
import lockstep.agent.sandbox.container
import lockstep.envs.mcp_tasks
import lockstep.envs.mixture
import lockstep.envs.openenv
import lockstep.envs.reasoning_gym.config
import lockstep.envs.verifiers.config  # noqa: F401
from lockstep.agent.config import AgentConfig
from lockstep.envs.custom import CustomConfig
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.envs.instructions.config import InstructionsConfig
from lockstep.envs.math.config import MathConfig, RetoolConfig
from lockstep.envs.programs.config import AgentProgramConfig, ConnectConfig
from lockstep.models.lora_config import LoraConfig
from lockstep.objectives.config import GAE, PPOClip
from lockstep.recipes.registry import recipe, supervised_recipe
from lockstep.renderers.config import ChatMLConfig
from lockstep.run_config import Config, EvaluationConfig, SupervisedConfig
from lockstep.training.config import CheckpointConfig, CriticConfig, SFTConfig, TrainerConfig
from lockstep.training.distill_config import DistillConfig, TeacherConfig

STEPS_INSTRUCTIONS = "Work it out."
TOOL_INSTRUCTIONS = "Use python."
HEAD_INSTRUCTIONS = "Answer at once."
"""Developer messages that tiny-math was trained on: for word problems, for chains with the tool,
for chains without it."""


def _tiny(**settings: Any) -> Config:
    """A run of a shipped model, in minutes on two CPU cores."""
    defaults: dict[str, Any] = {
        "max_tokens": 256,
        "groups_per_step": 8,
        "group_size": 8,
        "trainer": TrainerConfig(lr=1e-3, warmup_updates=5, schedule="linear", min_lr_share=0.05),
        "evaluation": EvaluationConfig(num_tasks=256),
        "checkpoint": CheckpointConfig(every=25),
    }
    return Config(**defaults | settings)


def _own(**settings: Any) -> Config:
    """A run of the user's model on the user's data."""
    defaults: dict[str, Any] = {
        "steps": 200,
        "max_tokens": 1024,
        "groups_per_step": 8,
        "group_size": 8,
        "trainer": TrainerConfig(lr=1e-5, warmup_updates=10),
        "evaluation": EvaluationConfig(every=50, num_tasks=64),
        "checkpoint": CheckpointConfig(every=25),
    }
    return Config(**defaults | settings)


@recipe
def quickstart() -> Config:
    """A tiny model learns to search 30 facts over several turns and to answer: minutes on two CPU
    cores. Also with model=tiny-qwen3 or model=tiny-qwen3-next."""
    return _tiny(
        name="quickstart",
        model="tiny-gpt-oss",
        task=DocSearchConfig(),
        steps=150,
        agent=AgentConfig(max_turns=5, max_turn_tokens=48),
    )


@recipe
def quickstart_ppo() -> Config:
    """The quickstart by PPO with a critic: one episode per task, an advantage for every token."""
    return replace(
        quickstart(),
        name="quickstart-ppo",
        groups_per_step=64,
        group_size=1,
        advantage=GAE(),
        critic=CriticConfig(lr=2e-3, updates_per_batch=2, clip=0.2),
    )


@recipe
def distill() -> Config:
    """The quickstart's student learns from a teacher in place of rewards, one episode per task. The
    teacher is runs/teacher, as `lockstep train quickstart out=runs/teacher` leaves it, or another
    model with the same vocabulary: distill.teacher.model=DIR."""
    return replace(
        quickstart(),
        name="distill",
        steps=60,
        groups_per_step=16,
        group_size=1,
        distill=DistillConfig(teacher=TeacherConfig(model="./runs/teacher"), signal="full"),
        trainer=replace(quickstart().trainer, lr=2e-3),
    )


@recipe
def custom() -> Config:
    """Your model, tools, reward and tasks: model=DIR task.tools=mytools.py:search
    task.reward=mytools.py:reward task.path=tasks.jsonl. What you leave open follows the size of the
    model and the number of tasks."""
    return _own(name="custom", model="", task=CustomConfig(), max_tokens=2048)


@recipe
def docsearch() -> Config:
    """A model searches your documents: task.docs=FOLDER task.questions=FILE.jsonl model=DIR."""
    return _own(
        name="docsearch",
        model="tiny-gpt-oss",
        task=DocSearchConfig(),
        agent=AgentConfig(max_turns=6, max_turn_tokens=256),
    )


@recipe
def math() -> Config:
    """A tiny model learns word problems with their steps written out: minutes on a CPU core."""
    return _tiny(
        name="math",
        model="tiny-math",
        task=MathConfig(instructions=STEPS_INSTRUCTIONS),
        steps=240,
        agent=AgentConfig(max_turns=1, max_turn_tokens=64),
    )


@recipe
def retool() -> Config:
    """A tiny model learns to compute with a Python tool over several turns: minutes on a core."""
    return _tiny(
        name="retool",
        model="tiny-math",
        task=RetoolConfig(
            instructions=TOOL_INSTRUCTIONS,
            head_instructions=HEAD_INSTRUCTIONS,
            explains_errors=False,
        ),
        steps=120,
        agent=AgentConfig(max_turns=6, max_turn_tokens=48),
    )


@recipe
def gsm8k() -> Config:
    """GSM8K in one reply without thinking. The numbers, for full training of Qwen3-0.6B to 8B, come
    from verl's GRPO example (rate 1e-6, 8 samples, 512 + 1024 tokens), with half its batch and no
    KL term (DAPO, arXiv 2503.14476). Estimate, not run: 3 hours on one GPU of 80 GB, with
    engine=vllm engine.share_device=true. task.path=DIR if the hub cannot be reached. Models other
    than Qwen3 keep their own renderer. Also task.source=dapo or file."""
    return _own(
        name="gsm8k",
        model="Qwen/Qwen3-0.6B",
        dtype="bfloat16",
        renderer=ChatMLConfig(enable_thinking=False),
        task=MathConfig(source="gsm8k"),
        steps=116,  # two passes over 7,473 problems
        max_tokens=1536,
        groups_per_step=128,
        agent=AgentConfig(max_turns=1, max_turn_tokens=1024),
        trainer=TrainerConfig(lr=1e-6, warmup_updates=10, recompute="blocks"),
        evaluation=EvaluationConfig(every=29, num_tasks=256),
    )


@recipe
def retool_dapo() -> Config:
    """An agent that computes with a Python tool over up to 16 turns (ReTool, arXiv 2504.11536) on
    DAPO-Math-17k. Numbers for Qwen3-4B, as an adapter: verl's ReTool example (16 samples of 64
    problems, 4 updates, clip 0.2 and 0.28, 16,384 tokens), its rate of 1e-6 times ten, as LoRA
    Without Regret advises. Estimate, not run: two days on one GPU of 80 GB, with engine=vllm
    engine.share_device=true. task.path=FILE.parquet if the hub cannot be reached;
    task.eval_source=aime tests on AIME 2024."""
    return _own(
        name="retool-dapo",
        model="Qwen/Qwen3-4B",
        dtype="bfloat16",
        lora=LoraConfig(rank=32, alpha=32.0),
        task=RetoolConfig(source="dapo"),
        steps=100,
        max_tokens=16384,
        groups_per_step=64,
        group_size=16,
        agent=AgentConfig(max_turns=16, max_turn_tokens=8192),
        objective=PPOClip(clip=(0.2, 0.28)),
        trainer=TrainerConfig(lr=1e-5, warmup_updates=10, updates_per_batch=4, recompute="blocks"),
        evaluation=EvaluationConfig(every=25, num_tasks=128),
    )


@recipe
def instructions() -> Config:
    """A tiny model learns to follow instructions that a program checks: minutes on one core. With a
    model that knows English: model=DIR task.world=full, or task.path=FILE (IFEval, Multi-IF)."""
    return _tiny(
        name="instructions",
        model="tiny-instructions",
        task=InstructionsConfig(world="small"),
        steps=150,
        agent=AgentConfig(max_turns=3, max_turn_tokens=64),
        checkpoint=CheckpointConfig(every=50),
    )


@recipe
def agent() -> Config:
    """Your finished agent, started once for each episode: task.command="python my_agent.py"
    task.path=TASKS.jsonl model=DIR."""
    return _own(
        name="agent",
        model="tiny-qwen3",
        task=AgentProgramConfig(),
        agent=AgentConfig(max_turns=32, max_turn_tokens=256, max_in_flight=32),
    )


@recipe
def connect() -> Config:
    """Agents that run somewhere else claim their episodes over HTTP: task.path=TASKS.jsonl
    model=DIR."""
    return _own(
        name="connect",
        model="tiny-qwen3",
        task=ConnectConfig(),
        agent=AgentConfig(max_turns=32, max_turn_tokens=256),
    )


@supervised_recipe
def sft() -> SupervisedConfig:
    """Trains a model on your own dialogues: sft.path=FILE.jsonl model=DIR."""
    return SupervisedConfig(name="sft", sft=SFTConfig(path="dialogues.jsonl"), max_tokens=1024)
