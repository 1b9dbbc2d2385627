"""Is the doctor right? Dumps whose defect is known, and what it says of them.

    python docs/proof/doctor.py                    everything (`make proof` runs it)
    python docs/proof/doctor.py matrix --seeds 1   one part, fewer dumps

Three parts. *matrix*: every cause in three strengths, with several seeds: is the
cause that is named first the right one, by the classes of `causes.py`? *healthy*: 500 dumps
without a defect: is a cause named? *pairs*: two faults at once: are both named, and does each have
the share of the gap that goes away without it?

Rows are episodes that a model really sampled. What is dumped of them comes from
`faulty_dumps.py`. In every dump the two sides differ by dense noise besides, as two engines
do, and a dump of that noise alone says what is too little to be found. What came out is written to
doctor-PLAYER.json, misses by name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from doctor_faults import (
    ActiveDropout,
    ClampedLogprobs,
    DroppedSeparators,
    DroppedThinking,
    DuplicatedPrompt,
    FillerLogprobs,
    IgnoredRopeScaling,
    InjectedControlTokens,
    LateAdvantages,
    PackingLeak,
    PaddedRows,
    PaddingAttended,
    PostProcessedReplies,
    QuantisedLogprobs,
    RerenderedHistory,
    TokensAfterStop,
    TrainedObservations,
    WrongBoundary,
    WrongPositions,
    WrongTemplate,
)
from faulty_dumps import (
    AdapterOfUpdates,
    NonfiniteLogprobs,
    ProbabilitiesAsLogprobs,
    ScoredAfterUpdates,
    Source,
    ZeroRoutes,
    faulty_rows,
    sampled_by,
)

from lockstep.agent.config import AgentConfig
from lockstep.agent.loop import Budget, collect, sampling_of
from lockstep.agent.turns import Policy
from lockstep.doctor.causes import is_same_class
from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.diagnosis import Diagnosis
from lockstep.doctor.gap import gap_of
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.rows import Rows
from lockstep.engines.base import EngineContext
from lockstep.engines.config import EmbeddedConfig
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.models.config import ModelConfig
from lockstep.models.decoder import Decoder
from lockstep.models.hf_io import hf_tensors, load_checkpoint
from lockstep.models.locate import locate_model
from lockstep.objectives.config import GRPO
from lockstep.renderers.base import Renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.preflight import choose_model_renderer
from lockstep.testing.faults import FaultConfig
from lockstep.testing.faults.rows import DroppedFinalTokens, RetokenizedRows, ShiftedLogprobs
from lockstep.testing.faults.sides import (
    IgnoredSinks,
    IgnoredWindow,
    KernelNoise,
    ProcessedLogprobs,
    QuantisedRollout,
    SamplingNoise,
    StaleWeights,
)
from lockstep.training.rows import rows_for_training

HERE = Path(__file__).parent
NUM_TASKS, GROUP_SIZE = 8, 8
"""64 rows in a dump: a small step. Larger ones are easier."""
NOISE = KernelNoise(std=0.008)
"""Between the two sides of every dump: what is told of two engines on a large dense model
(docs/reference/faults.md): a mean difference of 0.002."""
FACTOR = 3.0
"""Times the noise floor's k2 from which on a cause must be found."""
SHARE_TOLERANCE = 0.2
"""By which a share may differ from that of the ablation, of the whole gap."""

LEAN = (
    "turn", "is_sampled", "policy_version", "trainer_version", "engine_ids", "messages",
    "engine_prompt_ids",
    "routed_experts", "trainer_routed_experts",
)  # fmt: skip
"""What most trainers' dumps lack: left are ids, mask, both sides' log-probs, prompt lengths,
advantages, rewards, groups and steps."""
LEVELS = ("lean", "full", "model")
"""What the doctor is given. lean: a dump without LEAN, and the tokenizer and its renderer. full:
everything that `Rows` knows. model: that, and the model that sampled."""


