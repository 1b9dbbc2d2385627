"""A program for Tinker's API: multi-turn document search, on a server of Lockstep or any other.

    lockstep serve tiny-gpt-oss --api tinker          # prints what to export
    python examples/tinker_docsearch.py --steps 30

The client writes the loop and rents the numerics: it samples each turn on the ids so far, plays the
tools, and sends back the ids and log-probs that it was given. Document worlds and the format of the
messages are those of `lockstep train quickstart`.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker
from tinker import types

from lockstep.agent.environment import Environment
from lockstep.recipes import find_recipe
from lockstep.renderers.base import Renderer
from lockstep.run.preflight import read_model_files
from lockstep.run_config import Config
from lockstep.types import Task


@dataclass
class Episode:
    """What was fed and drawn, in order; observed ids have log-prob 0 and no advantage."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    reward: float = 0.0

    def add(self, ids: list[int], logprobs: list[float] | None = None) -> None:
        self.ids += ids
        self.logprobs += logprobs or [0.0] * len(ids)
        self.is_sampled += [logprobs is not None] * len(ids)

    def datum(self, advantage: float) -> types.Datum:
        """Position i predicts token i + 1: everything that belongs to a token moves one place."""
        mask = np.array(self.is_sampled[1:])
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": self.ids[1:],
                "logprobs": self.logprobs[1:],
                "advantages": (mask * advantage).tolist(),
            },
        )


async def play(
    sampler: tinker.SamplingClient, renderer: Renderer, environment: Environment, limits: Config
) -> Episode:
    """One episode: token in, token out."""
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
    episode.reward = (await environment.score()).reward
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
        passed = trainer.forward_backward(data, "importance_sampling")
        updated = trainer.optim_step(types.AdamParams(learning_rate=options.lr))
        found = await passed
        await updated
        kl = kl_of(data, [output["logprobs"].data for output in found.loss_fn_outputs])
        rows.append({"reward": float(rewards.mean()), "kl_v1": kl[0], "kl_v2": kl[1]})
        print(f"step {step:3}  reward {rewards.mean():.3f}  KL v1 {kl[0]:.1e}  v2 {kl[1]:.1e}")
    service.close("success").result()
    return rows


def kl_of(data: list[types.Datum], trained: list[Any]) -> tuple[float, float]:
    """(mean of d, mean of d^2 / 2) with d = the sampler's log-prob less the trainer's, over all
    sampled tokens."""
    gaps = []
    for datum, logprobs in zip(data, trained, strict=True):
        sampled = np.array(datum.loss_fn_inputs["logprobs"].data)
        mask = np.array(datum.loss_fn_inputs["advantages"].data) != 0
        gaps.append((sampled - np.array(logprobs))[mask])
    gap = np.concatenate(gaps)
    return float(gap.mean()), float((gap**2).mean() / 2)


def main() -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny-gpt-oss")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
