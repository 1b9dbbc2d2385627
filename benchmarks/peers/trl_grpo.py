"""The peer's side of step_vs_trl.py: TRL's GRPOTrainer on our model, task and batch, for the
recipes quickstart and custom, the second with PEFT's LoRA. Tools of custom are for a ChatML model
whose template takes none: both sides show them in the system message, in our renderer's words.

Run by that benchmark in TRL's own virtual environment, with this checkout on PYTHONPATH:

    python benchmarks/peers/trl_grpo.py quickstart model=tiny-qwen3 steps=15

The recipe and the overrides equal our own run's: tasks, batch, sampling and optimizer are read from
its config. Only the torch-free rooms of lockstep are imported (tasks, world, reward, and the
renderer to check against). It makes a step for each line on stdin and answers with a JSON line:
the step's cost, reward and sampled tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import peak_mib

from lockstep.agent.environment import Environment
from lockstep.config import resolve
from lockstep.envs.docsearch.config import INVALID_CALL, DocSearchConfig
from lockstep.objectives.config import PPOClip
from lockstep.recipes import find_recipe
from lockstep.recipes.fitting import configure
from lockstep.renderers.base import Renderer
from lockstep.run.preflight import read_model_files
from lockstep.run_config import Config
from lockstep.types import Message, Task, ToolCall

FORMATS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text().replace("INVALID_CALL", INVALID_CALL)
)
SETTINGS = FORMATS.pop("settings")
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)


class SearchWorld:
    """TRL's environment: our world behind its search tool. Every public method would be a tool."""

    config: Config

    def reset(self, task_id: str, payload: str, **_: Any) -> None:
        task = Task(id=task_id, payload=json.loads(payload))
        self.play = self.config.task.environment(task, self.config.agent)

    def get_document_chunks(self, keywords: list[str]) -> str:
        """Finds the chunks of the documents that match the keywords best.

        Args:
            keywords: Words that the chunks should contain.
        """
        if not isinstance(keywords, list) or not all(isinstance(k, str) for k in keywords):
            raise TypeError("keywords must be a list of texts")
        return self.play.tools[0].function(keywords=keywords)


class Judge:
    """TRL's reward function: our environment's own score, from what TRL kept of the episode."""

    __name__ = "docsearch"

    def __init__(self, renderer: Renderer, opening_ids: list[int]) -> None:
        self.renderer, self.opening_ids = renderer, opening_ids

    async def __call__(
        self,
        *,
        completions: list[list[dict[str, Any]]],
        completion_ids: list[list[int]],
        environments: list[SearchWorld],
        **_: Any,
    ) -> list[float]:
        rewards: list[float] = []
        for messages, ids, world in zip(completions, completion_ids, environments, strict=True):
            replies = [m["content"] for m in messages if m["role"] == "tool"]
            world.play.num_calls = len(replies)
            world.play.num_invalid_calls = sum(r.startswith("{'error'") for r in replies)
            # The last turn is read by our parser, so that both sides take the same turns for an
            # answer; a call that TRL's limit left unanswered is made, as our last one is.
            await world.play.step(self.renderer.parse(last_turn(ids, self.opening_ids)))
            rewards.append((await world.play.score()).reward)
        return rewards


def last_turn(ids: list[int], opening_ids: list[int]) -> list[int]:
    """The tokens after the last opening of a turn."""
    size = len(opening_ids)
    for at in range(len(ids) - size, -1, -1):
        if ids[at : at + size] == opening_ids:
            return ids[at + size :]
    return ids


class AnswerJudge:
    """TRL's reward function for the user's tasks: our environment's own score of the last reply."""

    __name__ = "answer"

    def __init__(self, config: Config, renderer: Renderer, opening_ids: list[int]) -> None:
        self.config, self.renderer, self.opening_ids = config, renderer, opening_ids

    async def __call__(
        self, *, completion_ids: list[list[int]], task_id: list[str], payload: list[str], **_: Any
    ) -> list[float]:
        rewards: list[float] = []
        for ids, id_, fields in zip(completion_ids, task_id, payload, strict=True):
            task = Task(id=id_, payload=json.loads(fields))
            play: Environment = self.config.task.environment(task, self.config.agent)
            await play.reset()
            if ids and ids[-1] in self.renderer.stop_ids:  # else its limit cut it off
                await play.step(self.renderer.parse(last_turn(ids, self.opening_ids)))
            rewards.append((await play.score()).reward)
        return rewards