# -- who samples -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Player:
    """A model on its tokenizer, and what it plays."""

    name: str
    model: Decoder
    renderer: Renderer
    max_tokens: int
    max_turn_tokens: int

    def play(
        self,
        seed: int,
        *,
        fault: FaultConfig = NOISE,
        dtype: Literal["same", "bfloat16"] = "same",
        num_tasks: int = NUM_TASKS,
        group_size: int = GROUP_SIZE,
        max_turn_tokens: int = 0,
        max_turns: int = 5,
    ) -> Source:
        """Episodes of the environment as training rows. fault: of the engine that draws them."""
        context = EngineContext(
            model=self.model,
            token_bytes=(),
            directory=Path(),
            vocab_size=self.model.config.vocab_size,
            max_tokens=self.max_tokens,
            dtype="float32",
            seed=seed,
            run="proof",
        )
        noisy = NOISE if isinstance(fault, ProcessedLogprobs) else fault
        if isinstance(noisy, KernelNoise | SamplingNoise):
            noisy = replace(noisy, seed=seed)
        engine = noisy.make_engine(EmbeddedConfig(dtype=dtype), context)
        if isinstance(fault, ProcessedLogprobs):
            engine = fault.processing(engine)
        agent = AgentConfig(
            max_turns=max_turns, max_turn_tokens=max_turn_tokens or self.max_turn_tokens
        )
        task = DocSearchConfig()
        sampling = replace(sampling_of(agent), record_routes=self.model.config.is_moe)

        async def episodes():
            shared = engine.capabilities.shares_weights
            await engine.load_weights(None if shared else dict(hf_tensors(self.model)), version=0)
            return await collect(
                Policy(engine, self.renderer, sampling),
                lambda one: task.environment(one, agent),
                task.tasks(split="train", seed=seed).take(num_tasks),
                group_size=group_size,
                budget=Budget.of(agent, max_tokens=self.max_tokens),
                run_seed=seed,
            )

        groups = asyncio.run(episodes())
        samples = rows_for_training(groups, GRPO(), control_ids=self.renderer.tokenizer.control_ids)
        trajectories = {t.id: t for g in groups for t in g.trajectories}
        messages, rewards = {}, {}
        for sample in samples:
            name, _, leaf = sample.id.rpartition("/")
            messages[sample.id] = trajectories[name].messages(int(leaf))
            rewards[sample.id] = trajectories[name].rewards[int(leaf)]
        return Source(
            model=self.model, renderer=self.renderer, samples=samples,
            sampler=sampled_by(noisy, self.model),
            messages=messages, rewards=rewards,
        )  # fmt: skip


@cache
def shipped() -> Player:
    """tiny-gpt-oss, as the quickstart plays it."""
    directory = locate_model("tiny-gpt-oss")
    config, tokenizer = ModelConfig.from_directory(directory), Tokenizer.from_file(directory)
    return Player(
        name="tiny-gpt-oss",
        model=load_checkpoint(directory).requires_grad_(False),
        renderer=choose_model_renderer(directory, config.architecture, tokenizer).renderer,
        max_tokens=256,
        max_turn_tokens=48,
    )


PLAYERS = {"tiny-gpt-oss": shipped}


# -- what is wrong ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A defect of one strength."""

    cause: str
    fault: FaultConfig
    share: float = 1.0
    """Of the rows that meet a fault of the decoders."""

    @property
    def label(self) -> str:
        words = [w for w in self.fault.describe().split(",")[0].split()[1:] if "seed" not in w]
        changed = [w for w in words if not w.endswith(("growth=0.0", "growth_from=0", "bias=0.0"))]
        return " ".join([*changed, *([f"rows={self.share:g}"] if self.share < 1 else [])])


def _shares(make: Callable[..., FaultConfig], **settings: Any) -> list[FaultConfig]:
    return [make(share=share, **settings) for share in (0.1, 0.3, 1.0)]


