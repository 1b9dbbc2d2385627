"""Makes the tiny models that are shipped: a tokenizer for the task, and random weights.

The tokenizer is byte-level BPE trained on demonstrations. Protocol strings (the call header, the
opening of the arguments) are single tokens and can be spelt in many longer ways. So decoding a
sampled turn and encoding it again gives other ids, as in large models whose vocabulary has
`<think>` whole and in pieces. Each digit is a token, as in Qwen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from lockstep.config import to_dict
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import save_checkpoint
from lockstep.models.locate import SHIPPED_ROOT
from lockstep.renderers.base import dialogue_pieces
from lockstep.renderers.chatml import CHATML_TOKENS, THINKING_TOKENS
from lockstep.renderers.config import RendererConfig
from lockstep.renderers.harmony import HARMONY_TOKENS
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.types import Message

TOKENIZER_CONFIG = "tokenizer_config.json"
VOCAB_SIZE = 640  # an upper bound: the demonstrations yield fewer merges

PAD_TOKEN = "<|endoftext|>"
CONTROL_TOKENS: dict[str, tuple[str, ...]] = {
    "gpt_oss": (PAD_TOKEN, *HARMONY_TOKENS),
    "qwen3": (PAD_TOKEN, *CHATML_TOKENS, *THINKING_TOKENS),
}
CONTROL_TOKENS["qwen3_next"] = CONTROL_TOKENS["qwen3"]

SINK_LOGIT = 2.0  # exp(2) = 7 keys' worth: training then leaves the sinks a share that matters

PROTOCOL = (
    r"commentary to=functions\.\w+ |functions\.\w+ to=assistant"
    r'|\{"[a-z]+": \[?"|\n\{"name": "\w+", "arguments": \{"[a-z]+": \[?"'
)
"""Strings that the pre-tokenizer does not split, so that merges can make them one token: the call
header, and the opening of arguments whose first is a text or a list of texts."""


def create_tiny_model(
    architecture: str,
    directory: Path,
    dialogues: Iterable[Sequence[Message]],
    *,
    renderer: RendererConfig,
    seed: int,
) -> None:
    """Writes config.json, the tokenizer's files and random weights: a checkpoint to train from.

    dialogues: rendered by `renderer`, they are the text that the tokenizer is trained on.
    Deterministic.
    """
    tokenizer = train_tokenizer(architecture, dialogues, renderer)
    told = json.loads((_shipped(architecture) / TOKENIZER_CONFIG).read_text())
    end = tokenizer.token_to_id(told["eos_token"])
    hf = hf_config(architecture, tokenizer.get_vocab_size(), end)
    model = Decoder(ModelConfig.from_hf(hf))
    model.init_weights(std=hf["initializer_range"], seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(SINK_LOGIT)
    with TemporaryDirectory() as like:
        (Path(like) / "tokenizer.json").write_text(tokenizer.to_str(pretty=False))
        (Path(like) / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        write_tokenizer_config(architecture, Path(like), renderer)
        save_checkpoint(model, directory, like=like)


def write_tokenizer_config(architecture: str, directory: Path, renderer: RendererConfig) -> None:
    """Writes what transformers needs to read tokenizer.json as it is: without the file it makes the
    tokenizer of the architecture anew, with another split of the text. With the renderer of the
    shipped model of this architecture, writes its chat template too."""
    shipped = _shipped(architecture)
    shutil.copyfile(shipped / TOKENIZER_CONFIG, directory / TOKENIZER_CONFIG)
    of_shipped = json.loads((shipped / "renderer.json").read_text())["renderer"]
    if {**of_shipped, **to_dict(renderer)} == of_shipped:
        shutil.copyfile(shipped / "chat_template.jinja", directory / "chat_template.jinja")


def hf_config(architecture: str, vocab_size: int, eos_token_id: int | None) -> dict[str, Any]:
    """The Hugging Face config of the shipped model of this architecture, for another vocabulary."""
    of_shipped = json.loads((_shipped(architecture) / "config.json").read_text())
    return of_shipped | {"vocab_size": vocab_size, "eos_token_id": eos_token_id}


def _shipped(architecture: str) -> Path:
    return SHIPPED_ROOT / f"tiny-{architecture.replace('_', '-')}"


def train_tokenizer(
    architecture: str, dialogues: Iterable[Sequence[Message]], renderer: RendererConfig
) -> FastTokenizer:
    """Byte-level BPE on the text that `renderer` encodes for `dialogues`."""
    fast = FastTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(f"{PROTOCOL}| ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    fast.decoder = decoders.ByteLevel()
    control = CONTROL_TOKENS[architecture]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(control),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(_texts(control, dialogues, renderer), trainer)
    fast.add_special_tokens(list(control))
    return fast


def _texts(
    control: Sequence[str], dialogues: Iterable[Sequence[Message]], config: RendererConfig
) -> list[str]:
    """Every piece of text that the renderer encodes, by a tokenizer of bytes that keeps them."""
    seen: list[str] = []

    def remember(text: str) -> list[int]:
        seen.append(text)
        return list(text.encode())

    recorder = Tokenizer(
        remember,
        text_tokens={i: bytes([i]) for i in range(256)},
        control_tokens={name: 256 + i for i, name in enumerate(control)},
        where="recorder",
    )
    renderer = make_renderer(config, recorder)
    seen.clear()
    for dialogue in dialogues:
        for _ in dialogue_pieces(renderer, dialogue):
            pass
    return seen