class Clock(TrainerCallback):
    """Wall and processor time of every step: sampling, tools, reward, update. Answers the line that
    asked for the step."""

    def __init__(self) -> None:
        print("{}", flush=True)
        self._step: dict[str, float] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        sys.stdin.readline()
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, cpu = self._began
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        self._step = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak_mib()}

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            reward, tokens = float(logs["reward"]), float(logs["completions/mean_length"])
            step = self._step | {"reward": reward, "tokens_per_episode": tokens}
            print(json.dumps(step), flush=True)


def check_format(
    tokenizer: Any, renderer: Renderer, first: Sequence[Message], name: str, arguments: str
) -> None:
    """Both sides write a dialogue with a call in the same way."""
    call = Message(role="assistant", tool_calls=(ToolCall(name=name, arguments=arguments),))
    called = renderer.render_reply(call)
    replies = ("The city of Bela is Oslo.", INVALID_CALL)
    for text, content in zip(replies, (replies[0], "{'error': 'not JSON'}"), strict=True):
        ours = renderer.render(first) + called
        ours += renderer.extend(called, [Message(role="tool", name=name, content=text)])
        function = {"name": name, "arguments": json.loads(arguments)}
        messages = [
            *as_dicts(first),
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "name": name, "content": content},
        ]
        check_ids(tokenizer, ours, messages)


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def check_ids(tokenizer: Any, ours: list[int], messages: list[dict[str, Any]]) -> None:
    """Both sides write these messages with the same ids, or nothing is compared."""
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    if ours != theirs:
        raise SystemExit(
            f"the two sides do not write the same ids:\nours   {tokenizer.decode(ours)!r}\n"
            f"theirs {tokenizer.decode(theirs)!r}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--trl", type=json.loads, default={}, help="GRPOConfig fields, as JSON")
    options = parser.parse_args()
    is_own = options.recipe == "custom"
    if is_own:
        config = configure(options.recipe, overrides=options.overrides)
    else:
        config = resolve(find_recipe(options.recipe), options.overrides)
    torch.set_num_threads(config.threads or 1)
    has_task = is_own or isinstance(config.task, DocSearchConfig)
    if not has_task or not isinstance(config.objective, PPOClip):
        raise SystemExit("this peer plays quickstart and custom, with objective=ppo_clip alone")
    parts = own_parts(config) if is_own else search_parts(config)
    train(config, options, **parts)


def rows_of(config: Config, opening: Callable[[Task], Sequence[Message]]) -> list[dict[str, Any]]:
    """A row for each task of the run."""
    num_tasks = config.steps * config.groups_per_step
    return [
        {"prompt": as_dicts(opening(task)), "task_id": task.id, "payload": json.dumps(task.payload)}
        for task in islice(config.task.tasks(split="train", seed=config.seed), num_tasks)
    ]


def load(directory: Path, tokenizer: Any, end_ids: list[int], **kinds: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **kinds)
    model.generation_config.eos_token_id = end_ids
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def turns(config: Config, tokenizer: Any, rows: list[dict[str, Any]], most: int) -> dict[str, Any]:
    """TRL's limits of an episode with tools. One generation comes before its first iteration."""
    longest = max(
        len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"])
        for row in rows
    )
    return {
        "max_completion_length": config.max_tokens - longest,
        "generation_kwargs": {"max_new_tokens": config.agent.max_turn_tokens},
        "max_tool_calling_iterations": most - 1,
    }


