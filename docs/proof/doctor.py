"""Does the doctor name each cause of its own? Dumps whose defect is known.

    python docs/proof/doctor.py                                        `make proof` runs it
    python docs/proof/doctor.py --seeds 1 --causes shifted reencoded   less of it

Every cause in three strengths, with several seeds: is the cause that is named first the right one,
by the classes of `causes.py`? doctor_wild.py asks the same of foreign programs, and about pairs of
defects and healthy dumps.

Rows are episodes that a model really sampled; `faulty_dumps.py` makes dumps of them. In every dump
the two sides differ by dense noise besides, as two engines do. A dump of that noise alone says
which gaps are too small to be found. The result is doctor.json, misses by name.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import doctor_faults  # noqa: F401  its faults are known to parse_fault
import numpy as np
import torch
from example import sampled_groups
from faulty_dumps import Source, faulty_rows, sampled_by

from lockstep.config import resolve
from lockstep.doctor.causes import is_same_class
from lockstep.doctor.diagnose import diagnose
from lockstep.doctor.diagnosis import Diagnosis
from lockstep.doctor.gap import gap_of
from lockstep.doctor.inputs.base import CHUNK_TOKENS, Dump, Facts
from lockstep.doctor.rows import Rows
from lockstep.recipes import find_recipe
from lockstep.run.build import build
from lockstep.run.preflight import preflight
from lockstep.testing.faults import FaultConfig, injected, parse_fault
from lockstep.testing.faults.sides import KernelNoise, ProcessedLogprobs, SamplingNoise
from lockstep.training.rows import rows_for_training

MODEL = "tiny-gpt-oss"
Figures = dict[str, Any]
NUM_TASKS, GROUP_SIZE = 8, 8
"""64 rows in a dump: a small step. Larger ones are easier."""
NOISE = KernelNoise(std=0.008)
"""Between the two sides of every dump: what is told of two engines on a large dense model
(docs/doctor-causes.md): a mean difference of 0.002."""
FACTOR = 3.0
"""Times the noise floor's k2 from which on a cause must be found."""

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


@cache
def played(seed: int, fault: FaultConfig) -> Source:
    """Episodes of the quickstart as training rows. fault: of the engine that draws them."""
    noisy = NOISE if isinstance(fault, ProcessedLogprobs) else fault
    if isinstance(noisy, KernelNoise | SamplingNoise):
        noisy = replace(noisy, seed=seed)
    settings = [f"model={MODEL}", "contract=none", f"seed={seed}"]
    config = resolve(find_recipe("quickstart"), settings)
    with injected(noisy):
        parts = build(config, preflight(config))
    engine = parts.engine
    if isinstance(fault, ProcessedLogprobs):
        engine = fault.processing(engine)
    groups = sampled_groups(
        config, parts, engine, num_tasks=NUM_TASKS, group_size=GROUP_SIZE, record_routes=True
    )
    tokenizer = parts.renderer.tokenizer
    samples = rows_for_training(groups, config.advantage, control_ids=tokenizer.control_ids)
    trajectories = {t.id: t for g in groups for t in g.trajectories}
    leaves = {s.id: (trajectories[s.id.rpartition("/")[0]], int(s.id.rpartition("/")[2]))
              for s in samples}  # fmt: skip
    model = parts.trainer.model
    return Source(
        model=model, renderer=parts.renderer, samples=samples, sampler=sampled_by(noisy, model),
        messages={name: t.messages(leaf) for name, (t, leaf) in leaves.items()},
        rewards={name: t.rewards[leaf] for name, (t, leaf) in leaves.items()},
        earlier=played(seed + 1000, fault).samples if fault is NOISE and seed < 1000 else (),
    )  # fmt: skip


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


PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CASES = [
    *(
        Case(cause=cause, fault=parse_fault(text))
        for cause, texts in PLAN["faults"].items()
        for text in texts
    ),
    *(
        Case(cause=cause, fault=parse_fault(text), share=share)
        for cause, text in PLAN["faults_of_rows"].items()
        for share in (0.1, 0.3, 1.0)
    ),
]


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


def examined(rows: Rows, level: str) -> Diagnosis:
    """What the doctor says of `rows` at one of LEVELS."""
    if level == "lean":
        rows = rows.with_(**dict.fromkeys(LEAN))
    facts = Facts(temperature=1.0, top_p=1.0, top_k=0, is_moe=True)
    model = MODEL if level == "model" else ""
    return diagnose(RowsDump(rows, facts), renderer=played(0, NOISE).renderer, model=model)


