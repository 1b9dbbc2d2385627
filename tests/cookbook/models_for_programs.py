"""Three small models for the programs: a student that does what they ask for in some cases, a
teacher that adds two numbers in most, and a reader that calls a tool for thirty turns. All are the
shipped tiny-qwen3, trained whole on prompts that the programs' own code makes."""

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.recipes.rl_numerics_check import env as counting
from transformers import AutoTokenizer

from lockstep.models.hf_io import load_checkpoint, save_checkpoint
from lockstep.models.locate import locate_model
from lockstep.ops.context import PackedContext

BASE = "tiny-qwen3"
ROWS, LEARNING_RATE, WARMUP_STEPS = 128, 2e-3, 100
STUDENT_STEPS, TEACHER_STEPS = 480, 700
READER_STEPS, READER_LEARNING_RATE = 350, 4e-3
"""The reader continues from the student, on its own prompts alone, and its rate falls to 0 in the
second half."""
BOXED_STEPS, BOXED_ROWS = range(240, STUDENT_STEPS + 1), 8
"""Steps with rows of rl_loop's prompts beside the additions."""
MAX_POSITIONS = 6144
LARGEST = 100
READ_TURNS = 20
BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = [
    {"role": "user", "content": "How many r's are in strawberry?" + BOXED},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w "
        "6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
"""The example in the prompts of rl_loop."""
CALL = '<tool_call>\n{"name": "read_page", "arguments": {"page": 1}}\n</tool_call>'

Row = tuple[list[int], list[int]]
"""Ids, and the places that are predicted."""


class Prompts:
    """Rows in the prompts of `math_rl env=arithmetic`, `rl_loop` and `rl_numerics_check`."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(directory))  # as the programs load it
        self._qwen = renderers.get_renderer("qwen3", self.tokenizer)
        self._reader = renderers.get_renderer("qwen3_instruct", self.tokenizer)
        self._random = random.Random(0)

    def addition(self, *, is_boxed: bool = False) -> Row:
        x, y = (self._random.randint(0, LARGEST) for _ in range(2))
        asked = {"role": "user", "content": f"What is {x} + {y}?" + (BOXED if is_boxed else "")}
        before = EXAMPLE if is_boxed else ArithmeticEnv.standard_fewshot_prefix()
        prompt = self._qwen.build_generation_prompt([*before, asked]).to_ints()
        reply = self._reply(self._qwen, f"\\boxed{{{x + y}}}" if is_boxed else f"{x + y}")
        return prompt + reply, list(range(len(prompt), len(prompt + reply)))

    def reading(self, corpus: str) -> Row:
        """The first turns of an episode in which each reply reads a page."""
        task = counting.CountingTaskConfig(num_pages_min=28, num_pages_max=32, page_chars=40)
        problem = counting.sample_problem(self._random, corpus, task)
        environment = counting.build_env(problem, self._reader, task, None, None)
        ids, places = list[int](), list[int]()

        async def play() -> None:
            observed = (await environment.initial_observation())[0].to_ints()
            reply = self._reply(self._reader, CALL)
            # As the renderer writes it in later prompts, so that each turn extends the last.
            seen = (await environment.step(reply)).next_observation.to_ints()[len(observed) :]
            call = seen[: seen.index(reply[-1]) + 1]
            for _ in range(self._random.randint(1, READ_TURNS)):
                places.extend(range(len(observed), len(observed + call)))
                ids[:] = observed + call
                observed = (await environment.step(call)).next_observation.to_ints()
                assert observed[: len(ids)] == ids

        asyncio.run(play())
        return ids, places

    def _reply(self, renderer: renderers.Renderer, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, renderer.get_stop_sequences()[0]]


def additions(prompts: Prompts) -> Iterator[list[Row]]:
    """The rows of each step."""
    for step in range(1, TEACHER_STEPS + 1):
        boxed = BOXED_ROWS if step in BOXED_STEPS else 0
        yield [prompts.addition(is_boxed=row < boxed) for row in range(boxed + ROWS)]


def write_all(student: Path, teacher: Path, reader: Path, corpus: str) -> None:
    """Trains the models and writes them. corpus: text of the reader's pages."""
    for directory in (student, teacher, reader):
        shutil.copytree(locate_model(BASE), directory)
        config = json.loads((directory / "config.json").read_text())
        config["max_position_embeddings"] = MAX_POSITIONS
        (directory / "config.json").write_text(json.dumps(config))
    prompts, model = Prompts(student), load_checkpoint(student)
    rates = (LEARNING_RATE * min(1.0, step / WARMUP_STEPS) for step in range(1, TEACHER_STEPS + 1))
    for step in train(model, additions(prompts), rates):
        if step == STUDENT_STEPS:
            _save(model, student)
    _save(model, teacher)
    model = load_checkpoint(student)
    left = range(READER_STEPS, 0, -1)
    rates = (READER_LEARNING_RATE * min(1.0, 2 * steps / READER_STEPS) for steps in left)
    for _ in train(model, ([prompts.reading(corpus)] for _ in left), rates):
        pass
    _save(model, reader)


def train(
    model: torch.nn.Module, steps: Iterable[list[Row]], rates: Iterable[float]
) -> Iterator[int]:
    """Trains on the rows of each step at its learning rate; gives the number of each step done."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    for step, (rows, rate) in enumerate(zip(steps, rates, strict=True), start=1):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step


def loss_of(model: torch.nn.Module, rows: list[Row]) -> torch.Tensor:
    ids, positions, predictors, targets = [], [], [], []
    for row, places in rows:
        predictors += [len(ids) + place - 1 for place in places]
        targets += [row[place] for place in places]
        ids += row
        positions += range(len(row))
    context = PackedContext.of([len(row) for row, _ in rows])
    hidden = model(torch.tensor(ids), torch.tensor(positions), context)
    logits = model.logits(hidden[torch.tensor(predictors)])
    return torch.nn.functional.cross_entropy(logits, torch.tensor(targets))


def _save(model: torch.nn.Module, directory: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        save_checkpoint(model, Path(place) / "model", like=directory)
        shutil.copy(Path(place) / "model" / "model.safetensors", directory)
