"""Reads pickles and `torch.save` files as data: nothing that stands in one is ever called.

A pickle is a program: it names functions and says what to call them with. Here a name is looked up
in a table (`_FUNCTIONS`) of a dozen, which make arrays, dicts and inert records; any other name
ends the reading. No module is imported, no class of a trainer is made, torch is not needed.

    read_pickle(path)  -> what pickle.dump wrote
    read_torch(path)   -> what torch.save wrote, tensors as numpy arrays (bfloat16 as float32)
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

MAX_PICKLE_OPCODES = 1 << 27
"""Of one pickle: 40 million tokens as lists of numbers. Each makes at most one Python object, of
about 40 bytes; a tensor is a dozen of them, whatever its size."""

Array = npt.NDArray[Any]

_TORCH_DTYPES: Mapping[str, str] = {
    "float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "bf16",
    "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1", "uint8": "u1", "bool": "?",
}  # fmt: skip
_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""What files of torch.save began with before they were zip archives (torch 1.6)."""


class Record:
    """An object of a class that is not made here: its name, its arguments, its state. Inert."""

    __slots__ = ("args", "state")
    name: ClassVar[str] = ""

    def __new__(cls, *args: Any) -> Record:
        record = object.__new__(cls)
        record.args = args
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


def is_torch_file(path: Path) -> bool:
    """Whether the first bytes are those of a zip archive, or of torch's older format."""
    with open(path, "rb") as file:
        head = file.read(len(_OLD_TORCH))
    return head.startswith(b"PK\x03\x04") or head == _OLD_TORCH


def is_pickle(path: Path) -> bool:
    """Whether the first bytes are those of a binary pickle."""
    with open(path, "rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and 2 <= head[1] <= pickle.HIGHEST_PROTOCOL


def mentions(path: Path, words: Iterable[str]) -> bool:
    """Whether all of these stand in the pickle of a torch file: what it is of, without reading."""
    try:
        head = bytes(_Archive(_mapped(path), str(path)).member("data.pkl"))
    except (DataError, ValueError):
        return False
    return all(word.encode() in head for word in words)


def read_pickle(path: Path) -> Any:
    """What `pickle.dump` wrote: numbers, texts, lists, dicts, arrays, and `Record`s.

    Raises DataError if the file is torn, too large, or names anything that is not in the table.
    """
    return _load(_mapped(path), str(path))


def read_torch(path: Path) -> Any:
    """What `torch.save` wrote, tensors as arrays on the file (memory is used as they are read).

    Raises DataError as `read_pickle` does, and if a tensor does not fit in its storage.
    """
    return read_torch_bytes(_mapped(path), str(path))


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        if not path.stat().st_size:
            raise DataError(f"{path} is empty: nothing was written, or it was not finished.")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_torch_bytes(content: bytes | mmap.mmap, where: str) -> Any:
    """The same of a file's content. where: what to call it in an error."""
    if content[: len(_OLD_TORCH)] == _OLD_TORCH:
        raise DataError(
            f"{where} is in the format that torch.save wrote before version 1.6 (or with "
            "_use_new_zipfile_serialization=False). It is not read here: load it where it was "
            "made and save it again with torch.save."
        )
    archive = _Archive(content, where)
    return _load(bytes(archive.member("data.pkl")), where, archive.storage)


class _Archive:
    """The members of torch's zip file: stored as they are, never compressed."""

    def __init__(self, content: bytes | mmap.mmap, where: str) -> None:
        self._content = content
        self._where = where
        file = content if isinstance(content, mmap.mmap) else io.BytesIO(content)
        try:
            with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
                members = archive.infolist()
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            ValueError,
            OSError,
            struct.error,
        ) as error:
            raise DataError(
                f"{where} is no file that torch.save wrote, or is cut off ({error}). If it was "
                "being written when it was copied, copy it again."
            ) from None
        self._members = {m.filename: m for m in members}
        heads = [name for name in self._members if name.endswith("/data.pkl")]
        if len(heads) != 1:
            raise DataError(
                f"{where} is a zip archive with {len(heads)} members called data.pkl; torch.save "
                "writes one. It was not written by torch.save."
            )
        self._folder = heads[0].removesuffix("data.pkl")
        order = self._folder + "byteorder"
        self._order = ">" if order in self._members and self.member("byteorder") == b"big" else "<"

    def member(self, name: str) -> memoryview:
        found = self._members.get(self._folder + name)
        if found is None:
            raise DataError(f"{self._where}: member {name!r} is not in it: the file is damaged.")
        if found.compress_type != zipfile.ZIP_STORED:
            raise DataError(
                f"{self._where}: member {name!r} is compressed; torch.save stores plain bytes. It "
                "was packed by something else: unpack it, and save it with torch.save."
            )
        head = self._content[found.header_offset : found.header_offset + 30]
        if len(head) != 30 or head[:4] != b"PK\x03\x04":
            raise DataError(f"{self._where}: member {name!r} has no header: the file is damaged.")
        begin = found.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
        if begin + found.file_size > len(self._content):
            raise DataError(f"{self._where}: member {name!r} ends after the file: it is cut off.")
        return memoryview(self._content)[begin : begin + found.file_size]

    def storage(self, key: Any) -> Array:
        """A tensor's storage by its persistent id: [numel], read-only, on the file's own bytes."""
        if not (
            isinstance(key, tuple)
            and len(key) == 5
            and key[0] == "storage"
            and isinstance(key[1], _Storage)
            and isinstance(key[2], str)
            and isinstance(key[4], int)
        ):
            raise DataError(f"{self._where}: a persistent id that is no storage of torch's.")
        raw = self.member(f"data/{key[2]}")
        numel = len(raw) if key[1].name == "UntypedStorage" else key[4]
        values = _as_dtype(raw, _STORAGES[key[1].name], self._order)
        if values is None or len(values) != numel:
            raise DataError(
                f"{self._where}: storage {key[2]} should hold {numel} of {key[1].name}, and has "
                f"{len(raw)} bytes. The file is damaged."
            )
        return values


