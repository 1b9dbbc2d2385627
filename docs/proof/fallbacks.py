"""The table of docs/models.md: architectures of transformers that `fallback=true` was tried on.

    python docs/proof/fallbacks.py               those without a row: about ten seconds each
    python docs/proof/fallbacks.py mamba2 phi    these, anew

Each is a tiny model with random weights, trained for two steps by `train`. transformers' own
`generate`, with its cache, samples from a copy that is sent the trainer's tensors before each step,
and the trainer scores the same tokens in padded batches: what differs is the mismatch. A row of
fallbacks.json has the mismatch of both steps, how the sync was verified, and the CPU time of a
training forward and backward over that of Lockstep's decoder of the same widths; for qwen3 and
llama the milliseconds of a sampled token, and those of the embedded engine; or the sentence with
which it failed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run import rounded, rows_of, save, stamp
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from lockstep.config import resolve
from lockstep.engines.base import Capabilities, EngineContext, Scores
from lockstep.engines.config import EngineConfig
from lockstep.engines.registry import make_engine
from lockstep.envs.custom import Episode
from lockstep.errors import EngineError
from lockstep.models.fallback import load_fallback
from lockstep.models.hf_io import load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.objectives.config import Reinforce
from lockstep.objectives.losses import make_loss
from lockstep.recipes import find_recipe
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.train import train
from lockstep.testing.engines import FakeEngine
from lockstep.training.config import TrainerConfig
from lockstep.training.trainer import Trainer
from lockstep.types import Delta, Request, Sample

RESULTS = Path(__file__).parent / "fallbacks.json"
SHIPPED = locate_model("tiny-qwen3")  # the tokenizer is its own
STEPS = 2

PLAN = tomllib.loads(RESULTS.with_suffix(".toml").read_text())
SHAPE = PLAN["shape"] | {"vocab_size": Tokenizer.from_file(SHIPPED).vocab_size}
SHAPE |= dict.fromkeys(("bos_token_id", "eos_token_id"))
PLAN["parts"]["per_layer"]["vocab_size_per_layer_input"] = SHAPE["vocab_size"]


def read_kind(*, parts: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """The config of an architecture beside the shape that all have."""
    return {k: v for part in parts for k, v in PLAN["parts"][part].items()} | more


GROUPS = {
    group: {kind: read_kind(**table) for kind, table in kinds.items()}
    for group, kinds in PLAN["groups"].items()
}
KINDS = {kind: more for group in GROUPS.values() for kind, more in group.items()}


# -- an engine that is transformers ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(EngineConfig):
    """transformers' `generate`, one request after the other."""


