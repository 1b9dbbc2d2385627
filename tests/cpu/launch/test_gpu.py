"""GPUs that cannot be used, on a machine without one: the driver and torch's answers are stubs."""

import os
import sys
import types
import weakref
from unittest.mock import Mock, create_autospec

import pytest
import torch

from lockstep import errors
from lockstep.config import resolve
from lockstep.errors import ConfigError, EngineError, MissingExtraError
from lockstep.launch import gpu
from lockstep.launch.gpu import KeptAddresses, check_gpu, free_gpu_memory, shows_gpu
from lockstep.recipes import find_recipe
from lockstep.run.build import resolve_device

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with one usable GPU: a driver's device file, torch's answers, a compiler."""
    found = types.SimpleNamespace(
        capability=(9, 0), error="", programs={"gcc"}, triton="3.6.0", used=0, path=tmp_path
    )

    def fail():
        raise RuntimeError(found.error)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not found.error)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found.capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    chip = types.SimpleNamespace(uuid="aa-bb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: chip)
    monkeypatch.setattr(
        gpu.shutil, "which", lambda name: f"/usr/bin/{name}" if name in found.programs else None
    )
    monkeypatch.setattr(gpu, "version", lambda name: found.triton)
    monkeypatch.setattr(gpu.sysconfig, "get_paths", lambda: {"include": str(tmp_path / "include")})
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    return found


def refused(setting="device=cuda"):
    with pytest.raises(ConfigError) as caught:
        check_gpu(setting)
    return str(caught.value)


def test_a_gpu_that_can_be_used_is_not_refused(machine, capsys):
    check_gpu("device=cuda")
    assert gpu.main() == 0
    assert capsys.readouterr().out == (
        "NVIDIA H200 can be used: compute capability 9.0, "
        f"torch {torch.__version__}, CUDA 13.0, Triton 3.6.0\n"
    )
    machine.capability = (7, 0)
    assert gpu.main() == 1
    assert "compute capability 7.0" in capsys.readouterr().err


def test_a_torch_without_cuda_is_named_with_the_build_to_install(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert refused() == (
        "device=cuda, and torch 2.13.0+cpu is built without CUDA. Install its default build: "
        "pip install --force-reinstall torch==2.13.0. Or set device=cpu."
    )


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU.",
            "Found no NVIDIA driver on your system. Install NVIDIA's driver; give a container the "
            "GPUs (docker run --gpus all)",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 12020). Please update.",
            "The NVIDIA driver on your system is too old (found version 12020). Update the driver, "
            "or install a torch for a CUDA before 13.0",
        ),
        (
            "Error 802: system not yet initialized",
            "Error 802: system not yet initialized. `nvidia-smi` shows what the driver sees",
        ),
    ],
)
def test_a_driver_that_is_missing_or_too_old_is_torchs_reason_with_a_remedy(machine, error, remedy):
    machine.error = error
    assert f"cannot use one: {remedy}. Or set device=cpu." in refused()


def test_a_gpu_that_is_not_there_is_the_variable_that_names_it(machine, monkeypatch):
    machine.error = "No CUDA GPUs are available"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES=7 must name a GPU" in refused()


def test_a_chip_before_ampere_is_refused_with_its_name(machine):
    machine.capability = (7, 5)
    assert "NVIDIA H200 has compute capability 7.5, and the kernels need 8.0 or newer" in refused()


def test_a_triton_that_is_missing_is_refused(machine, monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"lockstep-rl\[cuda\]"):
        check_gpu("device=cuda")


def test_a_machine_that_cannot_compile_c_is_refused_with_what_is_missing(machine, monkeypatch):
    machine.programs = set()
    assert "neither gcc nor clang. Install one (apt-get install gcc)" in refused()
    machine.programs = {"clang"}
    check_gpu("device=cuda")
    monkeypatch.setenv("CC", "icc")
    assert "CC=icc is no program here" in refused()
    monkeypatch.delenv("CC")
    (machine.path / "include/Python.h").unlink()
    remedy = "Install Python's headers (apt-get install python3-dev)"
    assert f"Python.h is missing. {remedy}" in refused()


def test_a_gpu_counts_as_there_if_its_driver_is_loaded_and_it_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not shows_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert shows_gpu(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not shows_gpu(tmp_path)


def test_device_auto_does_not_fall_back_to_the_cpu_beside_a_gpu_that_fails(machine, monkeypatch):
    config = find_recipe("quickstart")
    machine.error = "The NVIDIA driver on your system is too old (found version 12020)."
    monkeypatch.setattr("lockstep.run_config.shows_gpu", lambda: True)
    with pytest.raises(ConfigError, match=r"^device=auto.*device=cpu"):
        resolve_device(config)
    assert resolve_device(resolve(config, ["device=cpu"])) == "cpu"


def test_the_default_dtype_is_bfloat16_on_a_gpu_and_float32_on_a_cpu(monkeypatch):
    config = find_recipe("quickstart")
    monkeypatch.setattr("lockstep.run_config.shows_gpu", lambda: True)
    assert config.compute_dtype == "bfloat16"
    assert resolve(config, ["device=cpu"]).compute_dtype == "float32"
    assert resolve(config, ["dtype=float32"]).compute_dtype == "float32"
    assert config.is_in_step and resolve(config, ["engine.dtype=bfloat16"]).is_in_step
    monkeypatch.setattr("lockstep.run_config.shows_gpu", lambda: False)
    assert config.compute_dtype == "float32"
    assert not resolve(config, ["engine.dtype=bfloat16"]).is_in_step


def test_what_others_took_of_a_gpu_is_said_with_their_processes(machine, monkeypatch):
    bin_path = machine.path / "bin"
    bin_path.mkdir()
    program = bin_path / "nvidia-smi"
    rows = f"GPU-aa-bb, 4711, 60000 MiB\nGPU-cc, 4712, 9 MiB\nGPU-aa-bb, {os.getpid()}, 500 MiB"
    program.write_text(f"#!{sys.executable}\nprint({rows!r})\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_path))
    assert gpu.taken_by_others(78 * GIB, 80 * GIB) == ""
    assert gpu.taken_by_others(20 * GIB, 80 * GIB) == (
        ", where process 4711 (60000 MiB) took 60.0 of 80.0 GiB: end what you do not need, or "
        "choose another GPU with CUDA_VISIBLE_DEVICES=N"
    )
    program.unlink()
    assert ", where other processes took 60.0 of 80.0 GiB" in gpu.taken_by_others(
        20 * GIB, 80 * GIB
    )


def test_the_gpus_free_memory_is_known_before_torch_is_there(machine, monkeypatch):
    """The least of the visible GPUs; None where nvidia-smi is missing."""
    bin_path = machine.path / "bin"
    bin_path.mkdir()
    program = bin_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint('81000\\n7000')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_path))
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("lockstep.launch.gpu.shows_gpu", lambda: True)
    assert free_gpu_memory() == (7000 << 20, "free on the GPU, by nvidia-smi")
    program.unlink()
    assert free_gpu_memory() is None


def test_memory_is_freed_and_taken_under_tensors_that_keep_their_addresses(machine, monkeypatch):
    package = pytest.importorskip("torch_memory_saver", reason="pip install 'lockstep-rl[cuda]'")
    saver = create_autospec(package.entrypoint.TorchMemorySaver, instance=True)
    monkeypatch.setattr(package, "torch_memory_saver", saver)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * GIB)  # paused memory too
    free = [0, 2 * GIB + gpu.SEGMENTS_BYTES]  # torch holds the rest until its cache is released
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.insert(0, free[-1]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 6 * GIB))
    memory, other = KeptAddresses(), KeptAddresses()
    memory.region(2 * GIB)
    memory.free()
    memory.take()
    (tag,) = saver.region.call_args.args
    assert [call[0] for call in saver.method_calls] == ["region", "pause", "resume"]
    assert saver.pause.call_args.args == saver.resume.call_args.args == (tag,)
    torch.cuda.synchronize.assert_called_once_with()
    free[:] = [GIB]
    with pytest.raises(EngineError, match=r"\b2\.0 GiB.* 1\.0 free, where .* took 4\.0 of 6\.0"):
        memory.take()
    with pytest.raises(EngineError, match=r"\b1\.0 GiB.* 1\.0 free"):
        other.region(GIB)  # an error inside would end the process
    assert saver.resume.call_count == saver.region.call_count == 1
    assert other._tag != tag
    # The end of a pool, even at Python's exit, would end the process with an error.
    assert weakref.ref(KeptAddresses())() is not None


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_addresses_are_not_kept_in_segments_that_expand(monkeypatch, name):
    pytest.importorskip("torch_memory_saver", reason="pip install 'lockstep-rl[cuda]'")
    assert KeptAddresses.can_be_kept()
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert not KeptAddresses.can_be_kept()