DRAWN = (KernelNoise, SamplingNoise, ProcessedLogprobs)
"""Faults that are in how rows are drawn."""


def dumped(seed: int, case: Case | None = None) -> Rows:
    """The rows of a dump with this defect, or without."""
    if case is None:
        return faulty_rows(played(seed, NOISE), seed=seed)
    if isinstance(case.fault, DRAWN):
        return faulty_rows(played(seed, case.fault), share=case.share, seed=seed)
    return faulty_rows(played(seed, NOISE), case.fault, share=case.share, seed=seed)


def k2_of(rows: Rows) -> float:
    return gap_of(rows.gap).means()["k2"]


# -- the matrix ------------------------------------------------------------------------------------


def matrix(num_seeds: int, levels: Sequence[str], causes: Sequence[str]) -> Figures:
    """Every cause in every strength: what is named first."""
    found: list[Figures] = []
    floors = [k2_of(dumped(seed)) for seed in range(num_seeds)]
    for case in CASES:
        if (causes and case.cause not in causes) or case.cause in PLAN["impossible"]:
            continue
        own: list[Figures] = []
        for seed in range(num_seeds):
            rows = dumped(seed, case)
            k2 = k2_of(rows)
            for level in levels:
                if (level == "model") != (case.cause in PLAN["needs_model"]):
                    continue
                own.append({
                    "cause": case.cause, "strength": case.label, "seed": seed,
                    "level": level, "k2": k2, "times_floor": k2 / floors[seed],
                    **verdict(examined(rows, level), case.cause),
                })  # fmt: skip
        show(case, own)
        found += own
    return {"noise_floor_k2": floors, "cases": found, "summary": summary(found)}


def verdict(diagnosis: Diagnosis, cause: str) -> Figures:
    named = [c.name for c, _ in diagnosis.causes]
    return {
        "named": named,
        "shares": [round(diagnosis.share_of(name), 3) for name in named],
        "is_right": bool(named) and is_same_class(named[0], cause),
        "is_found": any(is_same_class(name, cause) for name in named),
        "seconds": round(diagnosis.seconds, 3),
    }


def show(case: Case, own: Sequence[Figures]) -> None:
    for level in LEVELS:
        of_level = [f for f in own if f["level"] == level]
        if not of_level:
            continue
        wrong = [f for f in of_level if not f["is_right"]]
        first = Counter(f["named"][0] if f["named"] else "nothing" for f in wrong)
        times = float(np.median([f["times_floor"] for f in of_level]))
        print(
            f"{level:6}{case.cause:20}{case.label:38}{times:10.1f} x floor "
            f"{len(of_level) - len(wrong)}/{len(of_level)}"
            + (f"   named: {dict(first)}" if wrong else ""),
            flush=True,
        )


def summary(found: Sequence[Figures]) -> Figures:
    """Shares of cases that are right, by level and by the size of the gap; misses by name."""
    out: Figures = {}
    for is_lean, is_large in product((True, False), (True, False)):
        own = [
            f for f in found
            if (f["level"] == "lean") == is_lean and (f["times_floor"] >= FACTOR) == is_large
        ]  # fmt: skip
        level = "lean" if is_lean else "full or model"
        out[f"{level}: {'moves the gap' if is_large else 'moves few or none'}"] = {
            "cases": len(own),
            "right": sum(f["is_right"] for f in own),
            "found": sum(f["is_found"] for f in own),
            "missed": dict(
                Counter(
                    f"{f['cause']} {f['strength']}: {f['named'][0] if f['named'] else 'nothing'}"
                    for f in own
                    if not f["is_right"]
                )
            ),
        }
    return out


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--causes", nargs="+", default=[], metavar="CAUSE")
    words = parser.parse_args()
    began = time.process_time()
    found = matrix(words.seeds, words.levels, words.causes)
    print(json.dumps(found["summary"], indent=2), flush=True)
    if not words.causes:
        from run import store

        seconds = {"cpu_seconds": round(time.process_time() - began, 1)}
        command = f"python docs/proof/doctor.py --seeds {words.seeds}"
        store("doctor", {"commands": [command], "figures": found | seconds})


if __name__ == "__main__":
    main()
