"""Data sets under the names that the programs download, with the same columns and other rows.

Files lie below the working directory, where the library `datasets` looks first.
"""

import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

NUM_ROWS = 512
WORDS = ("the", "until", "after", "river", "and", "stone", "house", "before", "light", "always")


def corpus_lines() -> list[str]:
    """Text of the pages that rl_numerics_check reads."""
    chance = random.Random(1)
    return [" ".join(chance.choices(WORDS, k=40)) for _ in range(2000)]


def write_all(directory: Path) -> None:
    chance = random.Random(0)
    additions = [(chance.randint(0, 100), chance.randint(0, 100)) for _ in range(NUM_ROWS)]
    asked = [(f"What is {x} + {y}?", x + y) for x, y in additions]
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": str(total)}]
        for text, total in asked
    ]
    chosen = [f"\n\nHuman: {text}\n\nAssistant: {total}" for text, total in asked]
    rejected = [f"\n\nHuman: {text}\n\nAssistant: no" for text, _ in asked]
    tables = {
        "HuggingFaceH4/no_robots": ("default", {"messages": chats}),
        "openai/gsm8k": (
            "main",
            {"question": [t for t, _ in asked], "answer": [f"#### {total}" for _, total in asked]},
        ),
        "Anthropic/hh-rlhf": ("default", {"chosen": chosen, "rejected": rejected}),
        "zwhe99/DeepMath-103K": ("default", {"question": [text for text, _ in asked]}),
        "Salesforce/wikitext": ("wikitext-103-raw-v1", {"text": corpus_lines()}),
    }
    for name, (config, columns) in tables.items():
        place = directory / name
        place.mkdir(parents=True)
        for split in ("train", "test"):
            pyarrow.parquet.write_table(pyarrow.table(columns), place / f"{split}.parquet")
        files = "".join(
            f"      - split: {split}\n        path: {split}.parquet\n"
            for split in ("train", "test")
        )
        (place / "README.md").write_text(
            f"---\nconfigs:\n  - config_name: {config}\n    data_files:\n{files}---\n"
        )
