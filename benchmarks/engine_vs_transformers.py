"""Tokens per second of the embedded engine against `transformers`' generate.

Same random weights, same prompts, 32 prompts x 128 new tokens at temperature 1, in one process and
in turn, with one thread and with two. End tokens are off on both sides, so both sample equally many
tokens. Ours records the log-prob of every token; generate is timed both without them (the ratio
that is quoted) and with them, as a trainer needs them. "Ragged": replies end after 16 to 128
tokens, as an agent's do; generate runs until the longest has ended, the engine does not, and only
the tokens of replies count. Each figure is the best of its runs:
what else runs on the machine only ever adds time.

    python benchmarks/engine_vs_transformers.py [--rounds N]
    python benchmarks/engine_vs_transformers.py --model smollm2-135m [--prompts 64] [--tokens 48]

With --model, by name or directory: 64 prompts of examples/sums.py, other ones in each round, 48
tokens each. Each side is a process of its own and takes its turn round by round. Reported: the
median of the rounds' ratios, and the most memory that each process held (VmHWM).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from measuring import (
    ROOT,
    Row,
    Side,
    answer_lines,
    command_of,
    main,
    models_of,
    note,
    peak_mib,
    row,
    seconds_of,
)
from measuring.sampling import requests_of, sample

import numpy as np
import torch
import transformers

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 32, 128

CASES = models_of("engine_vs_transformers")


def make_peer(name: str) -> transformers.PreTrainedModel:
    """The Hugging Face model, with the fastest attention that it offers on a CPU."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CASES[name])
    attention = "eager" if config.model_type == "gpt_oss" else "sdpa"  # sdpa is refused: sinks
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation=attention).float().eval()


def run_peer(
    model: transformers.PreTrainedModel,
    prompts: np.ndarray,
    *,
    greedy: bool,
    logprobs: bool = False,
) -> torch.Tensor:
    """The sampled ids [prompts, tokens], or their log-probs."""
    ids = torch.from_numpy(prompts)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, use_cache=True, return_dict_in_generate=True,
            output_logits=logprobs, **how,
        )  # fmt: skip
        new_ids = out.sequences[:, ids.shape[1] :]
        if not logprobs:
            return new_ids
        steps = zip(out.logits, new_ids.split(1, 1), strict=True)
        return torch.cat([logits.log_softmax(-1).gather(1, at) for logits, at in steps], 1)


def measure(name: str, threads: int, rounds: int) -> dict[str, float]:
    """Tokens/s of both sides, each the best of `rounds` runs taken in turn."""
    torch.set_num_threads(threads)
    peer = make_peer(name)
    with tempfile.TemporaryDirectory() as directory:
        peer.save_pretrained(directory)
        model = load_checkpoint(directory)
    engine = EmbeddedEngine(model, EmbeddedConfig(prefix_cache=False))
    rng, vocab_size = np.random.default_rng(0), CASES[name]["vocab_size"]
    limits = rng.integers(16, NEW_TOKENS + 1, NUM_PROMPTS)
    limits[0] = NEW_TOKENS

    def ours(prompts: np.ndarray, limits: Any = NEW_TOKENS, **how: float) -> list[Any]:
        return sample(engine, requests_of(prompts, limits, **how))

    batch = rng.integers(0, vocab_size, (NUM_PROMPTS, PROMPT_TOKENS))
    theirs = run_peer(peer, batch[:4], greedy=True).numpy()
    mine = np.stack([reply.token_ids for reply in ours(batch[:4], temperature=0.0)])
    agree = float((mine == theirs).mean())
    if agree < 0.9:  # a tie that rounding decides sends the rest of one reply elsewhere
        raise SystemExit(f"{name}: greedy tokens agree on {agree:.0%} only: not the same model.")
    times: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        sides = {
            "ours": partial(ours, batch),
            "peer": partial(run_peer, peer, batch, greedy=False),
            "ours_ragged": partial(ours, batch, limits.tolist()),
            "peer_with_logprobs": partial(run_peer, peer, batch, greedy=False, logprobs=True),
        }
        times.append({side: seconds_of(run, time.perf_counter) for side, run in sides.items()})
        batch = rng.integers(0, vocab_size, batch.shape)
    tokens = dict.fromkeys(sides, NUM_PROMPTS * NEW_TOKENS) | {"ours_ragged": int(limits.sum())}
    speed = {side: tokens[side] / min(t[side] for t in times[1:]) for side in sides}
    # generate also computes tokens after the end of a reply.
    useful = speed["peer"] * limits.mean() / NEW_TOKENS
    return speed | {
        "ratio_with_logprobs": speed["ours"] / speed["peer_with_logprobs"],
        "ratio_ragged": speed["ours_ragged"] / useful,
    }


# -- a pretrained model, each side in a process of its own -----------------------------------------