def _as_dtype(raw: memoryview | bytes | Array, dtype: str, order: str = "<") -> Array | None:
    """Bytes as a torch dtype; bfloat16, which numpy has not, widened to float32. None: no whole
    number of them."""
    code = _TORCH_DTYPES[dtype]
    width = 2 if code == "bf16" else np.dtype(code).itemsize
    if len(raw) % width:
        return None
    if code == "bf16":
        halves = np.frombuffer(raw, order + "u2")
        return (halves.astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, order + code)


# -- the names that a pickle may use ----------------------------------------------------------


class _Storage:
    """The class of a storage, which stands in a persistent id."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Maker:
    """What a function's name becomes: it can be called, and nothing else done with it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "_make", make)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a pickle may not change what reads it")

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)


class _Dtype:
    """A numpy dtype while its state is read."""

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
        self.values = _array(raw, dtype, shape, bool(is_fortran))


def _array(raw: Any, dtype: Any, shape: Any, is_fortran: bool) -> Array:
    """raw: the bytes, or for dtype object the list of what is in it."""
    if not isinstance(dtype, _Dtype) or not _is_shape(shape):
        raise ValueError("a numpy array without dtype or shape")
    if dtype.code[0] == "O":
        if not isinstance(raw, list) or len(raw) != prod(shape):
            raise ValueError("an array of objects whose list is shorter or longer than its shape")
        values = np.empty(len(raw), object)
        values[:] = [plain(entry) for entry in raw]
    else:
        if isinstance(raw, str):
            raw = raw.encode("latin1")
        values = np.frombuffer(raw, dtype.numpy())
    if values.size != prod(shape):
        raise ValueError(f"an array of shape {tuple(shape)} with {values.size} values")
    return values.reshape(shape, order="F" if is_fortran else "C")


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, tuple | list)
        and len(shape) <= 8
        and all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
    )


def _scalar(dtype: Any, raw: Any = b"") -> Any:
    return _array(raw, dtype, (), False)[()]


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Array:
    """torch._utils._rebuild_tensor_v2: a view on a storage."""
    if not isinstance(storage, np.ndarray) or not _is_shape(size) or not _is_shape(stride):
        raise ValueError("a tensor without storage or shape")
    if type(offset) is not int or offset < 0 or len(size) != len(stride):
        raise ValueError("a tensor whose shape and strides contradict each other")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if prod(size) and (last >= len(storage) or prod(size) > len(storage)):
        raise ValueError(
            f"a tensor of shape {tuple(size)} that is larger than its storage of {len(storage)}"
        )
    if not prod(size):
        return np.empty(size, storage.dtype)
    return np.lib.stride_tricks.as_strided(
        storage[offset:],
        tuple(size),
        tuple(step * storage.itemsize for step in stride),
        writeable=False,
    )


