"""Pickles are read as data: arrays as they were saved, and nothing of them is run."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.doctor.inputs.assemble import floats_of, ids_of, numbers
from lockstep.doctor.inputs.pickles import (
    MEMORY_BYTES,
    Record,
    is_pickle,
    is_torch_file,
    read_pickle,
    read_torch,
)
from lockstep.errors import DataError


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Own:
    """A class of the user's."""


def save(value, path: Path, **options) -> Path:
    torch.save(value, path, **options)
    return path


def repacked(path: Path, change) -> Path:
    """The same zip archive with members as `change(name, bytes)` gives them."""
    out = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            new.writestr(member.filename, change(member.filename, old.read(member)))
    return out


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
     torch.int16, torch.int8, torch.uint8, torch.bool],
)  # fmt: skip
def test_tensors_of_every_type_are_read_as_torch_wrote_them(tmp_path, dtype):
    tensor = torch.tensor([[0, 1, 0], [1, 1, 3]]).to(dtype)
    [read] = read_torch(save([tensor.t()[1:]], tmp_path / "a.pt"))
    expected = tensor.float() if dtype is torch.bfloat16 else tensor
    assert np.array_equal(read, expected.t()[1:].numpy())
    assert read.dtype == expected.numpy().dtype


def test_the_rest_of_a_dump_is_read_as_it_was(tmp_path):
    value = {
        "list": [1, 2.5, True, None, 1 << 40],
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "ordered": OrderedDict(a=1),
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "shape": torch.Size([2, 3]),
        "range": range(0, 6, 2),
        "text": "Gr\u00fc\u00dfe",
    }
    read = read_torch(save(value, tmp_path / "a.pt"))
    assert np.array_equal(numbers(read.pop("array")), value.pop("array"))
    assert read == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpy_arrays_are_read_in_every_protocol(tmp_path, protocol):
    value = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.arange(6)[::2],
    ]
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    assert is_pickle(path) and not is_torch_file(path)
    for read, array in zip(read_pickle(path), value, strict=True):
        assert np.array_equal(numbers(read), array)


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_a_pickle_with_code_in_it_is_refused_by_name_and_not_run(tmp_path, kind):
    mark, path = tmp_path / "mark", tmp_path / "a.pt"
    if kind == "torch":
        save({"samples": [Hostile(mark)]}, path)
    else:
        path.write_bytes(pickle.dumps([Hostile(mark)]))
    with pytest.raises(DataError, match=r"'posix.mkdir'"):
        (read_torch if kind == "torch" else read_pickle)(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists(), "the same pickle does it where it is trusted"


@pytest.mark.parametrize(
    "name", ["builtins.eval", "builtins.getattr", "torch.load", "functools.partial",
             "numpy.core.multiarray.fromfile", "pickle.loads", "os.system"],
)  # fmt: skip
def test_no_other_name_can_be_called(tmp_path, name):
    module, _, function = name.rpartition(".")
    path = tmp_path / "a.pkl"
    named = f"{module}\n{function}\n".encode()
    path.write_bytes(b"\x80\x02c" + named + b"X\x01\x00\x00\x00a\x85R.")
    with pytest.raises(DataError, match="wants to call"):
        read_pickle(path)


def test_a_pickle_cannot_change_what_reads_it(tmp_path):
    """BUILD sets attributes of whatever stands there: of a function of the table it cannot."""
    path = tmp_path / "a.pkl"
    state = pickle.dumps((None, {"_make": 1}), protocol=2)[2:-1]
    path.write_bytes(b"\x80\x02ccollections\nOrderedDict\n" + state + b"b.")
    with pytest.raises(DataError, match="may not change"):
        read_pickle(path)


def test_a_known_class_becomes_an_inert_record(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02cverl.protocol\nDataProto\n)\x81}X\x01\x00\x00\x00aK\x01sb.")
    record = read_pickle(path)
    assert isinstance(record, Record)
    assert (record.name, record.args, record.state) == ("verl.protocol.DataProto", (), {"a": 1})


def test_a_class_of_ones_own_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "a.pt"
    save({"samples": [{"metadata": {"mine": Own()}}]}, path)
    with pytest.raises(DataError, match=r"test_pickles.Own'"):
        read_torch(path)


