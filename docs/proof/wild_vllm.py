"""vLLM as the sampler of wild_players.py, in a process of its own.

vLLM pins its own torch, so it has an environment of its own, which `make test-vllm` makes.
LOCKSTEP_VLLM names the Python of another one. `Engine` starts this file with that Python and talks
with it in lines of JSON over its standard input and output, for as many calls as a program makes.

The log-probs are vLLM's own, and so is the noise on them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_ROW_TOKENS = 2048
CACHE_BYTES = 1 << 28
MAX_STEP_TOKENS = 4096
MAX_ROWS = 64
"""Rows of one step: those of a dump."""

Ids = list[int]


def python() -> Path:
    """The Python of the environment that has vLLM."""
    return Path(os.environ.get("LOCKSTEP_VLLM") or ROOT / ".venv-vllm" / "bin" / "python")


def why_missing() -> str:
    """Why vLLM cannot be started; empty where it can."""
    if python().is_file():
        return ""
    return (
        f"there is no Python with vLLM at {python()}: run `make test-vllm`, or name one in "
        "LOCKSTEP_VLLM"
    )


class Engine:
    """A vLLM that has loaded one model.

    directory: what transformers saved. dtype: float32 or bfloat16. is_raw: whether it records
    log-probs before temperature and top-p; vLLM settles that when it starts. The process ends with
    this object.
    """

    def __init__(self, directory: Path, *, dtype: str, is_raw: bool) -> None:
        if why := why_missing():
            raise FileNotFoundError(why)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        environment = {
            k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")
        }
        self._process = subprocess.Popen(
            [python(), __file__, directory, dtype, "raw" if is_raw else "processed"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        weakref.finalize(self, _end, self._process)
        self.version: str = self._answer()["version"]

    def draw(
        self,
        prompts: Sequence[Ids],
        *,
        stop_ids: Sequence[int],
        seeds: Sequence[int],
        temperature: float,
        top_p: float,
        max_tokens: int,
    ) -> list[tuple[Ids, list[float]]]:
        """A reply to each prompt: (ids with the stop id, natural log-prob of each)."""
        answer = self._ask({
            "prompts": prompts, "seeds": seeds, "settings": {
                "stop_token_ids": list(stop_ids), "temperature": temperature, "top_p": top_p,
                "max_tokens": max_tokens,
            },
        })  # fmt: skip
        return list(zip(answer["ids"], answer["logprobs"], strict=True))

    def score(self, ids: Ids) -> list[float]:
        """Natural log-prob of each id given those before it; NaN at the first."""
        return self._ask({"row": ids})["logprobs"]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "the process was started without a pipe"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "the process was started without a pipe"
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            last = "".join(self._log.readlines()[-15:])
            raise RuntimeError(f"vLLM's process ended with exit code {code}:\n{last}")
        return json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


# -- in the environment of vLLM --------------------------------------------------------------------


def serve(directory: str, dtype: str, distribution: str) -> None:
    """Answers lines of standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes there too
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    import vllm

    from lockstep.engines.vllm.cpu_kernels import mend_cpu_kernels

    mend_cpu_kernels()  # vLLM's kernels for CPUs have none of the players' 16
    engine = vllm.LLM(
        model=directory, dtype=dtype, skip_tokenizer_init=True, generation_config="vllm",
        logprobs_mode=f"{distribution}_logprobs", max_model_len=MAX_ROW_TOKENS,
        max_num_seqs=MAX_ROWS, kv_cache_memory_bytes=CACHE_BYTES, enforce_eager=True,
        # A prompt in chunks with a seed ends vLLM 0.32 on a CPU: it rolls the draw of each chunk
        # back, which a CPU's generator cannot.
        enable_chunked_prefill=False, max_num_batched_tokens=MAX_STEP_TOKENS,
    )  # fmt: skip

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"version": vllm.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        if "row" in request:
            params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
            (out,) = engine.generate({"prompt_token_ids": request["row"]}, params, use_tqdm=False)
            found = [
                float("nan") if place is None else place[id_].logprob
                for id_, place in zip(request["row"], out.prompt_logprobs, strict=True)
            ]
            say({"logprobs": found})
            continue
        params = [
            vllm.SamplingParams(
                seed=seed, logprobs=0, ignore_eos=True, detokenize=False, **request["settings"]
            )
            for seed in request["seeds"]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        replies = [out.outputs[0] for out in engine.generate(prompts, params, use_tqdm=False)]
        say({
            "ids": [list(reply.token_ids) for reply in replies],
            "logprobs": [
                [place[id_].logprob for id_, place in zip(r.token_ids, r.logprobs, strict=True)]
                for r in replies
            ],
        })  # fmt: skip


if __name__ == "__main__":
    serve(*sys.argv[1:])
