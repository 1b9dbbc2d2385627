"""TRL's own GRPOTrainer with Lockstep's decoder on both sides: the gap of every step.

    python docs/proof/trl_equal.py --packages DIR [--steps 50] [--json FILE]
    python docs/proof/trl_equal.py --packages DIR --model smollm2-135m --steps 5
    python docs/proof/trl_equal.py --packages DIR --curves --model smollm2-135m [--json FILE]

It trains a small random model on prompts of unlike lengths, without an adapter and with PEFT's
LoRA, in micro-batches that are padded on both sides. --model takes any other model that Lockstep
reads. Each line has the tokens that were compared, the tokens whose two log-probs differ in a bit,
and the largest KL of a step. --curves trains beside TRL alone, on the same seeds. DIR has TRL:

    pip install --target DIR --no-deps trl==1.16.0 datasets dill multiprocess xxhash pandas httpx \\
        pyarrow
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHARACTERS = [chr(code) for code in range(32, 127)]
GAP = ("compared_tokens", "unequal_tokens", "largest_kl")
PROMPTS = ["2 + 2?", "What is the name of Sara's cat?", "Go", "Write seven digits, please: "]


def tokenizer() -> Any:
    """A character an id, so that every text has its ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    out = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    out.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    out.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=out, pad_token="<pad>", eos_token="<eos>")


def write_small_model(directory: Path) -> Path:
    """A random Qwen3 of two layers, whose replies end soon, or late."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(CHARACTERS) + 2, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        initializer_range=0.1, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    # transformers begins with a pad id of zeros, of which a norm makes gradients of thousands, and
    # gives its row none; the decoder gives it what the loss says.
    model.model.embed_tokens.weight.data[0].normal_(std=config.initializer_range)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def share_of_digits(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(c.isdigit() for c in text) / (len(text) or 1) for text in texts]


def make_trainer(
    source: str | Path, out: str | Path, *, lora: bool = False, base: str = "GRPOTrainer",
    settings: dict[str, Any] | None = None, is_alone: bool = False, **parts: Any,
) -> Any:  # fmt: skip
    """A trainer of TRL with the mixin, the decoder and the engine. settings: its config. parts:
    its arguments. is_alone: with none of the three."""
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lockstep.integrations.causal_lm import LockstepForCausalLM
    from lockstep.integrations.trl import LockstepMixin, Sampler
    from lockstep.models.locate import locate_model

    directory = locate_model(str(source))
    if is_alone:
        kind, model = getattr(trl, base), AutoModelForCausalLM.from_pretrained(directory)
        ours = {}
    else:
        kind = type("Trainer", (LockstepMixin, getattr(trl, base)), {})
        model = LockstepForCausalLM.from_pretrained(source)
        watch = {"max_share": 1000, "on_cause": "raise"}
        ours = {"sampler": Sampler(), "strict": True, "watch": watch}
    adapter = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules="all-linear")
    prompts = InMemoryTable.from_pylist([{"prompt": prompt} for prompt in PROMPTS * 4])
    arguments = {
        "output_dir": str(out), "num_generations": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4, "max_completion_length": 24, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False,
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return kind(**{
        "model": model,
        "args": getattr(trl, base.replace("Trainer", "Config"))(**arguments | (settings or {})),
        "processing_class": AutoTokenizer.from_pretrained(directory),
        "reward_funcs": [share_of_digits],
        # A fingerprint of its own: datasets 5.2 cannot pickle some builds of pyarrow for one.
        "train_dataset": Dataset(prompts, fingerprint="prompts"),
        "peft_config": adapter if lora else None,
    } | ours | parts)  # fmt: skip


def gap_of(trainer: Any) -> dict[str, Any]:
    """Sums over the steps that a trainer has logged."""
    rows = [row for row in trainer.state.log_history if "mismatch/compared_tokens" in row]
    return {
        "steps": len(rows),
        "compared_tokens": int(sum(row["mismatch/compared_tokens"] for row in rows)),
        "unequal_tokens": int(sum(row["mismatch/unequal_tokens"] for row in rows)),
        "largest_kl": max(row["mismatch/k3"] for row in rows),
        "largest_difference": max(row["mismatch/max_abs_diff"] for row in rows),
        "reward": [round(rows[at]["reward"], 4) for at in (0, -1)],
        "reply_tokens": [
            round(pick(row[f"completions/{end}_length"] for row in rows), 1)
            for end, pick in (("min", min), ("max", max))
        ],
    }


def measured(model: str, steps: int, *, lora: bool) -> dict[str, Any]:
    with TemporaryDirectory() as place:
        directory = model or write_small_model(Path(place) / "model")
        trainer = make_trainer(
            directory, Path(place) / "out", lora=lora, settings={"max_steps": steps}
        )
        trainer.train()
        line = trainer.accelerator.unwrap_model(trainer.model).numerics.line
        return {"lora": lora, **gap_of(trainer), "contract": line.partition(";")[0]}


class Clock:
    """A callback: processor seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self._began)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


def curve(model: str, steps: int, seed: int, *, is_alone: bool) -> dict[str, Any]:
    """Reward and processor seconds of each step, and the gap where there is one."""
    with TemporaryDirectory() as place:
        settings = {"max_steps": steps, "seed": seed}
        settings |= {"gradient_accumulation_steps": 2, "max_completion_length": 16}
        trainer = make_trainer(model, place, settings=settings, is_alone=is_alone, lora=True)
        trainer.add_callback(clock := Clock())
        trainer.train()
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        return {
            "side": "TRL" if is_alone else "TRL with Lockstep",
            "seed": seed,
            "rewards": [round(reward, 4) for reward in rewards],
            "cpu_seconds": round(statistics.median(clock.seconds), 3),
            **({} if is_alone else {k: gap_of(trainer)[k] for k in GAP}),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", default="", help="a folder that has TRL for this Python")
    parser.add_argument("--model", default="", help="in place of the small random model")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", default="", help="a file for the result")
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    runs: list[dict[str, Any]] = []
    if options.curves:
        works = [
            partial(curve, options.model, options.steps, seed, is_alone=is_alone)
            for seed, is_alone in product(options.seeds, (True, False))
        ]
    else:
        works = [partial(measured, options.model, options.steps, lora=n) for n in (False, True)]
    for work in works:
        runs.append(work())
        print(json.dumps(runs[-1]), flush=True)
    names = ("trl", "transformers", "peft", "torch")
    versions = {name: importlib.metadata.version(name) for name in names}
    if options.json:
        from run import stamp

        command = "python docs/proof/trl_equal.py --packages DIR"
        if options.curves:
            command += f" --curves --model {options.model} --steps {options.steps}"
        result = stamp(command) | {"model": options.model or "random Qwen3, 2 layers"}
        result |= {"runs": runs, "versions": versions}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    if any(run.get("unequal_tokens") or run.get("largest_kl") for run in runs):
        raise SystemExit("the two sides differ")


if __name__ == "__main__":
    main()