# -- damaged files -----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_off_says_so(tmp_path, share):
    path = save({"a": torch.arange(1000), "b": list(range(1000))}, tmp_path / "a.pt")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"cut off|empty"):
        read_torch(path)


@pytest.mark.parametrize("at", range(3, 60, 7))
def test_a_pickle_that_is_cut_off_says_so(tmp_path, at):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps({"tokens": [1, 2, 300, 70000], "text": "abc" * 20})[:at])
    with pytest.raises(DataError, match="cut off"):
        read_pickle(path)


@pytest.mark.parametrize(
    "program", [b"B\xff\xff\xff\x7fabc", b"ios\nsystem\n", b"Pstorage\n", b"\xfe"]
)
def test_a_pickle_of_odd_instructions_is_refused(tmp_path, program):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02]" + program + b".")
    with pytest.raises(DataError, match=r"wants to call|cut off, damaged"):
        read_pickle(path)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    path = save({"a": torch.arange(8)}, tmp_path / "a.pt")

    def longer(name, content):
        return content.replace(b"K\x08\x85", b"K\x09\x85") if name.endswith("data.pkl") else content

    with pytest.raises(DataError, match=r"cannot be read as data.*storage"):
        read_torch(repacked(path, longer))
    shorter = repacked(path, lambda name, c: c[:-8] if name.endswith("data/0") else c)
    with pytest.raises(DataError, match="cannot be read as data"):
        read_torch(shorter)


def test_an_archive_of_something_else_is_named(tmp_path):
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DataError, match="cannot be read as data"):
        read_torch(path)


def test_a_sparse_file_is_refused_without_being_read(tmp_path):
    path = tmp_path / "a.pt"
    with open(path, "wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(DataError, match="is no file that"):
        read_torch(path)
    with pytest.raises(DataError, match="cannot be read as data"):
        read_pickle(path)


def test_lists_within_lists_without_end_are_read_and_never_laid_out(tmp_path):
    wide: list = [1]
    for _ in range(40):
        wide = [wide, wide]  # 2^40 entries if it were laid out
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(wide))
    read = read_pickle(path)
    assert numbers(read) is None
    with pytest.raises(DataError, match=r"\[\[\["):
        ids_of(read, "tokens")
    with pytest.raises(DataError, match=r"\b2\b.*\[\[\["):
        floats_of(read, 2, "mask")


def test_a_file_in_memory_reads_as_one_on_disk():
    buffer = io.BytesIO()
    torch.save(torch.arange(3), buffer)
    assert read_torch(buffer.getvalue(), "x").tolist() == [0, 1, 2]


@pytest.mark.parametrize("names", [b"a", b"a\nb", b""])
def test_a_name_that_does_not_end_is_refused_at_once(tmp_path, names):
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02X\x02\x00\x00\x00\n\nc" + names)
    with pytest.raises(DataError, match="cut off, damaged"):
        read_pickle(path)


RANGE = b"c__builtin__\nxrange\nL1000000000000L\n\x85R\x85R."
EXPANDING = {
    "set": b"\x80\x02c__builtin__\nset\n" + RANGE,
    "size": b"\x80\x02ctorch\nSize\n" + RANGE,
    "dict": b"\x80\x02ccollections\nOrderedDict\n" + RANGE,
    "memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "bytes": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "frame": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"x.",
    "long": b"\x80\x02\x8b" + (2**31 - 1).to_bytes(4, "little") + b"x.",
    "digits": b"\x80\x02L" + b"9" * 10**6 + b"L\n.",
}
BOUNDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
from pathlib import Path
from lockstep.doctor.inputs.pickles import read_pickle
from lockstep.errors import DataError
for path in map(Path, sys.argv[1:]):
    try:
        read_pickle(path)
    except DataError as error:
        print(error)
# Not ru_maxrss: a child begins with the peak of the process that forked it.
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak.split()[1]) >> 10)
"""


def test_a_pickle_that_expands_is_one_line(tmp_path):
    for name, program in EXPANDING.items():
        (tmp_path / f"{name}.pkl").write_bytes(program)
    paths = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, *paths], capture_output=True, text=True, timeout=60
    )
    *lines, megabytes = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(map(str, paths)), done.stderr
    assert int(megabytes) < (MEMORY_BYTES >> 20) + 500  # what it may take, and the interpreter
