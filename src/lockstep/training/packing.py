"""Rows into micro-batches, without padding, and values per token back into rows.

The shift from "position t" to "predicts token t + 1" happens here, in `shift`, and nowhere else.

# T distinct tokens of a micro-batch  N trained tokens of it  R rows of it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.errors import AlignmentError, ConfigError, TokenError
from lockstep.ops.context import PackedContext, Support
from lockstep.ops.transfer import to_device
from lockstep.training.forest import plan_forest, share_beginnings, sort_rows
from lockstep.types import COLUMNS, UNKNOWN_EXPERT, Int64Array, Ragged, Sample, listed_ids

if TYPE_CHECKING:
    from lockstep.launch.ranks import Ranks

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedBatch:
    """The whole rows of one micro-batch, without padding, and which of their tokens are trained.

    A row's input ends where its last trained token is predicted; later tokens are not read.
    A common beginning of rows (the prompt of a group, the shared turns of a tree) is computed once:
    attention is causal, so its hidden states are the same, and its gradients add up. Cost is linear
    in distinct tokens.

    Two rows that share the prompt 7 8; their last tokens are trained:

    >>> mask = np.array([False, False, True])
    >>> rows = [Sample(f"t/{i}", np.array([7, 8, i], np.int32), mask) for i in (5, 6)]
    >>> (batch,) = pack(rows, [[0, 1]])
    >>> batch.ids.tolist(), batch.predictors.tolist(), batch.targets.tolist(), batch.row.tolist()
    ([7, 8], [1, 1], [5, 6], [0, 1])
    >>> [(row, places.tolist(), values.tolist())
    ...  for row, places, values in batch.unpack(torch.tensor([-0.5, -0.7]))]
    [(0, [2], [-0.5]), (1, [2], [-0.699999988079071])]
    """

    rows: tuple[int, ...]
    """[R]: the row's index among the samples that were packed."""
    ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: each token's place in its own row."""
    context: PackedContext
    predictors: Tensor
    """[N] int64 into T: where a trained token is predicted. Only these reach the log-prob head."""
    targets: Tensor
    """[N] int64: the ids of the trained tokens."""
    row: Tensor
    """[N] int64 in [0, R): the row of each trained token."""
    columns: dict[str, Tensor]
    """name -> [N, ...]: the samples' dense columns at the trained tokens."""
    host_columns: dict[str, Tensor]
    """The same columns on the host, so that no decision about a token waits for the device."""
    ragged: dict[str, Ragged]
    """name -> N entries: the ragged ones, on the host."""
    places: tuple[Int64Array, ...]
    """Per row: indices of its trained tokens in `Sample.token_ids`, for `unpack`."""
    inputs: tuple[Int64Array, ...]
    """Per row: the tokens fed to the model, as indices into T."""
    routes: Tensor | None = None
    """[T, layers, active] int16: the experts to replay, UNKNOWN_EXPERT where the router chooses."""
    num_routed: int = 0
    """Number of the T tokens that have routes to replay."""
    is_filler: bool = False
    """True if it only keeps this rank in step with the others; another micro-batch reports its
    rows."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> Int64Array:
        """[R] int64 on the host: trained tokens of each row."""
        return np.array([len(p) for p in self.places], np.int64)

    @property
    def support(self) -> Support | None:
        """The ids that each trained token was drawn from; None where nothing was cut."""
        found = self.ragged.get("support")
        return None if found is None else Support.of(found, device=self.targets.device)

    def unpack(self, values: Tensor) -> Iterable[tuple[int, Int64Array, npt.NDArray[Any]]]:
        """(row, places, values) for each row: [N] values at the tokens' own indices."""
        array = values.detach().cpu().numpy()
        ends = np.cumsum([len(p) for p in self.places])[:-1]
        yield from zip(self.rows, self.places, np.split(array, ends), strict=True)


def shift(loss_mask: npt.NDArray[np.bool_]) -> tuple[Int64Array, Int64Array]:
    """(predictors, targets) of one row: token `targets[i]` is predicted at `predictors[i]`.

    >>> [x.tolist() for x in shift(np.array([False, False, True, True, False]))]
    [[1, 2], [2, 3]]
    """
    targets = np.flatnonzero(loss_mask)
    return targets - 1, targets