def _consolidated(metadata: Any, flat: Any) -> dict[str, Any]:
    """tensordict's one storage for many tensors: name -> (dtype, shape, begin, end, padding)."""
    if not isinstance(metadata, dict) or not isinstance(flat, np.ndarray) or flat.dtype != np.uint8:
        raise ValueError("a consolidated TensorDict without its storage")
    out: dict[str, Any] = {}
    for name, leaf in metadata["leaves"].items():
        dtype, shape, begin, end, padding = leaf
        code = str(dtype).removeprefix("torch.")
        if code not in _TORCH_DTYPES or not _is_shape(shape):
            raise ValueError(f"a consolidated tensor of {code}")
        if not 0 <= begin <= end - padding <= len(flat):
            raise ValueError(f"the consolidated tensor {name!r} is outside of its storage")
        values = _as_dtype(flat[begin : end - padding].tobytes(), code)
        if values is None or values.size != prod(shape):
            raise ValueError(f"the consolidated tensor {name!r} is not of its shape {shape}")
        out[name] = values.reshape(shape)
    return out


def _tensordict(_: Any, state: Any) -> dict[str, Any]:
    """tensordict's state of one: its tensors by name."""
    return dict(state["_tensordict"])


def _jagged(state: Any) -> list[Array]:
    """A nested tensor of layout jagged: one array per row."""
    values, offsets, lengths = state["values"], state["offsets"], state["lengths"]
    if lengths is not None or state["_ragged_idx"] != 1:
        raise ValueError("a nested tensor with holes, or ragged in another dimension than 1")
    if not isinstance(values, np.ndarray) or not isinstance(offsets, np.ndarray):
        raise ValueError("a nested tensor without values or offsets")
    ends = [int(end) for end in offsets]
    if ends != sorted(ends) or (ends and (ends[0] < 0 or ends[-1] > len(values))):
        raise ValueError("a nested tensor whose offsets are outside of its values")
    return [values[begin:end] for begin, end in pairwise(ends)]


