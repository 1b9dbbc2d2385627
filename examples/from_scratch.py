"""Training by hand, from top to bottom: python from_scratch.py (half a minute on a CPU core).

Everything that `lockstep.train` does for one step, without its settings and its files: load a
model, let it play a group of episodes with a tool, score them, make rows with advantages, correct
what the sampler and the trainer disagree on (here: nothing), update the weights, and hand them to
the sampler. The KL between sampler and trainer is printed. It is exactly 0.
"""

import asyncio
import random
import re
from dataclasses import dataclass

import torch

from lockstep.agent.environment import Environment, Observation, Score
from lockstep.agent.loop import run_episode
from lockstep.agent.tasks import derive_seed
from lockstep.agent.tools import ToolRunner, tool
from lockstep.agent.turns import Budget
from lockstep.correction.config import Correction
from lockstep.engines.base import Engine, EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.registry import make_engine
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.objectives.config import GRPO, PPOClip
from lockstep.ops.selftest import fingerprint, prove
from lockstep.renderers.base import Renderer
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.preflight import stored_renderer
from lockstep.training.config import TrainerConfig
from lockstep.training.rows import rows_for_training
from lockstep.training.trainer import Trainer
from lockstep.types import Group, Message, SamplingParams, Task, Trajectory

MODEL = "tiny-math"
STEPS, GROUPS, GROUP_SIZE = 20, 8, 8
MAX_TOKENS, MAX_TURNS, MAX_TURN_TOKENS = 256, 4, 48


# -- 1. a tool, a task and a reward ----------------------------------------------------------------


@tool
def python(code: str) -> str:
    """Computes an expression of whole numbers, such as 12*34."""
    if not re.fullmatch(r"\d+([-+*]\d+)*", code):  # eval is for nothing else
        return "error"
    return str(eval(code))


def make_task(number: int) -> Task:
    draw = random.Random(number)
    a, b, c = draw.randint(101, 999), draw.randint(11, 99), draw.randint(101, 999)
    question = f"Take {a} times {b}. Then add {c}. What is it?"
    return Task(id=str(number), payload={"question": question, "answer": f"#### {a * b + c}"})


class Sums(Environment):
    """One episode: a question, calls of the tool, and an answer."""

    tools = (python,)

    def __init__(self, task: Task) -> None:
        self.task = task
        self.runner = ToolRunner(self.tools)
        self.answer = ""

    async def reset(self) -> list[Message]:
        return [
            Message(role="developer", content="Use python."),
            Message(role="user", content=self.task.payload["question"]),
        ]

    async def step(self, message: Message) -> Observation:
        """Runs the calls of the model's turn. A turn without a call is the answer."""
        if not message.tool_calls:
            self.answer = message.content.strip()
            return Observation(done=True)
        replies, _ = await self.runner.run(message.tool_calls)
        return Observation(messages=replies)

    async def score(self) -> Score:
        return Score(reward=float(self.answer == self.task.payload["answer"]))


# -- 2. a model, and its two users -----------------------------------------------------------------


@dataclass
class Parts:
    renderer: Renderer
    """Messages to ids, and ids to a message."""
    engine: Engine
    """Samples ids, and records the log-prob of each."""
    trainer: Trainer
    """Computes the log-probs again, and updates the weights."""


def load(name: str) -> Parts:
    """One decoder object for sampler and trainer, with ops that give equal bits in both."""
    directory = locate_model(name)
    tokenizer = Tokenizer.from_file(directory)
    renderer = make_renderer(stored_renderer(directory), tokenizer)
    model: Decoder = load_checkpoint(directory)
    proof = prove(model)  # runs each op in several batches, and compares bits
    assert proof.is_kept, proof.failure
    model.ops = proof.ops
    context = EngineContext(
        model=model,
        directory=directory,
        token_bytes=tokenizer.all_token_bytes(),
        control_ids=tokenizer.control_ids,
        vocab_size=model.config.vocab_size,
        max_tokens=MAX_TOKENS,
        dtype="float32",
        contract="true-on-policy",
    )
    engine = make_engine(EmbeddedConfig(), context)
    numerics = fingerprint(model.ops, model.embedding.dtype, model.embedding.device)
    config = TrainerConfig(lr=3e-4, warmup_updates=0)
    trainer = Trainer(model, config, like=directory, contract=numerics)
    return Parts(renderer, engine, trainer)


# -- 3. sample and score ---------------------------------------------------------------------------


async def play(parts: Parts, step: int) -> list[Group]:
    """GROUPS tasks, each played GROUP_SIZE times. All episodes share the engine's batches."""

    def episode(task: Task, sample: int):
        return run_episode(
            parts.engine,
            parts.renderer,
            Sums(task),
            task,
            trajectory_id=f"step {step}, task {task.id}, sample {sample}",
            seed=derive_seed(step, task.id, sample),
            sampling=SamplingParams(max_tokens=MAX_TURN_TOKENS),
            budget=Budget(
                max_tokens=MAX_TOKENS, max_turns=MAX_TURNS, max_turn_tokens=MAX_TURN_TOKENS
            ),
        )

    async def group(task: Task) -> Group:
        played = await asyncio.gather(*(episode(task, sample) for sample in range(GROUP_SIZE)))
        return Group(task=task, trajectories=list(played))

    tasks = [make_task(step * GROUPS + number) for number in range(GROUPS)]
    return list(await asyncio.gather(*map(group, tasks)))


# -- 4. align, correct, update, sync ---------------------------------------------------------------


async def train(parts: Parts, groups: list[Group]) -> dict[str, float]:
    """One update. Returns its metrics."""
    # A row per episode: the ids as they were sampled, a mask of the model's own, and columns at
    # the same index, such as `rollout_logprobs` and `advantages`.
    rows = rows_for_training(groups, GRPO())
    # The trainer's forward gives its own log-probs. Before anything is updated they are compared
    # with the recorded ones; `mis` would weigh tokens by their ratio, and reject those far off.
    metrics = parts.trainer.update(rows, PPOClip(), Correction.mis())
    # Engine and trainer hold the same tensors: a sync is a new version, and an empty cache.
    await parts.engine.load_weights(None, version=parts.trainer.version)
    return metrics


def show(parts: Parts, trajectory: Trajectory) -> None:
    """The segments of one episode. Sampled ids are never encoded again."""
    for segment in trajectory.segments:
        author = "model      " if segment.is_sampled else "environment"
        print(f"  {author} {parts.renderer.tokenizer.decode(segment.token_ids)!r}")
    print(f"  reward {trajectory.reward}")


async def main(steps: int = STEPS) -> list[dict[str, float]]:
    """Trains. Returns the figures of each step."""
    torch.manual_seed(0)
    parts, rows = load(MODEL), []
    try:
        for step in range(steps):
            groups = await play(parts, step)
            if step == 0:
                show(parts, groups[0].trajectories[0])
            metrics = await train(parts, groups)
            rewards = [t.reward for group in groups for t in group.trajectories]
            row = {
                "reward": sum(rewards) / len(rewards),
                "kl": metrics["mismatch/k1"],
                "unequal": metrics["mismatch/unequal_tokens"],
                "tokens": metrics["mismatch/compared_tokens"],
            }
            rows.append(row)
            print(
                f"step {step:2d}  reward {row['reward']:.2f}  KL(sampler, trainer) {row['kl']}  "
                f"unequal log-probs {row['unequal']:.0f} of {row['tokens']:.0f}"
            )
    finally:
        await parts.engine.close()
    return rows


if __name__ == "__main__":
    asyncio.run(main())