class TransformersEngine(FakeEngine):
    """A copy of the model that samples. Nothing interrupts it: a run here has no asynchrony."""

    def __init__(self, directory: Path, *, vocab_size: int, max_tokens: int) -> None:
        super().__init__(lambda request: [], vocab_size=vocab_size, max_tokens=max_tokens)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()
        self.capabilities = Capabilities(
            name="transformers", vocab_size=vocab_size, max_tokens=max_tokens,
            distributions=("model",), scored_distributions=("model",), has_score=True,
        )  # fmt: skip

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        prompt, sampling = torch.from_numpy(request.prompt_ids.astype(np.int64)), request.sampling
        torch.manual_seed(request.seed % (1 << 63))
        out = self.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=min(sampling.max_tokens, self.capabilities.max_tokens - len(prompt)),
            do_sample=True,
            top_k=0,
            eos_token_id=list(sampling.stop_ids),
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = out.sequences[0, len(prompt) :]
        logprobs = torch.cat(out.logits).float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        is_stop = int(ids[-1]) in sampling.stop_ids
        yield Delta(
            token_ids=ids.numpy().astype(np.int32),
            logprobs=logprobs.numpy(),
            policy_version=self.version,
            finish_reason="stop" if is_stop else "length",
            stop=int(ids[-1]) if is_stop else None,
            num_prefilled_tokens=len(prompt),
        )

    async def score(self, token_ids: Any, *, first: int = 1, **_: Any) -> Scores:
        ids = torch.from_numpy(token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = self.model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        values = np.full(len(ids), np.nan, np.float32)
        values[first:] = logprobs.gather(1, ids[1:, None])[first - 1 :, 0].numpy()
        return Scores(logprobs=values, policy_version=self.version)

    async def load_weights(self, source: Mapping[str, Any] | str | None, *, version: int) -> None:
        assert isinstance(source, Mapping), "this engine takes tensors"
        tensors = {name: torch.as_tensor(tensor).clone() for name, tensor in source.items()}
        loaded, found = type(self.model).from_pretrained(
            None, config=self.model.config, state_dict=tensors, output_loading_info=True
        )
        if misfits := {k: names for k, names in found.items() if names}:
            raise EngineError(f"transformers does not load what was sent: {misfits}.")
        self.model, self.version = loaded.eval(), version


@make_engine.register
def _(config: TransformersConfig, context: EngineContext) -> TransformersEngine:
    return TransformersEngine(
        context.directory, vocab_size=context.vocab_size, max_tokens=context.max_tokens
    )


# -- one architecture -----------------------------------------------------------------------------


def tasks() -> list[str]:
    return [f"Say {number} words." for number in range(9)]


def reward(episode: Episode) -> float:
    """Something that the replies of a random model differ in."""
    return sum(map(ord, episode.answer)) % 7 / 6


def write_model(kind: str, directory: Path) -> None:
    torch.manual_seed(0)
    known = AutoConfig.for_model(kind).to_dict() | type(AutoConfig.for_model(kind)).attribute_map
    shape = {name: value for name, value in SHAPE.items() if name in known}
    config = AutoConfig.for_model(kind, **shape | KINDS[kind])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    for name in ("tokenizer.json", "renderer.json"):
        shutil.copy(SHIPPED / name, directory)


def tried(kind: str) -> dict[str, Any]:
    """The row of one architecture."""
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Path(scratch) / "model"
        try:
            write_model(kind, model)
            steps = two_steps(model, Path(scratch) / "run", is_fallback=True)
            row = described(steps)
            row["train_ratio"] = training_ratio(kind, model)
            if kind in ("qwen3", "llama"):
                own = two_steps(model, Path(scratch) / "own", is_fallback=False)
                row["sampled_ms"] = [sampled_ms(steps[-1]), sampled_ms(own[-1])]
        except Exception as error:  # a row of the table, whatever it is
            said = (str(error).replace(scratch, "").strip().splitlines() or [""])[0]
            said = f"{type(error).__name__}: {said}"
            if "engine.generate: " in said:
                said = f"transformers' generate: {said.rpartition('engine.generate: ')[2]}"
            return {"fails": said.partition(" The first is ")[0][:300]}
        return row


def two_steps(model: Path, out: Path, *, is_fallback: bool) -> list[dict[str, float]]:
    """The metrics of each step. The decoder's run samples by the embedded engine."""
    recipe = find_recipe("custom")
    words = [
        f"model={model}", f"steps={STEPS}", "groups_per_step=2", "group_size=2", "max_tokens=128",
        "agent.max_turn_tokens=64", "contract=none", "threads=1", "evaluation.every=0",
        "evaluation.at_start=false", "trainer.lr=1e-3", "trainer.warmup_updates=0",
        f"task.path={__file__}:tasks", f"task.reward={__file__}:reward",
    ]  # fmt: skip
    if is_fallback:
        recipe = replace(recipe, engine=TransformersConfig(), fallback=True)
    train(resolve(recipe, words), out=out, view="json")
    return [row for row in rows_of(out) if "train/loss" in row]


def described(steps: list[dict[str, float]]) -> dict[str, Any]:
    first, last = steps[0], steps[-1]
    return {
        "tokens": int(first["tokens/trained"]),
        "k3": first["mismatch/k3"],
        "max_abs_diff": first["mismatch/max_abs_diff"],
        "k3_after": last["mismatch/k3"],
        "max_abs_diff_after": last["mismatch/max_abs_diff"],
        "sync_level": last.get("sync/level"),
        "skipped": sum(row["train/skipped_updates"] for row in steps),
    }


def sampled_ms(step: dict[str, float]) -> float:
    """Milliseconds of a sampled token."""
    return 1000 * step["time/sample_seconds"] / step["tokens/sampled"]


def training_ratio(kind: str, directory: Path) -> float:
    """CPU time of a forward and backward of four rows of 256 tokens over that of Lockstep's
    decoder, of qwen3 or qwen3_moe: the best of three each, in turn."""
    with tempfile.TemporaryDirectory() as own:
        write_model("qwen3_moe" if "num_experts" in KINDS[kind] else "qwen3", Path(own))
        models = {directory: load_fallback(directory), Path(own): load_checkpoint(own)}
        trainers = [Trainer(model, TrainerConfig(), like=at) for at, model in models.items()]
    rng = np.random.default_rng(0)
    rows = [
        Sample(
            id=str(number),
            token_ids=rng.integers(1, SHAPE["vocab_size"], 256).astype(np.int32),
            loss_mask=np.arange(256) > 0,
            columns={"advantages": np.ones(256, np.float32)},
        )
        for number in range(4)
    ]

    def seconds(trainer: Trainer) -> float:
        began = time.process_time()
        trainer.forward_backward(rows, make_loss(Reinforce()))
        return time.process_time() - began

    rounds = [[seconds(trainer) for trainer in trainers] for _ in range(3)]
    theirs, ours = (min(took) for took in zip(*rounds, strict=True))
    return theirs / ours


def main() -> None:
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    for kind in sys.argv[1:] or [kind for kind in KINDS if kind not in found]:
        row = tried(kind) if kind in CAUSAL else {"fails": "transformers has no such class"}
        found[kind] = rounded(row, 2)
        print(kind, json.dumps(found[kind]), flush=True)
        document = {
            **stamp("python docs/proof/fallbacks.py"),
            "transformers": transformers.__version__,
            "rows": {
                kind: {"group": name} | found[kind]
                for name, group in GROUPS.items()
                for kind in group
                if kind in found
            },
        }
        save(RESULTS.stem, document)


if __name__ == "__main__":
    main()
