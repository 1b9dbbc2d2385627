"""Reads pickles and `torch.save` files as data: nothing that a file names is ever called.

A pickle is a program: it names functions and says what to call them with. Here each name is looked
up in a table (`_FUNCTIONS`) of a dozen, which make arrays, dicts and inert records; any other name
ends the reading. No module is imported, and no class of a trainer is created. torch.load opens the
archive and its storages, with this reader in place of the pickle module.

    read_pickle(path)  -> what pickle.dump wrote
    read_torch(path)   -> what torch.save wrote, tensors as numpy arrays (bfloat16 as float32)

A hostile file can waste bounded memory, and time, as a large one does, and nothing else.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from lockstep.doctor.inputs.assemble import Array, array_of
from lockstep.doctor.inputs.places import head_of
from lockstep.errors import DataError
from lockstep.system import bounded_memory
from lockstep.tables import tables_beside

_ZIP = b"PK\x03\x04"


class Record:
    """An inert stand-in for an object of a foreign class: its name, arguments and state."""

    name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Record:
        record = object.__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


MEMORY_BYTES, EXPANSION = 4 << 30, 8
"""Memory that reading may take: this many bytes, or this many times the size of the file."""
MAX_RANGE = 1 << 20


def is_torch_file(path: Path) -> bool:
    """Says if the file begins as a zip archive."""
    return head_of(path).startswith(_ZIP)


def is_pickle(path: Path) -> bool:
    """Says if the file begins as a binary pickle."""
    return bool(re.match(rb"\x80[\x02-\x05]", head_of(path)))


def mentions(path: Path, words: Iterable[str]) -> bool:
    """Says if a torch file names all of these words, without loading it."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as packed:
                head = packed.read(MEMORY_BYTES >> 5)
    except (ValueError, OSError, zipfile.BadZipFile):
        return False
    return all(word.encode() in head for word in words)


def read_pickle(path: Path) -> Any:
    """The content of a pickle: numbers, texts, lists, dicts, arrays, and `Record`s.

    Raises DataError if the file is damaged or names anything outside of the table.
    """
    with open(path, "rb") as file:
        return _guarded(_reader(str(path))(file).load, str(path), path.stat().st_size)


def read_torch(source: Path | bytes, where: str = "") -> Any:
    """The content of a `torch.save` file, tensors as arrays. source: a file, or its bytes; where:
    its name in errors. Raises DataError as `read_pickle` does.
    """
    import torch

    where = where or str(source)
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    head = source[:16] if isinstance(source, bytes) else head_of(source)
    if not head.startswith(_ZIP):
        raise DataError(
            f"{where} is no file that torch.save wrote, or is empty or cut off. If it was being "
            "written when it was copied, copy it again."
        )
    # The reader below is the guard, in place of weights_only: it builds arrays, not tensors.
    module: Any = SimpleNamespace(Unpickler=_reader(where), __name__="lockstep")
    options = {"map_location": "cpu", "pickle_module": module, "weights_only": False}
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    return _guarded(lambda: torch.load(file, **options), where, size)


def _guarded(load: Callable[[], Any], where: str, size: int) -> Any:
    """size: bytes of the file."""
    try:
        with bounded_memory(max(MEMORY_BYTES, EXPANSION * size)):
            return plain(load())
    except DataError:
        raise
    except Exception as error:  # a damaged pickle raises any of twenty kinds
        reason = " ".join(str(error).split())[:200] or f"{type(error).__name__}: it expands"
        raise DataError(
            f"{where} cannot be read as data: {reason}. It is cut off, damaged, or holds something "
            "that no trainer's dump has. If it was being written when it was copied, copy it again."
        ) from None


def plain(value: Any) -> Any:
    """A numpy array inside of a pickle, as one; anything else as it is."""
    return value.values if isinstance(value, _NumpyArray) else value


# -- the names that a pickle may use ----------------------------------------------------------


class _Maker:
    """Stand-in for a function that a pickle names: an object that can only be called."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a pickle may not change the program that reads it")

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)


class _Dtype:
    """A numpy dtype while its state is read: numpy's own would let a pickle change it."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any = "", *_: Any) -> None:
        if not isinstance(code, str) or code[:1] not in "biufOUS" or not code[1:].isdigit():
            raise ValueError(f"a numpy dtype {code if isinstance(code, str) else type(code)!r}")
        self.code = code
        self.order = "<"

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 3 or any(state[2:5]):
            raise ValueError("a numpy dtype with fields")
        self.order = ">" if state[1] == ">" else "<"

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.code if self.code[0] in "O" else self.order + self.code)


