"""A program for Tinker's API: multi-turn document search, on a server of Lockstep or any other.

    lockstep serve tiny-gpt-oss --api tinker          # prints what to export
    python examples/tinker_docsearch.py --steps 30

The client writes the loop and rents the numerics: it samples each turn on the ids so far, plays the
tools, and sends back the received ids and log-probs. Document worlds and message format are the
same as in `lockstep train quickstart`.

With --kl-coef each step has two passes, as in programs that meet a gap of sampler and trainer: one
to read the trainer's log-probs, and one with the gap as a penalty in the advantages. On Lockstep
the gap is 0, and the penalty with it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
from tinker import types

from lockstep.agent.environment import Environment
from lockstep.agent.harness import Harness
from lockstep.recipes import find_recipe
from lockstep.renderers.base import Renderer
from lockstep.run.preflight import read_model_files
from lockstep.run_config import Config
from lockstep.types import Task

Array = npt.NDArray[Any]


@dataclass
class Episode:
    """Fed and drawn ids in order; observed ids have log-prob 0 and no advantage."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name."""

    def add(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        self.ids += ids
        self.logprobs += logprobs or [0.0] * len(ids)
        self.is_sampled += [logprobs is not None] * len(ids)

    def datum(self, advantage: float) -> types.Datum:
        """Position i predicts token i + 1: everything that belongs to a token moves one place."""
        tensor = types.TensorData.from_numpy
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": tensor(np.array(self.ids[1:])),
                "logprobs": tensor(np.array(self.logprobs[1:], np.float32)),
                "advantages": tensor(np.array(self.is_sampled[1:], np.float32) * advantage),
            },
        )


async def play(
    sampler: tinker.SamplingClient,
    renderer: Renderer,
    environment: Environment | Harness,
    limits: Config,
) -> Episode:
    """One episode: token in, token out."""
    assert isinstance(environment, Environment), "this task has no agent of its own"
    episode = Episode()
    episode.add(renderer.render(await environment.reset(), environment.tools))
    for _ in range(limits.agent.max_turns):
        room = limits.max_tokens - len(episode.ids)
        if room < 1:
            break
        params = types.SamplingParams(
            max_tokens=min(room, limits.agent.max_turn_tokens), stop=list(renderer.stop_ids)
        )
        prompt = types.ModelInput.from_ints(episode.ids)
        reply = (await sampler.sample(prompt, 1, params)).sequences[0]
        episode.add(reply.tokens, reply.logprobs)
        seen = await environment.step(renderer.parse(reply.tokens))
        if seen.done or reply.stop_reason == "length":
            break
        episode.add(renderer.extend(reply.tokens, seen.messages))
    score = await environment.score()
    episode.reward, episode.parts = score.reward, dict(score.parts)
    await environment.close()
    return episode


async def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    config = find_recipe("quickstart")
    renderer = read_model_files(config).renderer
    tasks = config.task.tasks(split="train", seed=options.seed)
    service = tinker.ServiceClient()
    trainer = await service.create_lora_training_client(
        options.model, rank=options.rank, seed=options.seed
    )
    rows: list[dict[str, Any]] = []
    for step in range(options.steps):
        began = time.monotonic()
        sampler = await trainer.save_weights_and_get_sampling_client()
        batch: list[Task] = tasks.take(options.groups)
        played = await asyncio.gather(
            *(
                play(sampler, renderer, config.task.environment(task, config.agent), config)
                for task in batch
                for _ in range(options.group_size)
            )
        )
        rewards = np.array([episode.reward for episode in played]).reshape(len(batch), -1)
        spread = rewards.std(1, keepdims=True)
        advantages = (rewards - rewards.mean(1, keepdims=True)) / np.maximum(spread, 1e-6)
        data = [
            episode.datum(advantage)
            for episode, advantage in zip(played, advantages.ravel(), strict=True)
            if advantage
        ]
        if options.kl_coef:
            scored = await trainer.forward(data, "importance_sampling")
            data = penalised(data, gaps_of(data, scored), options.kl_coef, options.kl_clip)
        trained = time.monotonic()
        passed = trainer.forward_backward(data, "importance_sampling")
        updated = trainer.optim_step(types.AdamParams(learning_rate=options.lr))
        output = await passed
        await updated
        train_seconds = time.monotonic() - trained
        gap = np.concatenate(gaps_of(data, output))
        row = {"reward": float(rewards.mean()), "kl_v1": gap.mean(), "kl_v2": (gap**2).mean() / 2}
        for name in dict.fromkeys(name for episode in played for name in episode.parts):
            row[f"reward/{name}"] = float(np.mean([e.parts.get(name, 0.0) for e in played]))
        row |= {"trained_tokens": len(gap), "train_seconds": train_seconds}
        row["seconds"] = time.monotonic() - began
        rows.append(row)
        print(f"step {step:3}  " + "  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    service.close("success").result()
    return rows


def is_sampled(datum: types.Datum) -> Array:
    return np.array(datum.loss_fn_inputs["logprobs"].data) != 0


def gaps_of(data: list[types.Datum], passed: types.ForwardBackwardOutput) -> list[Array]:
    """The sampler's log-prob less the trainer's, at each sampled token of each datum."""
    gaps = []
    for datum, output in zip(data, passed.loss_fn_outputs, strict=True):
        gap = np.array(datum.loss_fn_inputs["logprobs"].data) - np.array(output["logprobs"].data)
        gaps.append(gap[is_sampled(datum)])
    return gaps


def penalised(
    data: list[types.Datum], gaps: list[Array], coef: float, clip: float
) -> list[types.Datum]:
    """The datums with coef * (mean gap - gap) added to the advantages; gaps are clipped first."""
    clipped = [np.clip(gap, -clip, clip) for gap in gaps]
    mean = np.concatenate(clipped).mean()
    out = []
    for datum, gap in zip(data, clipped, strict=True):
        advantages = np.array(datum.loss_fn_inputs["advantages"].data)
        advantages[is_sampled(datum)] += coef * (mean - gap)
        inputs = {**datum.loss_fn_inputs, "advantages": types.TensorData.from_numpy(advantages)}
        out.append(types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
    return out


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny-gpt-oss")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kl-coef", type=float, default=0.0, help="0 makes one pass a step")
    parser.add_argument("--kl-clip", type=float, default=5.0, help="nats")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asyncio.run(train(parse()))
