"""The investigation that the doctor automates, on the quickstart's agent: before and after.

    python docs/proof/investigation.py           about 20 seconds; writes investigation.json

A published program kept a dialogue as messages, rendered it anew before each turn, took the row
from the last prompt (so that the last reply was missing from it), and laid all log-probs at the
place where it believed the replies to begin. Its KL was 4 to 7, and its re-rendered first turn kept
6.7 % of its tokens. Here the same program plays with our model, engine and environment, and so does
Lockstep's own loop; `doctor --ladder` finds the rung on which they part. Means over three seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
from run import configured, save, stamp

from lockstep.agent.tasks import derive_seed
from lockstep.doctor.ladder import climb
from lockstep.doctor.rows import Rows
from lockstep.run.build import Parts, build
from lockstep.run.preflight import preflight
from lockstep.run_config import Config
from lockstep.types import Int32Array, Message, Request, Sample, SamplingParams, Task

SEEDS = (0, 1, 2)
MODELS = ("tiny-gpt-oss", "tiny-qwen3")
NUM_EPISODES = 32
FORCED = -0.01  # the investigation's own limit: a token above it was as good as certain


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One episode of the published program."""

    row: Sample
    num_same: int
    """Tokens of the first turn that stand in the row where they were sampled."""
    prompts: Sequence[Int32Array]
    """The ids that the engine was sent, by turn."""
    replies: Sequence[Int32Array]
    messages: Sequence[Message]
    """The dialogue, with its last turn."""


async def play_by_messages(config: Config, parts: Parts, task: Task) -> Episode:
    renderer, tokenizer = parts.renderer, parts.renderer.tokenizer
    environment = config.task.environment(task, config.agent)
    history = list(await environment.reset())
    all_tokens = renderer.render(history, environment.tools)
    first_prompt = len(all_tokens)
    prompts: list[Int32Array] = []
    replies: list[Int32Array] = []
    logprobs: list[float] = []
    for turn in range(config.agent.max_turns):
        prompt = renderer.render(history, environment.tools)
        request = Request(
            id=f"{task.id}/{turn}",
            prompt_ids=np.asarray(prompt, np.int32),
            sampling=SamplingParams(
                max_tokens=min(config.agent.max_turn_tokens, config.max_tokens - len(prompt)),
                temperature=config.agent.temperature,
                stop_ids=renderer.stop_ids,
            ),
            seed=derive_seed(config.seed, task.id, turn),
        )
        ids: list[int] = []
        async for delta in parts.engine.generate(request):
            ids += delta.token_ids.tolist()
            logprobs += delta.logprobs.tolist()
        prompts.append(request.prompt_ids)
        replies.append(np.asarray(ids, np.int32))
        observation = await environment.step(renderer.parse(ids))
        history.append(Message(role="assistant", content=tokenizer.decode(ids)))
        history += observation.messages
        if observation.done:
            break
        following = renderer.render(history, environment.tools)
        if len(following) >= config.max_tokens:
            break
        all_tokens = following
    await environment.close()
    prompt_len = len(all_tokens) - sum(map(len, replies))
    laid = np.full(len(all_tokens), np.nan, np.float32)
    places = range(max(prompt_len, 1), len(all_tokens))
    for place, value in zip(places, logprobs, strict=False):
        laid[place] = value
    mask = np.isfinite(laid)
    row = Sample(
        id=task.id,
        token_ids=np.asarray(all_tokens, np.int32),
        loss_mask=mask,
        columns={"rollout_logprobs": laid, "turn": np.where(mask, 0, -1).astype(np.int32)},
    )
    stands = all_tokens[first_prompt : first_prompt + len(replies[0])]
    return Episode(
        row=row,
        num_same=sum(a == b for a, b in zip(stands, replies[0].tolist(), strict=False)),
        prompts=prompts,
        replies=replies,
        messages=history,
    )


async def by_messages(config: Config, parts: Parts, num_episodes: int) -> dict[str, float]:
    """The gap of the published program's rows. Its episodes run side by side."""
    tasks = config.task.tasks(split="train", seed=config.seed).take(num_episodes)
    played = await asyncio.gather(*(play_by_messages(config, parts, task) for task in tasks))
    await parts.engine.close()
    samples = [episode.row for episode in played if episode.row.num_trained]
    trainer = np.concatenate(parts.trainer.forward(samples, column=None))
    rows = Rows.of(samples, trainer_logprobs=trainer)
    gap = rows.gap
    assert rows.rollout_logprobs is not None, "the rows have them"
    unforced = gap[np.isfinite(gap) & (rows.rollout_logprobs < FORCED)]
    compared = gap[np.isfinite(gap)]
    # A program that ends after one reply never adds it.
    rendered = [episode for episode in played if len(episode.row) > len(episode.prompts[0])]
    return {
        "k1": float(-compared.mean()),
        "k2": float(0.5 * (compared**2).mean()),
        "k1_unforced": float(-unforced.mean()),
        "k2_unforced": float(0.5 * (unforced**2).mean()),
        "match": sum(e.num_same for e in rendered) / sum(len(e.replies[0]) for e in rendered),
    }


def investigate(model: str, seed: int) -> dict[str, Any]:
    config = configured(f"model={model}", f"seed={seed}", "contract=none")
    model_files = preflight(config)
    ladder = climb(config, num_episodes=NUM_EPISODES)
    rungs = {r.name: {**r.gap.means(), "match": r.match} for r in ladder.rungs}
    before = asyncio.run(by_messages(config, build(config, model_files), NUM_EPISODES))
    return {"rungs": rungs | {"by messages, as published": before}, "verdict": ladder.verdict}


def average(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(f"{mean(row[name] for row in found):.4g}") for name in found[0]}


def main() -> None:
    models: dict[str, Any] = {}
    for model in MODELS:
        found = [investigate(model, seed) for seed in SEEDS]
        rungs = {name: average([f["rungs"][name] for f in found]) for name in found[0]["rungs"]}
        models[model] = {"rungs": rungs, "verdicts": [f["verdict"] for f in found]}
        for name, rung in rungs.items():
            print(f"{model:13} {name:30} k1 {rung['k1']:9.2e}  k2 {rung['k2']:8.1e}  "
                  f"match {rung['match']:.1%}")  # fmt: skip
    document = {
        **stamp("python docs/proof/investigation.py"),
        "seeds": len(SEEDS),
        "episodes": NUM_EPISODES,
        "models": models,
    }
    save("investigation", document)


if __name__ == "__main__":
    main()