FAULTS: dict[str, Sequence[FaultConfig]] = {
    "reencoded": _shares(RetokenizedRows),
    "rerendered": _shares(RerenderedHistory),
    "missing_final": [
        DroppedFinalTokens(share=0.3), DroppedFinalTokens(), DroppedFinalTokens(count=3),
    ],
    "dropped_separator": _shares(DroppedSeparators),
    "shifted": [
        ShiftedLogprobs(share=0.1), ShiftedLogprobs(share=0.3, offset=-1),
        ShiftedLogprobs(offset=2),
    ],
    "after_stop": [
        TokensAfterStop(share=0.3, count=1), TokensAfterStop(share=0.3), TokensAfterStop(count=8),
    ],
    "observation_trained": [
        TrainedObservations(share=0.3, count=3), TrainedObservations(share=0.3),
        TrainedObservations(),
    ],
    "boundary": [
        WrongBoundary(share=0.3), WrongBoundary(by=3), WrongBoundary(kind="subtracted"),
    ],
    "duplicated_prompt": _shares(DuplicatedPrompt),
    "wrong_template": [
        WrongTemplate(share=0.3), WrongTemplate(kind="opening"), WrongTemplate(kind="beginning"),
    ],
    "fillers": [
        FillerLogprobs(share=0.1), FillerLogprobs(share=0.3), FillerLogprobs(),
    ],
    "padding": [
        PaddedRows(share=0.1), PaddedRows(share=0.3, place="left"), PaddedRows(),
    ],
    "post_processed": [
        PostProcessedReplies(share=0.1, count=1), PostProcessedReplies(share=0.3),
        PostProcessedReplies(count=4),
    ],
    "injected_control": _shares(InjectedControlTokens),
    "thinking_dropped": _shares(DroppedThinking),
    "processed": [
        ProcessedLogprobs(temperature=0.8), ProcessedLogprobs(temperature=0.5),
        ProcessedLogprobs(top_p=0.8),
    ],
    "clamped": [
        ClampedLogprobs(lowest=-5.0), ClampedLogprobs(lowest=-3.0), ClampedLogprobs(lowest=-1.0),
    ],
    "quantised": [
        QuantisedLogprobs(decimals=2), QuantisedLogprobs(decimals=1), QuantisedLogprobs(decimals=0),
    ],
    "nonfinite": [
        NonfiniteLogprobs(token_share=0.002), NonfiniteLogprobs(value="-inf"),
        NonfiniteLogprobs(token_share=0.2),
    ],
    "positive": _shares(ProbabilitiesAsLogprobs),
    "zero_routes": [
        ZeroRoutes(part="layer", share=0.1), ZeroRoutes(share=0.3), ZeroRoutes(part="all"),
    ],
    "late_advantages": [
        LateAdvantages(share=0.1), LateAdvantages(share=0.3, by=-1), LateAdvantages(),
    ],
    "kernel_noise": [KernelNoise(std=0.05), KernelNoise(std=0.1), KernelNoise(std=0.3)],
    "routing_flips": [SamplingNoise(router_std=s, head_std=0.008) for s in (0.1, 0.3, 1.0)],
    "dropout": [ActiveDropout(prob=0.02), ActiveDropout(prob=0.1), ActiveDropout(prob=0.3)],
    "other_weights": [StaleWeights(lag=lag, is_honest=False) for lag in (1, 4, 16)],
    "stale": [StaleWeights(lag=lag) for lag in (1, 4, 16)],
    "adapter_not_merged": [AdapterOfUpdates(updates=n) for n in (2, 8, 32)],
    "quantised_rollout": [
        QuantisedRollout(number="int8"), QuantisedRollout(),
        QuantisedRollout(number="int4", inputs=32),
    ],
    "after_update": [ScoredAfterUpdates(updates=n) for n in (1, 2, 4)],
}  # fmt: skip
"""Cause -> its strengths, weakest first."""
CASES = [
    *(Case(cause=cause, fault=fault) for cause, faults in FAULTS.items() for fault in faults),
    *(
        Case(cause=cause, fault=fault, share=s)
        for cause, fault in {
            "ignored_sinks": IgnoredSinks(),
            "ignored_rope_scaling": IgnoredRopeScaling(theta=10_000.0),
            "wrong_positions": WrongPositions(),
            "packing_leak": PackingLeak(),
            "padding_attended": PaddingAttended(),
        }.items()
        for s in (0.1, 0.3, 1.0)
    ),
    *(Case(cause="ignored_window", fault=IgnoredWindow(), share=s) for s in (0.1, 0.3, 1.0)),
]
NEEDS_MODEL = frozenset(
    {
        "kernel_noise", "routing_flips", "ignored_sinks", "ignored_window", "dropout",
        "ignored_rope_scaling", "wrong_positions", "packing_leak", "padding_attended",
        "quantised_rollout",
        "other_weights", "adapter_not_merged", "stale", "after_update",
    }
)  # fmt: skip
"""What the two sides compute: told apart by the model at hand, and by nothing else."""
IMPOSSIBLE = {
    ("tiny-gpt-oss", "dropped_separator"): "harmony writes nothing between two messages",
    ("tiny-gpt-oss", "thinking_dropped"): "the shipped models do not think",
}
"""(player, cause) that there is not."""

