"""safetensors files: the library's bytes, and files that are not whole."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import CheckpointError
from lockstep.models import tensor_file
from lockstep.models.tensor_file import Outgoing, read_header, write_tensors


@pytest.fixture
def tensors(monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)  # every tensor in several pieces
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(7, 5, generator=generator),
        "a.weight": torch.randn(3, 4, 6, generator=generator).bfloat16(),
        "a.bias": torch.randn(9, generator=generator),
        "c": torch.randint(256, (11, 3), generator=generator).to(torch.uint8),
    }


@pytest.fixture
def path(tensors, tmp_path):
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    return tmp_path / "library.safetensors"


def test_a_file_is_written_with_the_bytes_of_the_library(tensors, path):
    ours = path.with_name("ours.safetensors")
    write_tensors(
        ours, [Outgoing(n, tuple(t.shape), t.dtype, lambda t=t: t) for n, t in tensors.items()]
    )
    assert ours.read_bytes() == path.read_bytes()


def test_a_view_is_written_in_the_order_of_its_numbers_and_in_another_dtype(tmp_path):
    view = torch.randn(4, 6, 2).permute(2, 0, 1)
    path = tmp_path / "x.safetensors"
    write_tensors(path, [Outgoing("x", (2, 24), torch.bfloat16, lambda: view)])
    assert torch.equal(load_file(path)["x"], view.reshape(2, 24).bfloat16())


def test_tensors_are_read_whole_by_rows_and_into_any_view(tensors, path):
    stored = read_header(path)
    assert stored.keys() == tensors.keys()
    for name, wanted in tensors.items():
        assert torch.equal(stored[name].read(), wanted)
        assert torch.equal(stored[name].read(slice(1, 3)), wanted[1:3])
        for out in (
            torch.zeros_like(wanted),
            torch.zeros(2, *wanted.shape, dtype=torch.float64)[1],
            torch.zeros(*wanted.shape[1:], len(wanted)).movedim(-1, 0),
        ):
            version = out._version  # by which ops know what they have made of older values
            stored[name].copy_to(out)
            assert out._version > version
            assert torch.equal(out.to(wanted.dtype), wanted)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_torn_file_is_refused_by_its_size(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"library\.safetensors"):
        read_header(path)


def test_a_header_that_contradicts_itself_is_refused(path):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["b.weight"]["shape"] = [7, 6]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(CheckpointError, match=r"safetensors.*shape"):
        read_header(path)
