"""Two small models for the programs: a student that adds two numbers in some cases, and a teacher
that does in most. Both are the shipped tiny-qwen3, trained whole on the programs' own prompts."""

import json
import random
import shutil
from pathlib import Path

import torch
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from transformers import PreTrainedTokenizerFast

from lockstep.models.hf_io import load_checkpoint, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.ops.context import PackedContext

BASE = "tiny-qwen3"
ROWS, LEARNING_RATE = 128, 2e-3
STUDENT_STEPS, TEACHER_STEPS = 450, 750
MAX_POSITIONS = 4096
LARGEST = 100


class Additions:
    """Rows of the prompt of `math_rl env=arithmetic` and its answer."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
        self._renderer = renderers.get_renderer("qwen3", self._tokenizer)
        self._random = random.Random(seed)

    def row(self) -> tuple[list[int], list[int]]:
        x, y = (self._random.randint(0, LARGEST) for _ in range(2))
        question = {"role": "user", "content": f"What is {x} + {y}?"}
        messages = [*ArithmeticEnv.standard_fewshot_prefix(), question]
        prompt = self._renderer.build_generation_prompt(messages).to_ints()
        answer = self._tokenizer.encode(str(x + y), add_special_tokens=False)
        return prompt, [*answer, self._renderer.get_stop_sequences()[0]]


def train(student: Path, teacher: Path) -> None:
    """Writes both models."""
    base = locate_model(BASE)
    additions, model = Additions(base), load_checkpoint(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    for step in range(1, TEACHER_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 100)
        ids, positions, lengths, predictors, targets = [], [], [], [], []
        for prompt, answer in (additions.row() for _ in range(ROWS)):
            predictors += range(len(ids) + len(prompt) - 1, len(ids) + len(prompt + answer) - 1)
            targets += answer
            lengths.append(len(prompt + answer) - 1)
            ids += [*prompt, *answer][:-1]
            positions += range(lengths[-1])
        context = PackedContext.of(lengths)
        hidden = model(torch.tensor(ids), torch.tensor(positions), context)
        logits = model.logits(hidden[torch.tensor(predictors)])
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in (STUDENT_STEPS, TEACHER_STEPS):
            _save(model, student if step == STUDENT_STEPS else teacher, base)


def _save(model: torch.nn.Module, directory: Path, base: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    save_checkpoint(model, directory, like=base)
    shutil.copy(base / "renderer.json", directory)
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = MAX_POSITIONS  # rl_numerics_check reads many pages
    (directory / "config.json").write_text(json.dumps(config))