def check_readable(samples: Sequence[Sample], *, vocab_size: int, max_positions: int) -> None:
    """Raises TokenError naming the first row that a model of this size cannot read."""
    for sample in samples:
        where, size = f"sample {sample.id}", len(sample)
        if size > max_positions:
            raise TokenError(
                f"{where} has {size} tokens, the model's positions end at {max_positions}. Lower "
                "the tokens of an episode."
            )
        ids = [("token", sample.token_ids)]
        if (support := sample.ragged.get("support")) is not None:
            ids.append(("support entry", listed_ids(support)))
        for name, values in ids:
            if (is_beyond := values >= vocab_size).any():
                at = int(np.argmax(is_beyond))
                raise TokenError(
                    f"{where}: {name} {at} has the id {int(values[at])}, the model's vocabulary "
                    f"ends at {vocab_size - 1}. Another model's tokenizer?"
                )


def plan_microbatches(
    samples: Sequence[Sample],
    max_tokens: int,
    *,
    routes: Sequence[npt.NDArray[np.int16]] | None = None,
    num_ranks: int = 1,
    apart: Collection[int] = (),
) -> list[list[int]]:
    """The rows of each micro-batch: every row with something to train, once. See `plan_forest`.

    routes: as for `pack`. apart: rows that share no micro-batch with others. Raises ConfigError
    naming the row that is longer than `max_tokens`.
    """
    rows: dict[int, npt.NDArray[np.int32]] = {}
    for i, sample in enumerate(samples):
        if not sample.num_trained:
            continue
        if len(sample) > max_tokens:
            raise ConfigError(
                f"sample {sample.id} has {len(sample)} tokens, "
                f"max_tokens_per_microbatch is {max_tokens}, and a row is never split. Raise it to "
                f"at least {len(sample)}, or lower the tokens of an episode."
            )
        rows[i] = _inputs(sample)
    plan: list[list[int]] = []
    for is_apart in (False, True):
        chosen = {i: ids for i, ids in rows.items() if (i in apart) == is_apart}
        parts = plan_forest(
            chosen,
            {i: samples[i].num_trained for i in chosen},
            max_tokens,
            routes=None if routes is None else {i: routes[i][: len(chosen[i])] for i in chosen},
            num_ranks=num_ranks,
        )
        plan += [part.rows for part in parts]
    return plan


def count_inputs(samples: Sequence[Sample]) -> tuple[int, int]:
    """(tokens that the model reads of these rows, distinct ones of them)."""
    rows = [_inputs(sample) for sample in samples if sample.num_trained]
    num_tokens = sum(map(len, rows))
    return num_tokens, num_tokens - sum(sort_rows(rows)[1])


def _inputs(sample: Sample) -> npt.NDArray[np.int32]:
    """The tokens that the model reads: all before the last trained token."""
    return sample.token_ids[: int(sample.loss_mask.nonzero()[0][-1])]


def deal(
    plan: Sequence[Sequence[int]], rank: int, num_ranks: int
) -> list[tuple[Sequence[int], bool]]:
    """(rows, is_filler) of one rank's share of a plan. Ranks compute in step and need equal numbers
    of micro-batches; a rank that is short runs its last one again as a filler.

    >>> [[rows for rows, _ in deal([[0], [1, 2], [3]], rank, 2)] for rank in (0, 1)]
    [[[0], [3]], [[1, 2], [3]]]
    """
    share = [(rows, False) for rows in plan[rank::num_ranks]]
    is_short = len(plan) % num_ranks > 0 and rank >= len(plan) % num_ranks
    return [*share, (plan[-1], True)] if is_short else share


def split_updates(samples: Sequence[Sample], num_updates: int) -> list[list[Sample]]:
    """The rows of each optimizer step: whole rows, dealt in turn so that shares are alike.

    Rows of one trajectory or group go to different updates. Empty shares are left out.
    """
    return [part for i in range(num_updates) if (part := list(samples[i::num_updates]))]


