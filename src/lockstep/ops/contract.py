"""Fingerprints of numerics, and the contract that two sides compute the same bits. No torch.

A `Fingerprint` describes what computed a log-prob. It is stored with every sampled segment and in
`environment.json`, and never refuses anything. A contract refuses sides whose fingerprints differ.
The one contract is `true-on-policy`: for the same weights, the log-prob that the sampler records
for a token equals the trainer's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lockstep.errors import ContractError
from lockstep.tables import tables_beside

ContractChoice = Literal["auto", "true-on-policy", "none"]
"""auto: take the contract if this machine can keep it, else report why not and go on without."""

CHUNK = 64
"""Tokens between two states of linear attention, counted from the start of each sequence. Part of
the numerics."""
BLOCK = 16
"""Tokens of a chunk that are solved at once. Part of the numerics."""
DELTA_WORK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Device -> what the products of all pairs of tokens of several chunks may take at once."""

TRUE_ON_POLICY = "true-on-policy"
COVERED_DTYPES = ("float32", "bfloat16", "float16")

ADVICE: Mapping[str, str] = tables_beside(__file__)["advice"]
"""Field of a fingerprint -> how to make both sides equal. `contract=none` corrects the gap instead
of closing it."""


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
    """Compute dtype of the model."""
    device: str
    kv_dtype: str = ""
    """Dtype of cached keys and values; empty: the model's dtype."""
    key_block: int = 0
    """Keys that attention sums in one piece; 0: the kernel decides."""
    row_quantum: int = 1
    """Rows of a GEMM are padded to a multiple of this."""
    head_quantum: int = 1
    """Query rows of a key head are padded to a multiple of this in attention."""
    gemm: str = "native"
    """native; float32: products of two-byte types are computed in float32; or how those by large
    weights are computed over packed ones."""
    logprobs: str = "float32 log_softmax"
    """Function that turns logits into log-probs."""
    adapter: str = "none"
    """none, merged into the weights, or applied next to them."""
    tensor_parallel: int = 1
    kv: str = "fresh"
    """fresh, or kept: attention read keys and values of older weights."""
    isa: str = ""
    """Instruction set or compute capability."""
    libraries: str = ""
    probe: str = ""
    """Hash of a fixed small computation; covers what the other fields leave open."""

    @property
    def text(self) -> str:
        """One line, field=value separated by semicolons; the stored form."""
        return ";".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    @classmethod
    def from_text(cls, text: str) -> Fingerprint:
        """Parses `text`. Missing fields take their defaults. Raises ContractError for unknown
        fields: another version wrote them."""
        given = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(set(given) - set(known))
        if unknown or not {"ops", "dtype", "device"} <= set(given):
            raise ContractError(
                f"{text!r} is not a fingerprint of the numerics of this version"
                + (f": unknown {', '.join(unknown)}." if unknown else ".")
            )
        numbers = {"key_block", "row_quantum", "head_quantum", "tensor_parallel"}
        values: dict[str, Any] = {k: int(v) if k in numbers else v for k, v in given.items()}
        return cls(**values)

    def differences(self, other: Fingerprint) -> dict[str, tuple[object, object]]:
        """field -> (this value, the other's), for the fields that differ."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_same(mine: Fingerprint, text: str, *, what: str) -> None:
    """Raises ContractError unless the other side's fingerprint is `mine`.

    text: the other side's fingerprint in its stored form. what: its name in the message.
    """
    reason = why_not_same(mine, text)
    if reason:
        raise ContractError(
            f"{what} cannot be under the contract {TRUE_ON_POLICY}: {reason}. Or set "
            "contract=none: the gap is then measured and corrected."
        )


def why_not_same(mine: Fingerprint, text: str) -> str:
    """Describes the fields that differ from another side's; empty if none does."""
    if not text:
        return "it does not say what computed its log-probs (no fingerprint)"
    differing = mine.differences(Fingerprint.from_text(text))
    listed = [
        f"{name} is {theirs!r} there and {ours!r} here"
        for name, (ours, theirs) in differing.items()
    ]
    advice = next((ADVICE[name] for name in differing if name in ADVICE), "")
    return "; ".join(listed) + (f". To keep it, {advice}" if advice else "")


def check_rows(mine: Fingerprint, rows: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Raises ContractError naming the first row whose fingerprint is not `mine`. rows: (id, the
    fingerprints of its sampled tokens)."""
    seen: set[str] = {mine.text}
    for name, found in rows:
        for text in found or ("",):
            if text not in seen:
                check_same(mine, text, what=f"sample {name}")
                seen.add(text)