class _NumpyArray:
    """A numpy array while its state is read."""

    __slots__ = ("values",)

    def __init__(self, *_: Any) -> None:
        self.values: Array = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        self.values = _array(raw, dtype, shape, "F" if is_fortran else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> Array:
    """raw: bytes, or a list of the entries if the dtype is object."""
    if not isinstance(dtype, _Dtype):
        raise ValueError("a numpy array without dtype")
    if dtype.code[0] == "O":
        values = np.empty(len(raw), object)
        values[:] = [plain(entry) for entry in raw]
    else:
        raw = raw.encode("latin1") if isinstance(raw, str) else raw
        values = np.frombuffer(raw, dtype.numpy())
    return values.reshape(tuple(shape), order="F" if order == "F" else "C")


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Array | Record:
    """torch._utils._rebuild_tensor_v2, as a numpy array. torch checks the bounds. A tensor among
    other objects, such as a row's images, has a `Record` as its storage, and stays one."""
    import torch

    if isinstance(storage, Record):
        return storage
    tensor = torch.empty(0, dtype=storage.dtype).set_(
        storage._untyped_storage, offset, tuple(size), tuple(stride)
    )
    return array_of(tensor)


def _consolidated(metadata: Any, flat: Any) -> dict[str, Any]:
    """tensordict's one storage for many tensors: name -> (dtype, shape, begin, end, padding)."""
    import torch

    out: dict[str, Any] = {}
    for name, (dtype, shape, begin, end, padding) in metadata["leaves"].items():
        kind, raw = getattr(torch, str(dtype).removeprefix("torch.")), flat[begin : end - padding]
        values = torch.from_numpy(np.array(raw)).view(kind)
        out[name] = array_of(values.reshape(tuple(shape)))
    return out


def _jagged(state: Any) -> list[Array]:
    """A nested tensor of layout jagged, as one array per row."""
    values, offsets = state["values"], state["offsets"]
    if state["lengths"] is not None or state["_ragged_idx"] != 1:
        raise ValueError("a nested tensor with holes, or ragged in another dimension than 1")
    return [values[begin:end] for begin, end in pairwise(map(int, offsets))]


def _of_type(make: Any, _type: Any, args: Any, _state: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: the result of `make`, without Python attributes."""
    if not isinstance(make, _Maker):
        raise ValueError("a tensor built by something that builds no tensor")
    return make(*args)


def _skyrl_batch(_: Any, state: Any) -> dict[str, Any]:
    """SkyRL's TensorBatch, whose tensors are bytes: its columns, and the prompt of each row by
    number, without the rows at its end that only fill it."""
    about, columns = state["metadata"], dict[str, Any]()
    size = state["batch_size"] - about.get("pad_size", 0)
    for name, packed in state["batch_dict"].items():
        if packed is None or packed["format"] == "tensor_list":  # images
            continue
        raw = packed["data"]
        if packed["format"] == "torch":
            columns[name] = read_torch(raw, name)[:size]
        else:
            columns[name] = np.frombuffer(raw, packed["dtype"]).reshape(packed["shape"])[:size]
    ends = [end for _, end in about.get("policy_prompt_boundaries", ())]
    columns["prompt"] = np.searchsorted(ends, np.arange(size), "right") if ends else None
    return columns


def _range(*args: int) -> range:
    if len(found := range(*args)) > MAX_RANGE:
        raise ValueError("a range that expands")
    return found


def _latin1(text: str, encoding: str = "") -> bytes:
    """_codecs.encode: pickles of protocol 2 hold bytes in this form."""
    if encoding != "latin1":
        raise ValueError("bytes in an encoding other than latin1")
    return text.encode("latin1")


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda *args: dict(*args[:1]),
    "_codecs.encode": _latin1,
    "__builtin__.set": lambda values=(): set(values),
    "__builtin__.xrange": _range,
    "builtins.range": _range,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.storage._load_from_bytes": lambda _: Record(),
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    "torch.device": lambda *_: None,
    "skyrl.backends.skyrl_train.training_batch._rebuild_tensor_batch": _skyrl_batch,
    **{
        f"numpy.{core}.{name}": make
        for core in ("core", "_core")
        for name, make in (
            ("multiarray.scalar", lambda dtype, raw=b"": _array(raw, dtype, (), "C")[()]),
            ("multiarray._reconstruct", _NumpyArray),
            ("numeric._frombuffer", _array),
        )
    },
    "numpy.dtype": _Dtype,
    "tensordict._reductions._make_td": lambda _, state: dict(state["_tensordict"]),
    "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
}
_CLASSES = frozenset(tables_beside(__file__)["classes"])
"""Classes that become a `Record`."""


def _reader(where: str) -> type[pickle.Unpickler]:
    """The standard reader, with every name looked up in the tables above. torch.load derives its
    own from it, which answers the names of storages."""

    class Reader(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str, /) -> Any:
            name = f"{module_name}.{global_name}"
            if name in _FUNCTIONS:
                return _Maker(_FUNCTIONS[name])
            if name in _CLASSES:
                # A class of its own for each reading, so that no reading can change another.
                return type("Record", (Record,), {"name": name})
            raise DataError(
                f"{where} wants to call {name[:200]!r}, and nothing in a dump is run here. If it "
                "is yours, save it without that object (in its metadata?); if not, do not load it."
            )

    return Reader