PAIRS: Sequence[tuple[Case, Case]] = [
    (Case(cause=one, fault=of_one), Case(cause=other, fault=of_other))
    for one, of_one, other, of_other in (
        ("shifted", ShiftedLogprobs(share=0.3), "reencoded", RetokenizedRows(share=0.3, seed=1)),
        ("shifted", ShiftedLogprobs(share=0.3), "clamped", ClampedLogprobs(lowest=-1.0)),
        ("shifted", ShiftedLogprobs(share=0.3), "missing_final", DroppedFinalTokens()),
        ("reencoded", RetokenizedRows(share=0.5), "fillers", FillerLogprobs(share=0.2, seed=1)),
        ("rerendered", RerenderedHistory(share=0.3), "shifted", ShiftedLogprobs(share=0.3, seed=1)),
        ("rerendered", RerenderedHistory(share=0.3), "after_stop", TokensAfterStop(share=0.5)),
        ("padding", PaddedRows(share=0.3), "shifted", ShiftedLogprobs(share=0.3, seed=1)),
        ("fillers", FillerLogprobs(share=0.2), "clamped", ClampedLogprobs(lowest=-2.0)),
        ("duplicated_prompt", DuplicatedPrompt(), "fillers", FillerLogprobs(share=0.1, seed=1)),
        (
            "post_processed", PostProcessedReplies(share=0.3),
            "shifted", ShiftedLogprobs(share=0.3, seed=1),
        ),
        ("shifted", ShiftedLogprobs(share=0.1), "other_weights", StaleWeights(lag=4)),
        ("reencoded", RetokenizedRows(share=0.1), "other_weights", StaleWeights(lag=4)),
        ("clamped", ClampedLogprobs(lowest=-3.0), "dropout", ActiveDropout(prob=0.3)),
        ("quantised", QuantisedLogprobs(decimals=1), "ignored_sinks", IgnoredSinks()),
        (
            "quantised", QuantisedLogprobs(decimals=1),
            "positive", ProbabilitiesAsLogprobs(share=0.3),
        ),
    )
]  # fmt: skip
"""Two defects of one dump, in the order in which a program would have them."""


# -- what the doctor is given ----------------------------------------------------------------------


class RowsDump(Dump):
    """Rows in memory, in chunks."""

    format = "memory"

    def __init__(self, rows: Rows, facts: Facts) -> None:
        super().__init__(Path("rows"))
        self._rows, self._facts = rows, facts

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    @property
    def facts(self) -> Facts:
        return self._facts

    @property
    def has(self) -> frozenset[str]:
        known = {
            name for name in Rows.__dataclass_fields__ if getattr(self._rows, name) is not None
        }
        return frozenset(known - {"row_ids", "offsets", "token_ids", "loss_mask"})

    def chunks(self, *, max_tokens: int = CHUNK_TOKENS) -> Iterator[Rows]:
        half = len(self._rows) // 2  # more than one, as of any file that is worth asking about
        yield self._rows.take(np.arange(half))
        yield self._rows.take(np.arange(half, len(self._rows)))


def examined(player: Player, rows: Rows, level: str) -> Diagnosis:
    """What the doctor says of `rows` at one of LEVELS."""
    if level == "lean":
        rows = rows.with_(**dict.fromkeys(LEAN))
    facts = Facts(temperature=1.0, top_p=1.0, top_k=0, is_moe=player.model.config.is_moe)
    model = player.name if level == "model" else ""
    return diagnose(RowsDump(rows, facts), renderer=player.renderer, model=model)


@cache
def played(name: str, seed: int, fault: FaultConfig, num_tasks: int) -> Source:
    player = PLAYERS[name]()
    own = player.play(seed, fault=fault, num_tasks=num_tasks)
    if fault is not NOISE:
        return own
    return replace(own, earlier=player.play(seed + 1000, num_tasks=num_tasks).samples)


DRAWN = (KernelNoise, SamplingNoise, ProcessedLogprobs)
"""Faults that are in how rows are drawn."""


def dumped(name: str, seed: int, num_tasks: int, *cases: Case) -> Rows:
    """The rows of a dump with these defects."""
    drawn = [c.fault for c in cases if isinstance(c.fault, DRAWN)]
    source = played(name, seed, drawn[0] if drawn else NOISE, num_tasks)
    faults = [c.fault for c in cases if c.fault not in drawn]
    share = min((c.share for c in cases), default=1.0)
    return faulty_rows(source, *faults, share=share, seed=seed)


def k2_of(rows: Rows) -> float:
    return gap_of(rows.gap).means()["k2"]


# -- the parts -------------------------------------------------------------------------------------