def own_parts(config: Config) -> dict[str, Any]:
    """Parts of TRL's trainer for the user's tasks and a pretrained model, with an adapter."""
    from peft import LoraConfig

    model_files = read_model_files(config)
    renderer, lora = model_files.renderer, model_files.lora
    tokenizer: Any = AutoTokenizer.from_pretrained(model_files.directory)
    form, agent, tools = FORMATS["chatml"], config.agent, config.task.functions
    settings: dict[str, Any] = {"max_completion_length": agent.max_turn_tokens}
    opening = config.task.opening
    if tools:
        tokenizer.chat_template = form["chat_template"].replace("user\n<tool_", "tool\n<tool_")
        tokenizer.response_template = form["response_template"]

        def opening(task: Task) -> list[Message]:
            text = tokenizer.decode(renderer.render(config.task.opening(task), tools))
            return [Message(role=each[1], content=each[2]) for each in MESSAGE.finditer(text)]

        first = opening(next(iter(config.task.tasks(split="train", seed=config.seed))))
        check_format(tokenizer, renderer, first, tools[0].name, '{"expression": "1 + 2"}')
    rows = rows_of(config, opening)
    for row in rows[:8]:
        ours = renderer.render([Message(**message) for message in row["prompt"]])
        check_ids(tokenizer, ours, row["prompt"])
    if tools:
        settings = turns(config, tokenizer, rows, agent.max_turns)
    adapter = {} if lora is None else {
        "peft_config": LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
            target_modules=sorted({site.hf_name.rpartition(".")[2] for site in lora.sites}),
        )
    }  # fmt: skip
    end_ids = list(renderer.stop_ids)
    opening_ids = tokenizer.encode(form["opening"], add_special_tokens=False)
    return {
        "settings": settings,
        "model": load(model_files.directory, tokenizer, end_ids, attn_implementation="sdpa"),
        "reward_funcs": AnswerJudge(config, renderer, opening_ids),
        # A fingerprint of its own: datasets 5.2 cannot pickle some builds of pyarrow for one.
        "train_dataset": Dataset(InMemoryTable.from_pylist(rows), fingerprint="own"),
        "processing_class": tokenizer,
        "tools": [each.function for each in tools] or None,
        **adapter,
    }


def search_parts(config: Config) -> dict[str, Any]:
    """Parts of TRL's trainer for document search with a shipped model."""
    model_files, task = read_model_files(config), config.task
    renderer = model_files.renderer
    form = FORMATS[renderer.name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model_files.directory / "tokenizer.json"),
        eos_token=form["end"],
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = form["chat_template"]
    tokenizer.response_template = form["response_template"]
    first = [
        Message(role="developer", content="Search, then answer."),
        Message(role="user", content="What is the city of Bela?"),
    ]
    check_format(
        tokenizer, renderer, first, "get_document_chunks", '{"keywords": ["Bela", "city"]}'
    )
    SearchWorld.config = config
    rows = rows_of(config, lambda one: task.asked(one.payload["question"]))
    # The fastest choice for these models on a CPU: sinks have no sdpa, and grouped or batched
    # experts cost more than the loop over four small ones. A static cache and eager attention for
    # the dense model make no difference; TRL's continuous batching ends no step in a minute there.
    kinds = {"attn_implementation": "sdpa"}
    if model_files.model.is_moe:
        kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
    end_ids = tokenizer.convert_tokens_to_ids(form["stop"])
    opening_ids = tokenizer.encode(form["opening"], add_special_tokens=False)
    return {
        "settings": turns(config, tokenizer, rows, task.max_calls),
        "model": load(model_files.directory, tokenizer, end_ids, **kinds),
        "reward_funcs": Judge(renderer, opening_ids),
        "train_dataset": Dataset(InMemoryTable.from_pylist(rows), fingerprint="search"),
        "processing_class": tokenizer,
        "environment_factory": SearchWorld,
    }


def train(
    config: Config, options: argparse.Namespace, *, settings: dict[str, Any], **parts: Any
) -> None:
    """Runs the steps."""
    trainer, objective = config.trainer, config.objective
    with TemporaryDirectory() as directory:
        settings |= SETTINGS | {
            "output_dir": directory,
            "seed": config.seed,
            "max_steps": config.steps,
            "per_device_train_batch_size": config.groups_per_step * config.group_size,
            "num_generations": config.group_size,
            "temperature": config.agent.temperature,
            "top_k": config.agent.top_k,
            "top_p": config.agent.top_p,
            "epsilon": objective.clip[0],
            "epsilon_high": objective.clip[1],
            "learning_rate": trainer.lr,
            "warmup_steps": trainer.warmup_updates,
            "adam_beta1": trainer.betas[0],
            "adam_beta2": trainer.betas[1],
            "weight_decay": trainer.weight_decay,
            "max_grad_norm": trainer.grad_clip,
        }
        arguments = GRPOConfig(**(settings | options.trl))
        GRPOTrainer(args=arguments, callbacks=[Clock()], **parts).train()


if __name__ == "__main__":
    main()
