"""The doctor's own columns: one row per training row, in Parquet or as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from lockstep.config import from_dict
from lockstep.doctor.inputs.base import Facts
from lockstep.errors import ConfigError, DataError
from lockstep.tables import tables_beside

HEAD = "lockstep.doctor"
"""Key of the facts: in the metadata of a Parquet file, in the first line of a JSONL file."""
VERSION = 1
"""Version of the schema. A reader refuses a file that is newer than itself."""

Shape = Literal["token", "row", "token or row", "turn", "route", "text", "messages"]
_DEPTHS: Mapping[Shape, int] = {"token": 1, "token or row": 1, "turn": 2, "route": 3}
"""Levels of lists of a shape."""
_LISTS: Mapping[Shape, str] = {
    "token": "a list of ",
    "token or row": "a list of ",
    "turn": "a list per reply of ",
    "route": "lists per token and layer, equally long at all tokens, of ",
}
_KINDS = {"f": "numbers", "i": "whole numbers", "b": "true or false (or 1 and 0)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the file, as columns.toml declares it."""

    name: str
    """Name in the file."""
    shape: Shape
    dtype: str = ""
    fill: float | int | None = None
    field: str = ""
    """Name in `Rows`."""
    often_called: tuple[str, ...] = ()

    @property
    def arrow_type(self) -> pa.DataType:
        """The type that is written. Any type that holds the same values is read."""
        kind = pa.from_numpy_dtype(self.dtype) if self.dtype else pa.string()
        for _ in range(_DEPTHS.get(self.shape, 0)):
            kind = pa.list_(kind)
        return kind

    @property
    def expected(self) -> str:
        return f"{_LISTS.get(self.shape, '')}{_KINDS[np.dtype(self.dtype).kind]}"


BY_NAME: Mapping[str, Column] = {
    name: Column(**{"name": name, "field": name} | told)
    for name, told in tables_beside(__file__, "columns.toml").items()
}
COLUMNS = tuple(BY_NAME.values())
REQUIRED = ("token_ids", "loss_mask")


# -- facts -----------------------------------------------------------------------------------------


def facts_to_dict(facts: Facts) -> dict[str, Any]:
    """The JSON form, without unknown facts."""
    known = {n: value for n, value in asdict(facts).items() if value not in (None, "", frozenset())}
    return {"version": VERSION, **known} | {"stop_ids": sorted(facts.stop_ids)}


def facts_from_dict(source: object, where: str) -> Facts:
    """Inverse of `facts_to_dict`. Raises DataError, which begins with `where`."""
    if not isinstance(source, dict):
        raise DataError(f"{where}: expected a JSON object of facts, found {source!r:.40}.")
    facts = {name: value for name, value in source.items() if value is not None}
    version, stop_ids = facts.pop("version", VERSION), facts.pop("stop_ids", [])
    if type(version) is not int or version > VERSION:
        found = f"{where}: its schema is of version {version!r:.40}"
        raise DataError(f"{found}; this Lockstep reads up to {VERSION}.")
    if not isinstance(stop_ids, list) or not all(type(i) is int for i in stop_ids):
        raise DataError(f"{where}: stop_ids must be a list of ids, found {stop_ids!r:.40}.")
    try:
        return replace(from_dict(Facts, facts), stop_ids=frozenset(stop_ids))
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None
