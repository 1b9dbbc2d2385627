"""Tokens per second of the embedded engine against `transformers`' generate.

Same random weights, same prompts, 32 prompts x 128 new tokens at temperature 1, in one process and
in turn, with one thread and with two. End tokens are off on both sides, so both sample equally many
tokens. Ours records the log-prob of every token; generate is timed both without them (the ratio
that is quoted) and with them, as a trainer needs them. "Ragged": replies end after 16 to 128
tokens, as an agent's do; generate runs until the longest has ended, the engine does not, and only
the tokens of replies count. Each figure is the best of its runs:
what else runs on the machine only ever adds time.

    python benchmarks/engine_vs_transformers.py [--json] [--rounds N]
    python benchmarks/engine_vs_transformers.py --model smollm2-135m [--prompts 64] [--tokens 48]

With --model, by name or directory: 64 prompts of examples/sums.py, other ones in each round, 48
tokens each. Each side is a process of its own and takes its turn round by round. Reported: the
median of the rounds' ratios, and the most memory that each process held (VmHWM).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import transformers
from measuring import can_measure, peak_mib
from step_vs_trl import READY, ROOT, note, run_in_turn

from lockstep.engines.config import EmbeddedConfig
from lockstep.engines.embedded.engine import EmbeddedEngine
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.types import Request, SamplingParams

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 32, 128

TINY = {
    "vocab_size": 561, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "initializer_range": 0.15, "tie_word_embeddings": True,
}  # fmt: skip
LARGER = TINY | {
    "vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.05,
}  # fmt: skip
NO_ENDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def make_peer(kind: str, shape: dict[str, Any]) -> transformers.PreTrainedModel:
    """The Hugging Face model, with the fastest attention that it offers on a CPU."""
    torch.manual_seed(0)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **shape, **NO_ENDS, intermediate_size=shape["hidden_size"], num_local_experts=4,
            num_experts_per_tok=2, sliding_window=64,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
        make, attention = transformers.GptOssForCausalLM, "eager"  # sdpa is refused: sinks
    else:
        config = transformers.Qwen3Config(
            **shape, **NO_ENDS, intermediate_size=2 * shape["hidden_size"]
        )
        make, attention = transformers.Qwen3ForCausalLM, "sdpa"
    return make._from_config(config, attn_implementation=attention).float().eval()


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


def run_ours(
    engine: EmbeddedEngine,
    prompts: np.ndarray,
    *,
    greedy: bool,
    tag: str,
    limits: np.ndarray | None = None,
) -> list[Any]:

    replies: dict[int, Any] = {}

    async def reply(number: int) -> None:
        limit = NEW_TOKENS if limits is None else int(limits[number])
        request = Request(
            id=f"{tag}/{number}",
            prompt_ids=prompts[number].astype(np.int32),
            sampling=SamplingParams(max_tokens=limit, temperature=0.0 if greedy else 1.0),
            seed=number,
        )
        replies[number] = [delta async for delta in engine.generate(request)][-1]

    async def all_of_them() -> None:
        await asyncio.gather(*(reply(i) for i in range(len(prompts))))

    # Python 3.11 formats the result of the main coroutine while it restores the signal handler
    # (signal.signal tries it as an enum): nothing large may be returned through asyncio.run.
    asyncio.run(all_of_them())
    return [replies[i] for i in range(len(prompts))]


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(name: str, kind: str, shape: dict[str, Any], threads: int, rounds: int) -> dict:
    """Tokens/s of both sides, each the best of `rounds` runs taken in turn."""
    torch.set_num_threads(threads)
    peer = make_peer(kind, shape)
    with tempfile.TemporaryDirectory() as directory:
        peer.save_pretrained(directory)
        model = load_checkpoint(directory)
    engine = EmbeddedEngine(model, EmbeddedConfig(prefix_cache=False))
    rng = np.random.default_rng(0)

    def prompts() -> np.ndarray:
        return rng.integers(0, shape["vocab_size"], (NUM_PROMPTS, PROMPT_TOKENS))

    same = prompts()
    theirs = run_peer(peer, same[:4], greedy=True).numpy()
    ours = [d.token_ids for d in run_ours(engine, same[:4], greedy=True, tag="check")]
    agree = float((np.stack(ours) == theirs).mean())
    if agree < 0.9:  # a tie that rounding decides sends the rest of one reply elsewhere
        raise SystemExit(f"{name}: greedy tokens agree on {agree:.0%} only: not the same model.")
    run_ours(engine, same, greedy=False, tag="warm")
    run_peer(peer, same, greedy=False)
    limits = rng.integers(16, NEW_TOKENS + 1, NUM_PROMPTS)
    limits[0] = NEW_TOKENS
    times: dict[str, list[float]] = {
        "ours": [], "peer": [], "peer_with_logprobs": [], "ours_ragged": [],
    }  # fmt: skip
    for turn in range(rounds):
        batch, tag = prompts(), f"turn {turn}"
        sides = {
            "ours": partial(run_ours, engine, batch, greedy=False, tag=tag),
            "peer": partial(run_peer, peer, batch, greedy=False),
            "ours_ragged": partial(
                run_ours, engine, batch, greedy=False, tag=f"ragged {turn}", limits=limits
            ),
            "peer_with_logprobs": partial(run_peer, peer, batch, greedy=False, logprobs=True),
        }
        for side, run in sides.items():
            times[side].append(seconds(run))
    tokens = dict.fromkeys(times, NUM_PROMPTS * NEW_TOKENS) | {"ours_ragged": int(limits.sum())}
    speed = {side: tokens[side] / min(t) for side, t in times.items()}
    # generate also computes tokens after the end of a reply.
    useful = speed["peer"] * limits.mean() / NEW_TOKENS
    return {
        "model": name,
        "threads": threads,
        **{side: round(value) for side, value in speed.items()},
        "ratio": round(speed["ours"] / speed["peer"], 2),
        "ratio_with_logprobs": round(speed["ours"] / speed["peer_with_logprobs"], 2),
        "ratio_ragged": round(speed["ours_ragged"] / useful, 2),
        "greedy_agreement": round(agree, 3),
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

    async def reply(at: int, prompt: list[int]) -> None:
        request = Request(
            id=f"{at}/{prompt}",
            prompt_ids=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=tokens, temperature=1.0),
            seed=at,
        )
        found = [delta async for delta in engine.generate(request)][-1]
        assert len(found.token_ids) == tokens, "no stop ids were given"

    async def all_of_them(prompts: list[list[int]]) -> None:
        await asyncio.gather(*(reply(at, prompt) for at, prompt in enumerate(prompts)))

    return lambda prompts: asyncio.run(all_of_them(prompts))


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


def run_side(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """One side's rounds, each when a line comes on stdin."""
    torch.set_num_threads(options.threads)
    directory = locate_model(options.model)
    total = options.rounds + 1  # the first is not counted
    prompts = sums_prompts(directory, options.prompts * total)
    play = (own_round if side == "ours" else peer_round)(directory, options.tokens)
    steps = []
    for at in range(total):
        print(READY, flush=True)
        sys.stdin.readline()
        mine = prompts[at * options.prompts : (at + 1) * options.prompts]
        steps.append({"seconds": seconds(partial(play, mine))})
    return {"steps": steps, **({"peak_mib": peak_mib()} if can_measure() else {})}