def matrix(asked: Asked) -> dict[str, Any]:
    """Every cause in every strength: what is named first."""
    found: list[dict[str, Any]] = []
    floors: dict[str, list[float]] = {}
    for name in asked.players:
        floors[name] = [k2_of(dumped(name, s, asked.num_tasks)) for s in range(asked.seeds)]
        for case in CASES:
            is_asked = not asked.causes or case.cause in asked.causes
            if not is_asked or (name, case.cause) in IMPOSSIBLE:
                continue
            own: list[dict[str, Any]] = []
            for seed in range(asked.seeds):
                rows = dumped(name, seed, asked.num_tasks, case)
                k2 = k2_of(rows)
                for level in asked.levels:
                    if (level == "model") != (case.cause in NEEDS_MODEL):
                        continue
                    own.append({
                        "player": name, "cause": case.cause, "strength": case.label, "seed": seed,
                        "level": level, "k2": k2, "times_floor": k2 / floors[name][seed],
                        **verdict(examined(PLAYERS[name](), rows, level), case.cause),
                    })  # fmt: skip
            show(name, case, own)
            found += own
    return {"noise_floor_k2": floors, "cases": found, "summary": summary(found)}


def verdict(diagnosis: Diagnosis, cause: str) -> dict[str, Any]:
    named = [c.name for c, _ in diagnosis.causes]
    return {
        "named": named,
        "shares": [round(diagnosis.share_of(name), 3) for name in named],
        "is_right": bool(named) and is_same_class(named[0], cause),
        "is_found": any(is_same_class(name, cause) for name in named),
        "seconds": round(diagnosis.seconds, 3),
    }


def show(player: str, case: Case, own: Sequence[dict[str, Any]]) -> None:
    for level in LEVELS:
        of_level = [f for f in own if f["level"] == level]
        if not of_level:
            continue
        wrong = [f for f in of_level if not f["is_right"]]
        first = Counter(f["named"][0] if f["named"] else "nothing" for f in wrong)
        times = float(np.median([f["times_floor"] for f in of_level]))
        print(
            f"{player:13}{level:6}{case.cause:20}{case.label:38}{times:10.1f} x floor "
            f"{len(of_level) - len(wrong)}/{len(of_level)}"
            + (f"   named: {dict(first)}" if wrong else ""),
            flush=True,
        )


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of cases that are right, by what is to be expected of them; misses by name."""
    out: dict[str, Any] = {}
    for level in ("lean", "full or model"):
        of_level = [f for f in found if (f["level"] == "lean") == (level == "lean")]
        for name, is_large in (("moves the gap", True), ("moves few or none", False)):
            own = [f for f in of_level if (f["times_floor"] >= FACTOR) == is_large]
            out[f"{level}: {name}"] = {
                "cases": len(own),
                "right": sum(f["is_right"] for f in own),
                "found": sum(f["is_found"] for f in own),
                "missed": dict(
                    Counter(
                        f"{f['player']}: {f['cause']} {f['strength']}: "
                        f"{f['named'][0] if f['named'] else 'nothing'}"
                        for f in own
                        if not f["is_right"]
                    )
                ),
            }
    return out


# -- healthy ---------------------------------------------------------------------------------------

HEALTHY: Mapping[str, Mapping[str, Any]] = {
    "exact": {"fault": FaultConfig()},
    "dense noise 0.003": {"fault": KernelNoise(std=0.003)},
    "dense noise 0.008": {"fault": NOISE},
    "dense noise 0.02": {"fault": KernelNoise(std=0.02)},
    "bias 0.01": {"fault": KernelNoise(std=0.003, bias=0.01)},
    "bfloat16 pair": {"fault": FaultConfig(), "dtype": "bfloat16"},
    "cut turns": {"fault": NOISE, "max_turn_tokens": 12},
    "one turn": {"fault": NOISE, "max_turns": 1},
    "few rows": {"fault": NOISE, "num_tasks": 1, "group_size": 4},
    "one row of a task": {"fault": NOISE, "num_tasks": 16, "group_size": 1},
}
"""Kinds of dumps with nothing wrong: what differs from an episode of the quickstart."""


def healthy(asked: Asked) -> dict[str, Any]:
    """Dumps without a defect: which causes are named."""
    found: list[dict[str, Any]] = []
    per_kind = -(-asked.healthy // (len(HEALTHY) * len(PLAYERS)))
    for name, (kind, settings) in product(asked.players, HEALTHY.items()):
        alarms: Counter[str] = Counter()
        for seed in range(2000, 2000 + per_kind):
            rows = faulty_rows(PLAYERS[name]().play(seed, **settings))
            # Each level has its turn: the model at hand takes the most time.
            level = asked.levels[seed % len(asked.levels)]
            diagnosis = examined(PLAYERS[name](), rows, level)
            named = [c.name for c, _ in diagnosis.causes]
            alarms.update(named)
            found.append({
                "player": name, "kind": kind, "seed": seed, "level": level, "k2": k2_of(rows),
                "named": named, "seconds": round(diagnosis.seconds, 3),
            })  # fmt: skip
        own = [f for f in found if (f["player"], f["kind"]) == (name, kind)]
        clean = sum(not f["named"] for f in own)
        said = f"   named: {dict(alarms)}" if alarms else ""
        print(f"{name:13}{kind:20}{clean}/{len(own)} without a cause{said}", flush=True)
    return {
        "dumps": len(found),
        "without_a_cause": sum(not f["named"] for f in found),
        "alarms": [f for f in found if f["named"]],
    }


# -- two at once -----------------------------------------------------------------------------------


def pairs(asked: Asked) -> dict[str, Any]:
    """Two defects at once: are both named, and how far is each share from what goes away without
    it?"""
    found: list[dict[str, Any]] = []
    for name, (one, other) in product(asked.players, PAIRS):
        for seed in range(asked.seeds):
            both = dumped(name, seed, asked.num_tasks, one, other)
            whole = k2_of(both)
            needs_model = {one.cause, other.cause} & NEEDS_MODEL
            diagnosis = examined(PLAYERS[name](), both, "model" if needs_model else "full")
            named = [c.name for c, _ in diagnosis.causes]
            for case, left in ((one, other), (other, one)):
                ablated = 1 - k2_of(dumped(name, seed, asked.num_tasks, left)) / whole
                own = [n for n in named if is_same_class(n, case.cause)]
                share = sum(diagnosis.share_of(n) for n in own)
                found.append({
                    "player": name, "pair": f"{one.cause} + {other.cause}", "seed": seed,
                    "cause": case.cause, "is_named": bool(own), "named": named,
                    "share": round(share, 3), "ablated": round(ablated, 3),
                    "is_near": bool(own) and abs(share - ablated) <= SHARE_TOLERANCE,
                })  # fmt: skip
        own = [f for f in found if f["player"] == name and f["pair"].startswith(one.cause)]
        for f in own[-2:]:
            print(
                f"{name:13}{f['pair']:36}{f['cause']:20}named {f['is_named']!s:6}"
                f"share {f['share']:6.2f}  without it {f['ablated']:6.2f}  {f['named']}",
                flush=True,
            )
    return {
        "cases": found,
        "causes": len(found),
        "named": sum(f["is_named"] for f in found),
        "near": sum(f["is_near"] for f in found),
    }


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is run."""

    seeds: int = 5
    players: Sequence[str] = tuple(PLAYERS)
    levels: Sequence[str] = LEVELS
    causes: Sequence[str] = ()
    healthy: int = 500
    num_tasks: int = NUM_TASKS


