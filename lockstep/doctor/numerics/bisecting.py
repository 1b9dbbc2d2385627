"""The first op that differs, of one row: between the model and what a side has run in its place, or
between the trainer's forward and the sampler's steps of the model itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.doctor.numerics.compare import Comparison, Side
from lockstep.doctor.numerics.rescore import Refusal, Rescoring
from lockstep.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from lockstep.ops.bisect import OpDifference

MAX_OPS = 6
"""That are listed: where the two part, and the first few that it spreads to."""


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """Where the two sides of a row part."""

    row: str
    pair: str
    """What was compared, in words."""
    token: int | None
    """Place in the row of the token whose forward is compared; None if nothing differs."""
    ops: tuple[OpDifference, ...] = ()
    """That differ for it, in the order of the forward."""
    text: str = ""
    """More, where the trainer's forward and the sampler's steps were compared."""

    def describe(self) -> str:
        """Lines for a terminal."""
        lines = [f"bisect      row {self.row}: {self.pair}"]
        if self.text:
            lines.append(f"            {self.text}")
        elif not self.ops:
            lines.append("            every op gives the same numbers")
        else:
            lines.append(f"            token {self.token} is the first to differ, in")
        for found in self.ops[:MAX_OPS]:
            lines.append(
                f"            {found.call}: {found.num_unequal} of {found.num_compared} numbers, "
                f"by up to {found.max_abs_diff:.3g} ({found.trainer:.6g} against "
                f"{found.sampler:.6g})"
            )
        if len(self.ops) > MAX_OPS:
            last = self.ops[-1]
            lines.append(
                f"            ... and {len(self.ops) - MAX_OPS} more, up to {last.call} by "
                f"{last.max_abs_diff:.3g}"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.row,
            "pair": self.pair,
            "token": self.token,
            "text": self.text,
            "ops": [
                asdict(found) | {"call": str(found.call), "max_abs_diff": found.max_abs_diff}
                for found in self.ops
            ],
        }


def bisect_row(model: object, row: str = "") -> Bisection:
    """Looks for the first op that differs on a row of the sample that was scored.

    model: `Diagnosis.setting.model`. row: its id; empty takes the one that deviates most. Where a
    variant of the model (no sinks, other weights, bfloat16) is what a side has there, the model is
    compared with it, over one packed forward of each. Else the model is run as the trainer does
    and as the sampler does (`ops.bisect`), which costs a rollout of the row.
    Raises ConfigError without a model, or for a row that was not scored; CapabilityError for a
    model that transformers runs.
    """
    if isinstance(model, Refusal):
        raise ConfigError(f"--bisect needs a model that can be used: {model.reason}")
    if not isinstance(model, Rescoring) or model.last is None:
        raise ConfigError("--bisect needs the model: add --model DIR, or --model own for a run.")
    comparison = model.last
    place = _place(comparison, row)
    side = _worst_side(comparison, place)
    name = side.variants[int(side.hit[place])].name if side.hit[place] >= 0 else ""
    return _bisect(model, comparison, place, side, name)


def _place(comparison: Comparison, row: str) -> int:
    rows = comparison.evidence.rows
    if row and row not in rows.row_ids:
        raise ConfigError(
            f"--bisect {row}: this row is not among the {len(rows)} that were scored, as "
            f"{rows.row_ids[0]} is. Leave the row out to take the one that deviates most."
        )
    if row:
        return rows.row_ids.index(row)
    return int(np.argmax(sum(side.k2 for side in comparison.sides.values())))


def _worst_side(comparison: Comparison, place: int) -> Side:
    return max(comparison.sides.values(), key=lambda side: side.k2[place])


def _bisect(
    model: Rescoring, comparison: Comparison, place: int, side: Side, variant: str
) -> Bisection:
    import torch

    from lockstep.models.decoder import Decoder
    from lockstep.models.hf_io import copy_decoder
    from lockstep.ops.bisect import bisect, first_difference
    from lockstep.ops.recording import with_ops
    from lockstep.ops.selftest import prove

    rows = comparison.evidence.rows
    one = rows.take([place])
    weights = model.weights_of(one)
    scorer = model.scorer
    plain = scorer.load(weights)
    if not isinstance(plain, Decoder):
        raise CapabilityError(
            f"--bisect compares ops of the decoder; {weights.name} is computed by transformers."
        )
    row_id = one.row_ids[0]
    if variant.startswith("weights ") or variant in scorer.variants_of(plain):
        text = f"the model, and the model as the {side.name} has it ({variant.replace('_', ' ')})"
        with torch.inference_mode():
            if variant.startswith("weights "):
                names = {w.name: w for w in model.weights.all}
                other = scorer.load(names[variant.removeprefix("weights ")])
                token, ops = first_difference(plain, other, one.token_ids)
            elif variant == "bfloat16":
                other = copy_decoder(plain, dtype=torch.bfloat16)
                token, ops = first_difference(plain, other, one.token_ids)
            else:
                # An adapter is switched within the model itself: each is run in its own state.
                token, ops = first_difference(
                    plain,
                    plain,
                    one.token_ids,
                    around_other=lambda: scorer.variant(variant, plain),
                )
        return Bisection(row=row_id, pair=text, token=token, ops=ops)
    # Over ops that give both sides the same bits, where the machine has them: what parts the two
    # then is in the model, and not rounding.
    with with_ops(plain, prove(plain).ops):
        parting = bisect(
            plain,
            one.token_ids,
            is_sampled=one.loss_mask & (one.position > 0),
            temperature=comparison.evidence.temperature,
            recorded=one.rollout_logprobs,
        )
    return Bisection(
        row=row_id,
        pair="the model's packed forward, as a trainer runs it, and its steps, as a sampler does",
        token=None if parting is None else parting.fed_token,
        text="nothing differs, and the record is theirs" if parting is None else parting.describe(),
    )
