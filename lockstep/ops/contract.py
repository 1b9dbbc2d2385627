"""What computed a number, in words, and the promise that two sides compute the same. No torch.

A `Fingerprint` is always stored, beside every sampled segment and in `environment.json`, and never
refuses anything. A contract is a named promise over fingerprints, and only it refuses. The one
contract is `true-on-policy`: the log-prob that the sampler records for a token and the one that the
trainer computes for it under the same weights are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from lockstep.errors import ContractError

ContractChoice = Literal["auto", "true-on-policy", "none"]
"""auto: take the contract if the machine can keep it, else say why not and go on without."""

TRUE_ON_POLICY = "true-on-policy"
COVERED_DTYPES = ("float32", "bfloat16", "float16")

ADVICE: dict[str, str] = {
    "ops": "sample and train over the same backend of `lockstep.ops`",
    "dtype": "let the sampler compute in the trainer's dtype",
    "kv_dtype": "hold keys and values in the dtype that the trainer computes them in",
    "kv": "drop cached keys and values with every update (`resume(kv='drop')`)",
    "adapter": "merge the adapter on both sides, or on neither",
    "tensor_parallel": "shard both sides alike",
    "device": "sample and train on one kind of device",
    "isa": "sample and train on one kind of processor",
    "libraries": "install the same versions on both sides",
}
"""What to do about a field that differs; `contract=none` corrects the gap and does not close it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that the bits of a log-prob depend on besides the weights and the tokens.

    >>> mine = Fingerprint(ops="invariant", dtype="float32", device="cpu")
    >>> Fingerprint.from_text(mine.text) == mine
    True
    """

    ops: str
    """The backend: plain, invariant or cuda."""
    dtype: str
    """What the model computes in."""
    device: str
    kv_dtype: str = ""
    """What keys and values are held in; empty: the model's dtype."""
    key_block: int = 0
    """Keys that attention sums in one piece; 0: whatever the kernel takes."""
    row_quantum: int = 1
    """Rows of a GEMM are filled up to a multiple of this."""
    head_quantum: int = 1
    """The same in attention."""
    gemm: str = "native"
    """native, or float32: products of fewer bits computed there."""
    logprobs: str = "float32 log_softmax"
    """The function that turns logits into log-probs."""
    adapter: str = "none"
    """none, merged, or applied beside the weights."""
    tensor_parallel: int = 1
    kv: str = "fresh"
    """fresh, or kept: keys and values of older weights were read."""
    isa: str = ""
    """Instruction set or compute capability."""
    libraries: str = ""
    probe: str = ""
    """Hash of a fixed small computation: what the fields above leave open."""

    @property
    def text(self) -> str:
        """One line, field=value with ; between: what is stored."""
        return ";".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """Reads `text`. Fields that it does not name have their defaults; unknown ones are an
        error, being of another version: ContractError."""
        given = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(set(given) - set(known))
        if unknown or not {"ops", "dtype", "device"} <= set(given):
            raise ContractError(
                f"{text!r} is not a fingerprint of the numerics that this version knows"
                + (f": unknown {', '.join(unknown)}." if unknown else ".")
            )
        numbers = {"key_block", "row_quantum", "head_quantum", "tensor_parallel"}
        values: dict[str, Any] = {k: int(v) if k in numbers else v for k, v in given.items()}
        return cls(**values)

    def differences(self, other: Fingerprint) -> dict[str, tuple[object, object]]:
        """field -> (mine, the other's), where they differ."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_same(mine: Fingerprint, text: str, *, what: str) -> None:
    """Raises ContractError unless the other side's fingerprint is `mine`.

    text: the other's, as it is stored. what: who the other is, for the message.
    """
    reason = why_not_same(mine, text)
    if reason:
        raise ContractError(
            f"{what} cannot be under the contract {TRUE_ON_POLICY}: {reason}. Or set "
            "contract=none: the gap is then measured and corrected."
        )


def why_not_same(mine: Fingerprint, text: str) -> str:
    """In words, the fields in which another side differs; empty if it does not."""
    if not text:
        return "it does not say what computed its log-probs (no fingerprint)"
    differing = mine.differences(Fingerprint.from_text(text))
    told = [
        f"{name} is {theirs!r} there and {ours!r} here"
        for name, (ours, theirs) in differing.items()
    ]
    advice = next((ADVICE[name] for name in differing if name in ADVICE), "")
    return "; ".join(told) + (f". To keep it, {advice}" if advice else "")


def check_rows(mine: Fingerprint, rows: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """rows: (id, the fingerprints of its sampled tokens). Raises ContractError naming the row."""
    seen: set[str] = {mine.text}
    for name, found in rows:
        for text in found or ("",):
            if text not in seen:
                check_same(mine, text, what=f"sample {name}")
                seen.add(text)
