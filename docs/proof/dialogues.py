"""The proof of the renderers: random dialogues and hostile texts, on the tokenizers of real models.

    python docs/proof/dialogues.py                 everything (about 5 minutes on two quiet cores)
    python docs/proof/dialogues.py jinja llama3    the rows whose names hold one of these words
    python docs/proof/dialogues.py --count 200     fewer than 10,000 of each

Each row plays 10,000 random dialogues through the agent loop (`tests/random_dialogues.py`), which
raises at the first one that breaks an invariant. Each tokenizer encodes 10,000 texts that spell its
control tokens. The figures are written to dialogues.json beside this file, rows that were not run
as they stand.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import unicodedata
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from run import ROOT, save, stamp

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "parity")]
from random_dialogues import check_dialogues, hostile_text  # noqa: E402
from real_tokenizers import NAMES, o200k_harmony, tokenizer_of  # noqa: E402  fetched once, checked by their hashes

from lockstep.renderers.config import (  # noqa: E402
    ChatMLConfig,
    HarmonyConfig,
    JinjaConfig,
    Llama3Config,
    RendererConfig,
)
from lockstep.renderers.registry import make_renderer  # noqa: E402
from lockstep.renderers.tokenizer import Tokenizer  # noqa: E402
from lockstep.testing.tokenizers import byte_tokenizer  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
COUNT = 10_000

ROWS: dict[str, tuple[str, RendererConfig]] = {
    "harmony": ("o200k_harmony", HarmonyConfig()),
    "harmony, thinking=drop": ("o200k_harmony", HarmonyConfig(thinking="drop")),
    "chatml": ("qwen3", ChatMLConfig()),
    "chatml, thinking=drop": ("qwen3", ChatMLConfig(thinking="drop")),
    "chatml, enable_thinking=false": ("qwen3", ChatMLConfig(enable_thinking=False)),
    "chatml, variant=qwen2.5": ("qwen2_5", ChatMLConfig(variant="qwen2.5")),
    "llama3": ("llama3_2", Llama3Config()),
    "llama3, as text, without dates": (
        "llama3_2",
        Llama3Config(tool_replies="text", current_date="", tools_in_user_message=False),
    ),
    **{f"jinja, {name}": (name, JinjaConfig()) for name in NAMES},
    "jinja, qwen3, thinking=drop": ("qwen3", JinjaConfig(thinking="drop")),
    "harmony on bytes": ("bytes", HarmonyConfig()),
    "chatml on bytes": ("bytes", ChatMLConfig()),
}
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    **{name: lambda name=name: tokenizer_of(name) for name in NAMES},
    "o200k_harmony": o200k_harmony,
    "bytes": byte_tokenizer,
}


def play(row: tuple[str, RendererConfig], count: int) -> dict[str, Any]:
    """One row: what was played, all of it keeping the invariants."""
    tokenizer, config = row
    renderer = make_renderer(config, TOKENIZERS[tokenizer]())
    started = time.process_time()
    counts = check_dialogues(renderer, num_dialogues=count, seed=0)
    seconds = time.process_time() - started
    return {"tokenizer": tokenizer, **counts, "cpu_seconds": round(seconds, 1)}


def inject(name: str, count: int) -> dict[str, int]:
    """Hostile texts: how many gave a control token, or not their own bytes back."""
    tokenizer = TOKENIZERS[name]()
    generator = random.Random(0)
    texts = [hostile_text(tokenizer, generator) for _ in range(count)]
    injected = changed = num_ids = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        num_ids += len(ids)
        injected += sum(id_ in tokenizer.control_ids for id_ in ids)
        changed += not is_kept(text, tokenizer.decode_bytes(ids))
    return {
        "control_names": len(tokenizer.control_ids),
        "hostile_texts": count,
        "tokens": num_ids,
        "control_tokens_given": injected,
        "texts_changed": changed,
    }


def is_kept(text: str, found: bytes) -> bool:
    """Whether `found` is the text: as it is, or as Qwen and Gemma write it by design."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    forms = (text, unicodedata.normalize("NFC", text), text.replace("\u2581", " "))
    return found in [form.encode() for form in forms]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()

    def is_asked(name: str) -> bool:
        return not asked.words or any(word in name for word in asked.words)

    out: dict[str, Any] = {"dialogues": {}, "injections": {}}
    if RESULTS.is_file() and asked.words:
        out |= json.loads(RESULTS.read_text())
    jobs: list[tuple[str, str, Callable[..., dict[str, Any]], Any]] = [
        *(("dialogues", name, play, row) for name, row in ROWS.items() if is_asked(name)),
        *(("injections", name, inject, name) for name in TOKENIZERS if is_asked(name)),
    ]
    with ProcessPoolExecutor(asked.processes) as pool:
        results = {
            pool.submit(run, subject, asked.count): (part, name)
            for part, name, run, subject in jobs
        }
        for done in as_completed(results):
            part, name = results[done]
            out[part][name] = done.result()
            print(f"{part}, {name}:", json.dumps(out[part][name]), flush=True)
    for part in ("dialogues", "injections"):
        order = [name for kind, name, *_ in jobs if kind == part]
        out[part] = dict(sorted(out[part].items(), key=lambda row: (*order, row[0]).index(row[0])))
    out["words_of_last_call"] = sys.argv[1:]  # other rows stand as an earlier call left them
    save(RESULTS.stem, out | stamp("python docs/proof/dialogues.py"))


if __name__ == "__main__":
    main()