PARTS: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "matrix": matrix, "healthy": healthy, "pairs": pairs,
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--healthy", type=int, default=500, metavar="DUMPS")
    parser.add_argument("--players", nargs="+", default=list(PLAYERS), choices=list(PLAYERS))
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--causes", nargs="+", default=[], metavar="CAUSE")
    words = vars(parser.parse_args())
    parts = words.pop("parts")
    asked = Asked(**words)
    for player in asked.players:
        figures: dict[str, Any] = {}
        for part in parts:
            began = time.process_time()
            figures[part] = PARTS[part](replace(asked, players=(player,)))
            figures[part]["cpu_seconds"] = round(time.process_time() - began, 1)
            text = {k: v for k, v in figures[part].items() if k not in ("cases", "alarms")}
            print(json.dumps(text, indent=2), flush=True)
            if not asked.causes:
                write(player, asked, figures)


def results(player: str) -> Path:
    return HERE / f"doctor-{player}.json"


def write(player: str, asked: Asked, figures: dict[str, Any]) -> None:
    """Each part as it is done; those that were not run again stay as they are."""
    from run import host

    path = results(player)
    before = json.loads(path.read_text())["figures"] if path.is_file() else {}
    words = f"--players {player} --seeds {asked.seeds} --healthy {asked.healthy}"
    document = {
        "part": "doctor",
        "date": datetime.now(UTC).date().isoformat(),
        "commands": [f"python docs/proof/doctor.py {words}"],
        "host": host(),
        "figures": before | figures,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
