"""A tiny agent on the real vocabulary of Qwen3: what the doctor is tried on beside the shipped one.

    python docs/proof/real_vocabulary.py [DIRECTORY]     about five minutes on one core

Softmax over 151,669 ids would take hours to train here. So the model is one of the ids that its
demonstrations contain, and of one more that stands for all others: a policy over the whole
vocabulary that gives most of it no probability. What is sampled are Qwen3's own ids, in its chat
format and its spellings, of a model that thinks, searches and answers. Its architecture is
gpt-oss's, so that it has routers, sinks and a window to get wrong.

Written are a checkpoint over these few ids, and ids.json: the tokenizer's id of each.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "parity"), str(ROOT / "examples")]

from real_tokenizers import directory_of  # noqa: E402  fetched once, checked by its hash
from tiny_models import TINY_SFT as TRAINER  # noqa: E402
from tiny_models import SearchDemonstrationsConfig  # noqa: E402

from lockstep.models.config import ModelConfig  # noqa: E402
from lockstep.models.decoder import Decoder  # noqa: E402
from lockstep.models.hf_io import save_checkpoint  # noqa: E402
from lockstep.models.tiny import SINK_LOGIT, hf_config  # noqa: E402
from lockstep.renderers.config import ChatMLConfig  # noqa: E402
from lockstep.renderers.registry import make_renderer  # noqa: E402
from lockstep.renderers.tokenizer import Tokenizer  # noqa: E402
from lockstep.run.preflight import write_renderer  # noqa: E402
from lockstep.supervised import LooseReplies  # noqa: E402
from lockstep.training.config import SFTConfig  # noqa: E402
from lockstep.training.sft import SFTExample, run_sft, sft_row  # noqa: E402
from lockstep.training.trainer import Trainer  # noqa: E402
from lockstep.types import Message, Sample, frozen_ids  # noqa: E402

DEFAULT = ROOT / ".cache" / "models" / "docsearch-qwen3"
RENDERER = ChatMLConfig(tools_in_prompt=False, has_empty_thinking=False)
STEPS = 860
ROWS_PER_STEP = 32
NUM_DIALOGUES = 8000
IDS = "ids.json"


def ensure() -> Path:
    """The checkpoint's directory; made if it is not there."""
    if not (DEFAULT / "config.json").is_file():
        make(DEFAULT)
    return DEFAULT


def make(directory: Path) -> None:
    """Trains it from random weights. Deterministic on one machine."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(directory_of("qwen3"))
    stages = [list(stage) for stage in demonstrated_rows(tokenizer)]
    said = np.unique(np.concatenate([row.token_ids for rows in stages for row in rows]))
    other = int(np.setdiff1d(np.arange(tokenizer.vocab_size), said)[-1])
    known = np.append(said, other)
    compact = np.full(tokenizer.vocab_size, len(said))
    compact[known] = np.arange(len(known))
    end = tokenizer.control_id("<|im_end|>")
    with tempfile.TemporaryDirectory() as scratch:
        like = Path(scratch) / "like"
        like.mkdir()
        config = hf_config("gpt_oss", len(known), int(compact[end]))
        (like / "config.json").write_text(json.dumps(config, indent=2))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(directory_of("qwen3") / name, like / name)
        small = Decoder(ModelConfig.from_hf(config))
        small.init_weights(std=config["initializer_range"], seed=0)
        with torch.no_grad():
            for block in small.layers:
                block.attention.sinks.fill_(SINK_LOGIT)
        trainer = Trainer(small, TRAINER, like=like, total_updates=STEPS)
        done = 0
        for rows, steps in zip(stages, (round(0.75 * STEPS), STEPS), strict=True):
            short = [replace(row, token_ids=compact_ids(row, compact)) for row in rows]
            sft = SFTConfig(path="demonstrations", steps=steps, rows_per_step=ROWS_PER_STEP)
            for metrics in run_sft(trainer, endless(short, seed=done), sft, first_step=done):
                if metrics["step"] % 100 == 0:
                    print(f"step {metrics['step']:.0f} loss {metrics['train/loss']:.3f}")
            done = steps
        save_checkpoint(small, directory, like=like)
        (directory / IDS).write_text(json.dumps(known.tolist()))
        write_renderer(directory, RENDERER)
    print(f"{len(said)} ids are said, in {sum(map(len, stages))} dialogues: {directory}")


def demonstrated_rows(tokenizer: Tokenizer) -> Iterator[Iterator[Sample]]:
    """The rows of each stage: as `lockstep sft tiny-qwen3` has them, in this vocabulary."""
    loose = tokenizer.with_dropout(0.05, seed=0)
    renderer = LooseReplies(make_renderer(RENDERER, tokenizer), make_renderer(RENDERER, loose))
    stages = SearchDemonstrationsConfig(num_dialogues=NUM_DIALOGUES).stages(0)
    for number, stage in enumerate(stages):
        yield (
            sft_row(
                SFTExample(
                    where=f"stage {number} dialogue {at}",
                    messages=tuple(thinking(message) for message in dialogue),
                    message_weights=(1.0,) * len(dialogue),
                ),
                renderer,
                observed_weight=0.05,
                word_weights=stage.word_weights,
            )
            for at, dialogue in enumerate(stage.dialogues)
        )


def thinking(message: Message) -> Message:
    """An assistant's message with a thought before it; others as they are."""
    if message.role != "assistant":
        return message
    if not message.tool_calls:
        return replace(message, thinking=f"The answer is {message.content}.")
    words = re.findall(r'"([^"]*)"', message.tool_calls[0].arguments)[1:]
    return replace(message, thinking=f"I search for {' and '.join(words)}.")


def compact_ids(row: Sample, compact: np.ndarray):
    return frozen_ids(compact[row.token_ids], where=row.id)


def endless(rows: list[Sample], *, seed: int) -> Iterator[Sample]:
    epoch = 0
    while True:
        for index in np.random.default_rng([seed, epoch]).permutation(len(rows)).tolist():
            yield rows[index]
        epoch += 1


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