def compare_sides(options: argparse.Namespace) -> dict[str, Any]:
    """Runs both sides in turn and prints the figures. Returns the JSON line."""
    common = [f"--{name}={getattr(options, name)}" for name in
              ("model", "rounds", "prompts", "tokens", "threads")]  # fmt: skip
    names = {"ours": "ours", "peer": "transformers"}
    commands = {
        side: [sys.executable, __file__, *common, "--side", side] for side in ("peer", "ours")
    }
    sides = run_in_turn(commands, options.rounds + 1)
    amount = options.prompts * options.tokens
    found: dict[str, dict[str, float]] = {}
    for side, said in sides.items():
        taken = [step["seconds"] for step in said["steps"]][1:]
        found[side] = {
            "tokens_per_second": amount / statistics.median(taken),
            "peak_mib": said.get("peak_mib", math.nan),
        }
        note(
            f"  {names[side]:12} {found[side]['tokens_per_second']:7,.1f} tokens/s (a round "
            f"{min(taken):.2f} to {max(taken):.2f} s), at most {found[side]['peak_mib']:,.0f} MiB"
        )
    pairs = zip(sides["peer"]["steps"], sides["ours"]["steps"], strict=True)
    ratios = [theirs["seconds"] / mine["seconds"] for theirs, mine in pairs][1:]
    memory = found["peer"]["peak_mib"] / found["ours"]["peak_mib"]
    note(f"  ratio {statistics.median(ratios):.2f} of speed, {memory:.2f} of memory")
    return {
        "name": f"engine_vs_transformers/{Path(options.model).name}",
        "ours": round(found["ours"]["tokens_per_second"], 1),
        "peer": round(found["peer"]["tokens_per_second"], 1),
        "unit": "sampled tokens/s",
        "ratio": round(statistics.median(ratios), 2),
        "better": "higher",
        "how": f"{options.prompts} prompts of examples/sums.py x {options.tokens} new tokens, "
        f"{options.threads} thread(s), median of {options.rounds} rounds in turn after one for "
        f"warm-up, a process each; transformers {transformers.__version__}, no log-probs there",
        "memory_ratio": round(memory, 2),
        "sides": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--rounds", type=int, default=8, help="runs of each side per case")
    parser.add_argument("--model", metavar="NAME", help="a pretrained model, by name or directory")
    parser.add_argument("--prompts", type=int, default=64, help="with --model: prompts per round")
    parser.add_argument("--tokens", type=int, default=48, help="with --model: tokens per reply")
    parser.add_argument("--threads", type=int, default=1, help="with --model: threads per side")
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.side:
        print(json.dumps(run_side(options.side, options)))
        return
    if options.model:
        print(json.dumps(compare_sides(options)))
        return
    cases = [
        ("tiny gpt_oss", "gpt_oss", TINY), ("tiny qwen3", "qwen3", TINY),
        ("larger gpt_oss", "gpt_oss", LARGER), ("larger qwen3", "qwen3", LARGER),
    ]  # fmt: skip
    rows = []
    for name, kind, shape in cases:
        rounds = options.rounds if shape is TINY else max(1, options.rounds // 4)
        for threads in (1, 2):
            row = compare(name, kind, shape, threads, rounds)
            rows.append(row)
            if not options.json:
                print(
                    f"{name:15} {threads} thread{'s' * (threads > 1):1}  ours {row['ours']:7,} "
                    f"tokens/s  transformers {row['peer']:7,}  ratio {row['ratio']:.2f}  "
                    f"(with log-probs {row['ratio_with_logprobs']:.2f}, "
                    f"ragged {row['ratio_ragged']:.2f})",
                    flush=True,
                )
    tiny = [row for row in rows if row["model"].startswith("tiny")]
    mean = {
        side: math.exp(sum(math.log(row[side]) for row in tiny) / len(tiny))
        for side in ("ours", "peer")
    }
    print(
        json.dumps(
            {
                "name": "engine_vs_transformers",
                "ours": round(mean["ours"]),
                "peer": round(mean["peer"]),
                "unit": "sampled tokens/s",
                "ratio": round(mean["ours"] / mean["peer"], 2),
                "better": "higher",
                "how": f"{NUM_PROMPTS} prompts x {NEW_TOKENS} new tokens, geometric mean over both "
                f"tiny models with one and two threads, best of {options.rounds} runs in turn; "
                f"transformers {transformers.__version__}, which records no log-probs here",
                "cases": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
