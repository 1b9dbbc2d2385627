"""GGUF files as transformers itself reads them, and their token ids as llama.cpp has them."""

import json
import random
import urllib.request

import pytest

pytest.importorskip("gguf", reason="pip install 'lockstep-rl[gguf]'")
pytest.importorskip("accelerate", reason="pip install 'lockstep-rl[gguf]'")

import torch
from gguf_files import write_gguf
from tokenizers import Tokenizer as FastTokenizer

from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.ops.context import PackedContext
from lockstep.run.preflight import read_model_files
from lockstep.run_config import ModelChoice
from lockstep.types import Message

transformers = pytest.importorskip("transformers", reason="pip install 'lockstep-rl[gguf]'")

PIECES = (
    *("a", "B", "\u00e9", " ", "  ", "\n", "1", "12", "123", "hello", " hello", "'s", "'LL", "!"),
    *("\u4e2d\u6587", "?!", "_", " wo", "\r\n", "\u00bd", "  12"),
)


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "kept"))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits_are_those_of_transformers_on_the_same_file(kind, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    ours = load_checkpoint(locate_model(str(path)))
    ids = torch.randint(0, ours.config.vocab_size, (48,), generator=torch.manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        found = ours.logits(ours(ids, torch.arange(48), PackedContext.of([48])))
    # Two programs in float32: the limit of tests/parity/test_decoder_parity.py.
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_prompt_has_the_ids_of_transformers_by_the_files_template(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    renderer = read_model_files(ModelChoice(model=str(path), max_tokens=64)).renderer
    theirs = transformers.AutoTokenizer.from_pretrained(locate_model(str(path)))
    dialogue = [{"role": "user", "content": "hello 12"}]
    expected = theirs.apply_chat_template(dialogue, add_generation_prompt=True, return_dict=False)
    assert renderer.render([Message(role="user", content="hello 12")]) == list(expected)


@pytest.mark.parametrize("split", ["smollm", "gpt-2", "qwen2", "llama-bpe", "tekken"])
def test_ids_are_those_of_llama_cpp(split, tmp_path):
    llama = pytest.importorskip("xllamacpp", reason="pip install xllamacpp (llama.cpp, built)")
    path = write_gguf(tmp_path / "tiny.gguf", kind="F32", split=split)
    ours = FastTokenizer.from_file(str(locate_model(str(path)) / "tokenizer.json"))
    settings = llama.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup = str(path), 64, False
    server = llama.Server(settings)
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 30)))
        asked = json.dumps({"content": text, "add_special": False}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", asked)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            theirs = json.load(answer)["tokens"]
        assert ours.encode(text, add_special_tokens=False).ids == theirs, text
