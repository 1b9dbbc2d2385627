"""What depends on the chip or the process: tiles, refusals, torch's modes."""

import importlib.util
import threading
from types import SimpleNamespace

import pytest
import torch

from lockstep.errors import ConfigError

if importlib.util.find_spec("triton") is None:
    pytest.skip("pip install 'lockstep-rl[cuda]'", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined, once for all tests
    from lockstep.ops import cuda_attention, cuda_kernels


def test_chips_with_the_instructions_of_ampere_have_its_tiles():
    products = [cuda_kernels.of_chip(cuda_kernels.TILES, chip) for chip in (8, 12, 10)]
    assert products[1] == products[0] != products[2]
    of_8, of_12 = (cuda_attention.tile_of(torch.bfloat16, 64, chip) for chip in (8, 12))
    assert of_12 == of_8 != cuda_attention.tile_of(torch.bfloat16, 64, 10)
    assert cuda_kernels.of_chip(cuda_kernels.SHARED_BYTES, 12) == 99 << 10
    assert cuda_kernels.of_chip(cuda_kernels.SHARED_BYTES, 10) == 227 << 10


def test_a_chip_without_the_memory_of_its_tiles_is_refused_by_name(monkeypatch):
    chip = SimpleNamespace(name="Small H", shared_memory_per_block_optin=99 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: chip)
    monkeypatch.setattr(cuda_kernels, "generation", lambda: 12)
    cuda_kernels.check_chip()
    monkeypatch.setattr(cuda_kernels, "generation", lambda: 9)
    with pytest.raises(ConfigError, match=r"Small H.*\b99 KiB.*\b227 KiB"):
        cuda_kernels.check_chip()


def test_a_thread_leaves_torchs_mode_to_no_other_and_loses_it_to_none():
    mode, found = torch.get_deterministic_debug_mode, {}
    entered, may_leave = threading.Event(), threading.Event()

    def first():
        with cuda_attention._deterministic():
            entered.set()
            may_leave.wait(30)
            found["first"] = mode()

    def second():
        with cuda_attention._deterministic():
            found["second"] = mode()

    before = mode()
    threads = [threading.Thread(target=call) for call in (first, second)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # in vain: it waits for the first
    assert "second" not in found
    may_leave.set()
    for thread in threads:
        thread.join(30)
    assert found == {"first": 1, "second": 1}, "1 warns, and raises in no other thread"
    assert mode() == before