def _of_type(make: Any, _type: Any, args: Any, _state: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: what `make` makes; its Python attributes are left."""
    if not isinstance(make, _Maker) or not isinstance(args, tuple):
        raise ValueError("a tensor made by something that makes no tensor")
    return make(*args)


def _latin1(text: Any, encoding: Any = "") -> bytes:
    """_codecs.encode, by which pickles of protocol 2 hold bytes."""
    if encoding != "latin1" or not isinstance(text, str):
        raise ValueError("bytes in an encoding other than latin1")
    return text.encode("latin1")


def _range(begin: Any, end: Any, step: Any) -> range:
    if any(type(n) is not int or abs(n) >= 1 << 31 for n in (begin, end, step)):
        raise ValueError("a range beyond 31 bits")
    return range(begin, end, step)


def _dict(*args: Any) -> dict[Any, Any]:
    return dict(*args[:1])


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict,
    "_codecs.encode": _latin1,
    "__builtin__.set": lambda values=(): set(values),
    "__builtin__.xrange": _range,
    "builtins.range": _range,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": _NumpyArray,
    "numpy._core.multiarray._reconstruct": _NumpyArray,
    "numpy.core.numeric._frombuffer": lambda raw, dtype, shape, order: _array(
        raw, dtype, shape, order == "F"
    ),
    "numpy._core.numeric._frombuffer": lambda raw, dtype, shape, order: _array(
        raw, dtype, shape, order == "F"
    ),
    "numpy.dtype": _Dtype,
    "tensordict._reductions._make_td": _tensordict,
    "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
}
_CLASSES = frozenset(
    {
        "verl.protocol.DataProto",
        "slime.utils.tensor_store.DiskTensorRef",
        "tensordict.tensorclass.NonTensorData",
        "tensordict.tensorclass.NonTensorStack",
        "torch._dynamo.decorators._DimRange",
        # named beside what is made of them, and never made themselves:
        "numpy.ndarray",
        "torch.Tensor",
        "torch.nested._internal.nested_tensor.NestedTensor",
        "tensordict._td.TensorDict",
        "tensordict.TensorDict",
    }
)
"""Become a `Record`."""


class _Reader(pickle.Unpickler):
    """The standard reader, whose every name comes out of the tables above."""

    def __init__(
        self, content: io.BytesIO | mmap.mmap, where: str, storage: Callable[[Any], Array] | None
    ) -> None:
        super().__init__(content)
        self._where = where
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        name = f"{module_name}.{global_name}"
        if name in _FUNCTIONS:
            return _Maker(_FUNCTIONS[name])
        if module_name in ("torch", "torch.storage") and global_name in _STORAGES:
            return _Storage(global_name)
        if name in _CLASSES:
            # A class of its own for each reading: what a pickle does to it ends with it.
            return type("Record", (Record,), {"__slots__": (), "name": name})
        raise DataError(
            f"{self._where} wants to call {name[:200]!r}. A dump holds numbers and texts only, and "
            "nothing that stands in one is run here; if this is yours, take that object out of the "
            "sample (out of its metadata, say), and save it again. If not, do not load it with "
            "torch or pickle."
        )

    def persistent_load(self, pid: Any, /) -> Any:
        if self._storage is None:
            raise DataError(f"{self._where} is a pickle with storages outside of it.")
        return self._storage(pid)


def _load(
    content: bytes | mmap.mmap, where: str, storage: Callable[[Any], Array] | None = None
) -> Any:
    _look_over(content, where)
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        return plain(_Reader(file, where, storage).load())
    except DataError:
        raise
    except (
        pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError,
        LookupError, MemoryError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise DataError(
            f"{where} holds a pickle that cannot be read as data: {str(error)[:200]}. It is cut "
            "off, damaged, or of something that no trainer's dump has."
        ) from None


def plain(value: Any) -> Any:
    """A numpy array that stands within something else, as one; anything else as it is."""
    return value.values if isinstance(value, _NumpyArray) else value


def numbers(value: Any) -> Array | None:
    """A list of numbers, a tensor or an array, as an array; None if it is something else."""
    value = plain(value)
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "biuf" else None
    if not isinstance(value, list | tuple) or not set(map(type, value)) <= {int, float, bool}:
        return None
    return np.asarray(value) if len(value) else np.empty(0)


# -- before it is read ------------------------------------------------------------------------

_LENGTHS = {
    **dict.fromkeys(b"(012NQR)}]abestu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93", 1),
    **dict.fromkeys(b"Kh\x80", 2),
    ord("M"): 3,
    **dict.fromkeys(b"Jj", 5),
    **dict.fromkeys(b"G\x95", 9),
}
"""Opcode -> bytes with its argument, where that is fixed. The textual ones of protocol 0, and those
that make instances in ways of their own, are left out: none of these trainers writes them."""
_COUNTED = {
    **dict.fromkeys(b"UC\x8a\x8c", 1),
    **dict.fromkeys(b"TBX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcode -> bytes of the count of bytes that follow it."""
_STEP = [_LENGTHS.get(code, 0) for code in range(256)]


def _look_over(content: bytes | mmap.mmap, where: str) -> None:
    """Goes over the opcodes before any is carried out: each is known, no count of bytes goes beyond
    the end, and no place of the memo is beyond how many were written (the standard reader makes
    room for what a pickle claims, before it looks)."""
    at, written, end = 0, 0, len(content)
    step = _STEP
    try:
        for _ in range(MAX_PICKLE_OPCODES):
            code = content[at]
            if length := step[code]:
                at += length
            elif code == 0x71 or code == 0x72:  # BINPUT, LONG_BINPUT
                width = 1 if code == 0x71 else 4
                place = int.from_bytes(content[at + 1 : at + 1 + width], "little")
                if place > written:
                    break
                written += place == written
                at += 1 + width
            elif code == 0x94:  # MEMOIZE
                written += 1
                at += 1
            elif code in _COUNTED:
                width = _COUNTED[code]
                at += 1 + width + int.from_bytes(content[at + 1 : at + 1 + width], "little")
                if at > end:
                    break
            elif code == 0x63:  # GLOBAL: two lines
                module = content.find(b"\n", at + 1)
                name = content.find(b"\n", module + 1) if module > 0 else -1
                if name < 0:
                    break
                at = name + 1
            elif code == 0x2E:  # STOP
                return
            else:
                break
        else:
            raise DataError(
                f"{where} holds more than {MAX_PICKLE_OPCODES} numbers and texts outside of "
                "tensors, which would all be in memory at once. Save fewer rows per file, or keep "
                "the numbers in tensors."
            )
    except IndexError:
        at = end
    raise DataError(
        f"{where} holds a pickle that is cut off or damaged (byte {min(at, end)} of {end}). If it "
        "was being written when it was copied, copy it again."
    )