def sums_prompts(directory: Path, count: int) -> list[list[int]]:
    """The first prompts of examples/sums.py, as the model's chat template writes them."""
    sys.path.insert(0, str(ROOT / "examples"))
    from sums import tasks

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    return [
        tokenizer.apply_chat_template(
            task["messages"], add_generation_prompt=True, return_dict=False
        )
        for task in tasks()[:count]
    ]


def own_round(directory: Path, tokens: int) -> Callable[[list[list[int]]], None]:
    engine = EmbeddedEngine(load_checkpoint(directory), EmbeddedConfig())

    def play(prompts: list[list[int]]) -> None:
        replies = sample(engine, requests_of(prompts, tokens))
        assert all(len(r.token_ids) == tokens for r in replies), "no stop ids were given"

    return play


def peer_round(directory: Path, tokens: int) -> Callable[[list[list[int]]], None]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    pad = model.generation_config.pad_token_id or 0

    def play(prompts: list[list[int]]) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        held = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=held, max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad,
            )  # fmt: skip
        assert out.shape[1] == width + tokens, "min_new_tokens keeps all replies going"

    return play


def run_side(
    side: str, model: str, num_prompts: int, tokens: int, threads: int, rounds: int
) -> None:
    """One side: a round for each line on stdin."""
    quiet()
    torch.set_num_threads(threads)
    directory = locate_model(model)
    prompts = sums_prompts(directory, num_prompts * (rounds + 1))
    play = (own_round if side == "ours" else peer_round)(directory, tokens)

    def answer(number: int) -> dict[str, float]:
        mine = prompts[number * num_prompts : (number + 1) * num_prompts]
        return {"seconds": seconds_of(partial(play, mine), time.perf_counter), "mib": peak_mib()}

    answer_lines(answer)


def compare_sides(model: str, prompts: int, tokens: int, threads: int, rounds: int) -> Row:
    """Both sides in turn, after a round to warm up."""
    with ExitStack() as stack:
        sides = {
            side: stack.enter_context(
                Side(
                    command_of(run_side, side, model, prompts, tokens, threads, rounds),
                    environment={"HF_HUB_OFFLINE": "1"},
                )
            )
            for side in ("peer", "ours")
        }
        said = [{name: side.ask(at) for name, side in sides.items()} for at in range(rounds + 1)]
    seconds = {side: [turn[side]["seconds"] for turn in said[1:]] for side in sides}
    mib = {side: said[-1][side]["mib"] for side in sides}
    for side in sides:
        note(f"{side}: a round {min(seconds[side]):.2f} to {max(seconds[side]):.2f} s, at most "
             f"{mib[side]:,.0f} MiB")  # fmt: skip
    ratio = median(b / a for a, b in zip(seconds["ours"], seconds["peer"], strict=True))
    speed = {side: prompts * tokens / median(taken) for side, taken in seconds.items()}
    name = f"engine_vs_transformers/{Path(model).name}"
    return row(name, speed["ours"], speed["peer"], "sampled tokens/s", better="higher", how=(
        f"{prompts} prompts of examples/sums.py x {tokens} new tokens, {threads} thread(s), median "
        f"of {rounds} rounds in turn after one for warm-up, a process each: median of the rounds' "
        f"ratios {ratio:.2f}, of memory {mib['peer'] / mib['ours']:.2f}; transformers "
        f"{transformers.__version__}, no log-probs there"
    ))  # fmt: skip


def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def compare(
    *,
    rounds: int = 8,
    only: tuple[str, ...] = tuple(CASES),
    model: str = "",
    prompts: int = 64,
    tokens: int = 48,
    threads: int = 1,
) -> Iterator[Row]:
    """The last four options belong to a pretrained model, by name or directory."""
    quiet()
    if model:
        yield compare_sides(model, prompts, tokens, threads, rounds)
        return
    speeds: list[dict[str, float]] = []
    for name in only:
        is_tiny = name.startswith("tiny")
        num_rounds = rounds if is_tiny else max(1, rounds // 4)
        for num_threads in (1, 2):
            found = measure(name, num_threads, num_rounds)
            speeds += [found] * is_tiny
            how = (
                f"{NUM_PROMPTS} prompts x {NEW_TOKENS} new tokens, best of {num_rounds} runs in "
                f"turn; ratio with log-probs {found['ratio_with_logprobs']:.2f}, ragged "
                f"{found['ratio_ragged']:.2f}"
            )
            where = f"engine_vs_transformers, {name}, {num_threads} thread(s)"
            both = found["ours"], found["peer"]
            yield row(where, *both, "sampled tokens/s", better="higher", how=how)
    if speeds:
        both = (geometric_mean(speed[side] for speed in speeds) for side in ("ours", "peer"))
        how = (
            "geometric mean over the tiny models with one and two threads; transformers "
            f"{transformers.__version__}, which records no log-probs here"
        )
        name = "engine_vs_transformers, tiny models"
        yield row(name, *both, "sampled tokens/s", better="higher", how=how)


if __name__ == "__main__":
    main(compare, short={"rounds": 1, "only": ("tiny gpt_oss", "tiny qwen3")})
