"""Rows that a shipped model sampled, and what it makes of them with one thing changed."""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

from lockstep.doctor.checks.rows import Rows
from lockstep.doctor.inputs.base import Dump, Facts
from lockstep.doctor.numerics.compare import Distribution
from lockstep.doctor.numerics.scorer import Scorer
from lockstep.doctor.numerics.weights import Weights
from lockstep.models.locate import locate_model
from lockstep.models.moe import Routing
from lockstep.models.variants import with_perturbed_routers, without_sinks, without_windows
from lockstep.ops.context import PackedContext
from lockstep.renderers.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[4] / "docs" / "proof"))

from doctor_faults import with_dropout

NUM_PROMPTS, GROUP, PROMPT, SIZE = 6, 6, 24, 104  # longer than the shipped model's window of 64


class ArrayDump(Dump):
    """Rows that are in memory."""

    format = "arrays"

    def __init__(self, rows: Rows, facts: Facts | None = None) -> None:
        super().__init__(Path("arrays"))
        self._rows, self._facts = rows, facts or Facts()

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    @property
    def facts(self) -> Facts:
        return self._facts

    @property
    def has(self) -> frozenset[str]:
        columns = ("rollout_logprobs", "trainer_logprobs", "steps", "routed_experts")
        return frozenset(name for name in columns if getattr(self._rows, name) is not None)

    def chunks(self, *, max_tokens: int = 0):
        half = len(self._rows) // 2
        yield self._rows.take(np.arange(half))
        yield self._rows.take(np.arange(half, len(self._rows)))


@cache
def sampled_rows(model: str) -> Rows:
    """NUM_PROMPTS x GROUP rows without log-probs, of SIZE tokens, drawn at temperature 1."""
    scorer = Scorer(device="cpu")
    decoder = scorer.load(weights_of(model))
    control = sorted(Tokenizer.from_file(locate_model(model)).control_ids)
    text_ids = np.setdiff1d(np.arange(200), control)
    rng = np.random.default_rng(0)
    ids = np.repeat(rng.choice(text_ids, (NUM_PROMPTS, PROMPT)), GROUP, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        while ids.shape[1] < SIZE:
            flat = torch.from_numpy(ids.ravel())
            positions = torch.arange(ids.shape[1]).repeat(len(ids))
            context = PackedContext.of([ids.shape[1]] * len(ids))
            hidden = decoder(flat, positions, context)[ids.shape[1] - 1 :: ids.shape[1]]
            logits = decoder.logits(hidden)
            logits[:, control] = -torch.inf  # no turn ends, and nothing stands behind an end
            probs = logits.softmax(-1)
            drawn = torch.multinomial(probs, 1, generator=generator)
            ids = np.concatenate([ids, drawn.numpy()], 1)
    mask = np.tile(np.arange(SIZE) >= PROMPT, len(ids))
    return Rows(
        row_ids=tuple(f"row-{i}" for i in range(len(ids))),
        offsets=np.arange(len(ids) + 1, dtype=np.int64) * SIZE,
        token_ids=ids.ravel().astype(np.int32),
        loss_mask=mask,
    )


def weights_of(model: str) -> Weights:
    return Weights(name=model, directory=locate_model(model))


@cache
def scored(model: str, variant: str = "", **settings: float):
    """[N] float32 of the sampled rows; variant: bfloat16, without_sinks, without_windows, dropout
    or routers. settings: of these, or temperature."""
    scorer, rows = Scorer(device="cpu"), sampled_rows(model)
    decoder, every = scorer.load(weights_of(model)), np.arange(len(sampled_rows(model)))
    distribution = Distribution(temperature=settings.get("temperature", 1.0))

    def values(twin):
        return scorer.score(twin, rows, every, distributions=[distribution]).logprobs[distribution]

    if variant == "dropout":
        return values(with_dropout(decoder, settings["share"], seed=77))
    if variant == "routers":
        return values(with_perturbed_routers(decoder, settings["std"], seed=77))
    if variant == "bfloat16":
        return values(scorer.in_bfloat16(decoder))
    if variant == "without_sinks":
        return values(without_sinks(decoder))
    if variant == "without_windows":
        return values(without_windows(decoder))
    return values(decoder)


@cache
def noisy(model: str, std: float, seed: int = 0):
    """[N] float32: noise of this standard deviation on every logit."""
    scorer, rows = Scorer(device="cpu"), sampled_rows(model)
    found = scorer.score(
        scorer.load(weights_of(model)), rows, np.arange(len(rows)), has_spread=True
    )
    draws = np.random.default_rng(seed).standard_normal(rows.num_tokens)
    plain = found.logprobs[Distribution()]
    noise = std * draws * np.sqrt(found.spread)
    return np.minimum(plain + noise, -1e-6).astype(np.float32)


@cache
def routed(model: str):
    """[N, L, A] int16: the experts that a sampler with noisy routers would have taken."""
    scorer, rows = Scorer(device="cpu"), sampled_rows(model)
    twin = with_perturbed_routers(scorer.load(weights_of(model)), 0.5, seed=5)
    routing = Routing()
    with torch.inference_mode():
        twin(
            torch.from_numpy(rows.token_ids.astype(np.int64)),
            torch.from_numpy(rows.position),
            PackedContext.of(rows.sizes.tolist()),
            routing,
        )
    return routing.stacked().numpy().astype(np.int16)


def replayed_values(model: str, routes):
    """[N] float32: what the model makes of the rows if their tokens go to these experts."""
    scorer, rows = Scorer(device="cpu"), sampled_rows(model).with_(routed_experts=routes)
    found = scorer.score(
        scorer.load(weights_of(model)), rows, np.arange(len(rows)), is_replaying=True
    )
    return found.logprobs[Distribution()]
