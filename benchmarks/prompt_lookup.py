"""Decoding with and without guesses from a request's own text (`engine.lookup_tokens`).

SmolLM2-135M repeats a paragraph, as an agent that quotes a tool's document: one request, 120
tokens, under the contract, one thread. Greedy, and drawn at temperature 0.7, where the model leaves
the text more often. The tokens and the log-probs of both sides are compared in every bit. The
engines alternate; seconds on the clock, medians. Needs `lockstep fetch smollm2-135m`.

    python benchmarks/prompt_lookup.py [--guess N] [--rounds N]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

from measuring import ROOT, Row, in_turn, main, row
from measuring.sampling import requests_of, sample

import numpy as np
import torch

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.ops.selftest import prove
from lockstep.recipes import configure
from lockstep.run.preflight import read_model_files
from lockstep.types import Message

TEXT = """The harbour of Brindley was built in 1874 by Thomas Hale. It has two piers of granite, 340
and 280 metres long. Every spring the harbour master, Ines Calder, checks the lamps, the chains and
the eleven bollards. In 1932 a storm broke the northern pier, and it took nine years to mend it.
Since 1951 the ferry to Oslo has left from the southern pier on Mondays and Thursdays at 7.15."""
NEW_TOKENS = 120


def compare(*, guess: int = 8, rounds: int = 3) -> Iterator[Row]:
    torch.set_num_threads(1)
    directory = locate_model("smollm2-135m")
    sums = ROOT / "examples" / "sums.py"
    task = (f"task.path={sums}:tasks", f"task.reward={sums}:reward")
    config = configure("custom", overrides=["model=smollm2-135m", *task])
    renderer = read_model_files(config).renderer
    asked = Message(role="user", content=f"Repeat this text word by word, nothing else:\n{TEXT}")
    prompt = renderer.render([asked], ())
    model = load_checkpoint(directory)
    model.ops = prove(model).ops
    size = {"kv_cache_tokens": 8192, "max_num_sequences": 8}
    sides = {
        "guessing": EmbeddedEngine(model, EmbeddedConfig(**size, lookup_tokens=guess)),
        "plain": EmbeddedEngine(model, EmbeddedConfig(**size)),
    }
    replies: dict[str, np.ndarray] = {}

    def seconds(side: str, temperature: float) -> float:
        requests = requests_of([prompt], NEW_TOKENS, temperature=temperature)
        began = time.perf_counter()
        (reply,) = sample(sides[side], requests)
        spent = time.perf_counter() - began
        replies[side] = np.stack([reply.token_ids, reply.logprobs.view(np.int32)])
        return spent

    for temperature in (0.0, 0.7):
        runs = in_turn(rounds, {side: partial(seconds, side, temperature) for side in sides})
        assert np.array_equal(*replies.values()), "guesses changed the sampled tokens"
        ours, peer = (NEW_TOKENS / median(runs[side]) for side in sides)
        how = f"temperature {temperature:g}, one request; peer: the same without guesses"
        yield row("prompt_lookup", ours, peer, "tokens/s", how=how, better="higher")


if __name__ == "__main__":
    main(compare, short={"rounds": 1})
