"""Document search: the quickstart's small worlds, and a user's own documents."""

from __future__ import annotations

from dataclasses import replace

from lockstep.agent.config import AgentConfig
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.objectives.config import GAE
from lockstep.recipes import recipe
from lockstep.run_config import Config, EvaluationConfig
from lockstep.training.config import CheckpointConfig, CriticConfig, TrainerConfig


@recipe
def quickstart() -> Config:
    """A tiny model learns to search 30 facts over several turns and to answer: minutes on two CPU
    cores. Also with model=tiny-qwen3."""
    return Config(
        name="quickstart",
        model="tiny-gpt-oss",
        task=DocSearchConfig(),
        steps=150,
        max_tokens=256,
        groups_per_step=8,
        group_size=8,
        agent=AgentConfig(max_turns=5, max_turn_tokens=48),
        trainer=TrainerConfig(lr=1e-3, warmup_updates=5, schedule="linear", min_lr_share=0.05),
        evaluation=EvaluationConfig(num_tasks=256),
        checkpoint=CheckpointConfig(every=25),
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
def docsearch() -> Config:
    """A model searches your documents: task.docs=FOLDER task.questions=FILE.jsonl model=DIR."""
    return Config(
        name="docsearch",
        model="tiny-gpt-oss",
        task=DocSearchConfig(),
        steps=200,
        max_tokens=1024,
        groups_per_step=8,
        group_size=8,
        agent=AgentConfig(max_turns=6, max_turn_tokens=256),
        trainer=TrainerConfig(lr=1e-5, warmup_updates=10),
        evaluation=EvaluationConfig(every=50, num_tasks=64),
        checkpoint=CheckpointConfig(every=25),
    )