def pack(
    samples: Sequence[Sample],
    plan: Sequence[Sequence[int]],
    *,
    device: torch.device | str = "cpu",
    routes: Sequence[npt.NDArray[np.int16]] | None = None,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[PackedBatch]:
    """The micro-batches of `plan`, columns moved by index without knowing their names. Each is
    made when it is asked for: on a GPU, while the one before is computed.

    routes: [T, layers, active] per sample, the experts to replay. rank, num_ranks: that rank's
    share of the micro-batches only, see `deal`.

    Raises AlignmentError if the samples have different columns, or if the plan loses or doubles a
    row that has something to train.
    """
    names = _column_names(samples[0]) if samples else []
    for sample in samples:
        if ({*_column_names(sample)} ^ {*names}) - {"logprobs"}:  # a result of the first update
            raise AlignmentError(
                f"sample {sample.id} has the columns {_column_names(sample)}, sample "
                f"{samples[0].id} has {names}: rows of one batch have the same columns."
            )
    packed = sorted(row for rows in plan for row in rows)
    expected = [row for row, sample in enumerate(samples) if sample.num_trained]
    if packed != expected:
        raise AlignmentError(
            f"rows {expected} have tokens that are marked as trained, but the plan packs {packed}: "
            "each of them once, and no others."
        )
    return (
        _pack_rows(samples, rows, device, routes, is_filler=is_filler)
        for rows, is_filler in deal(plan, rank, num_ranks)
    )


def _column_names(*samples: Sample) -> list[str]:
    """Columns of trained tokens that all of them have. Routes belong to inputs and are passed
    separately."""
    shared = set[str].intersection(*({*s.columns, *s.ragged} for s in samples))
    return sorted(name for name in shared if not COLUMNS[name].is_of_inputs)


def _pack_rows(
    samples: Sequence[Sample],
    rows: Sequence[int],
    device: torch.device | str,
    routes: Sequence[npt.NDArray[np.int16]] | None,
    *,
    is_filler: bool,
) -> PackedBatch:
    chosen = [samples[i] for i in rows]
    shifted = [shift(s.loss_mask) for s in chosen]
    places = tuple(targets for _, targets in shifted)
    inputs = [_inputs(sample) for sample in chosen]
    fed = None
    if routes is not None:
        fed = [routes[i][: len(ids)] for i, ids in zip(rows, inputs, strict=True)]
    index, ids, positions = share_beginnings(inputs, fed)
    packed_routes = None
    if fed is not None:
        packed_routes = np.empty((len(ids), *fed[0].shape[1:]), np.int16)
        for at, of_row in zip(index, fed, strict=True):
            packed_routes[at] = of_row

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return to_device(np.ascontiguousarray(array), device)

    def at_targets(arrays: Iterable[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate([a[p] for a, p in zip(arrays, places, strict=True)])

    columns = {
        name: at_targets(s.columns[name] for s in chosen)
        for name in _column_names(*chosen)
        if name in chosen[0].columns
    }
    return PackedBatch(
        rows=tuple(rows),
        ids=tensor(ids).long(),
        positions=tensor(positions),
        context=PackedContext.of_rows(index, device=device),
        predictors=tensor(np.concatenate([i[p] for i, (p, _) in zip(index, shifted, strict=True)])),
        targets=tensor(at_targets(s.token_ids for s in chosen)).long(),
        row=tensor(np.repeat(np.arange(len(rows)), [len(p) for p in places])),
        columns={name: tensor(values) for name, values in columns.items()},
        host_columns={name: torch.from_numpy(values) for name, values in columns.items()},
        ragged={
            name: Ragged.concatenate(
                [s.ragged[name].take(p) for s, p in zip(chosen, places, strict=True)]
            )
            for name in sorted(chosen[0].ragged)
        },
        places=places,
        inputs=tuple(index),
        routes=None if packed_routes is None else tensor(packed_routes),
        num_routed=0 if packed_routes is None else int(is_routed(packed_routes).sum()),
        is_filler=is_filler,
    )


def is_routed(routes: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """[T] bool: which positions of [T, layers, active] have routes."""
    return routes[:, 0, 0] != UNKNOWN_EXPERT


def unpack_rows(
    samples: Sequence[Sample],
    parts: Sequence[tuple[PackedBatch, Tensor]],
    *,
    ranks: Ranks | None = None,
    fill: float = float("nan"),
) -> list[npt.NDArray[np.float32]]:
    """[N, ...] values of micro-batches as [T, ...] float32 per sample, `fill` where nothing is
    trained.

    ranks: each row's values come from one of them, and all get them. Collective.
    """
    shape = parts[0][1].shape[1:] if parts else ()
    out = [np.full((len(s), *shape), fill, np.float32) for s in samples]
    mine: set[int] = set()
    for batch, values in parts:
        if batch.is_filler:
            continue
        mine.update(batch.rows)
        for row, places, of_row in batch.unpack(values):
            out[row][places] = of_row
    if ranks is None or not samples:
        return out
    flat = np.concatenate(
        [
            values[s.loss_mask] if i in mine else np.zeros((s.num_trained, *shape), np.float32)
            for i, (s, values) in enumerate(zip(samples, out, strict=True))
        ]
    )
    found = torch.from_numpy(flat).to(ranks.device)
    ranks.sum_data(found)  # one rank's value and zeros: exact
    ends = np.cumsum([s.num_trained for s in samples])[:-1]
    for s, values, of_row in zip(samples, out, np.split(found.cpu().numpy(), ends), strict=True):
        values[s.loss_mask] = of_row
    return out
