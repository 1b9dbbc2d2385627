"""What steps ask of a GPU, and what kernels use of a chip, for models at their real widths."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_counts import PROOF

if importlib.util.find_spec("triton") is None:
    pytest.skip("pip install 'lockstep-rl[cuda]'", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the stand-in is for machines without a GPU", allow_module_level=True)
from lockstep.ops.cuda_kernels import SHARED_BYTES, of_chip

PROOFS = Path(__file__).parents[2] / "docs" / "proof"
DENSE = ["Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-8B"]
MIXTURES = ["Qwen3-30B-A3B", "gpt-oss-20b"]
CHIPS = (80, 90, 100, 120)
INSTRUCTIONS = {80: ("m16n8k16",), 90: ("m64n",), 100: ("tcgen05",), 120: ("m16n8k16",)}

HYBRID = "Qwen3-Next-80B-A3B"
MODELS = [*DENSE, *MIXTURES, HYBRID]
CASES = [(name, chip, "bfloat16") for name in MODELS for chip in CHIPS]
CASES += [(name, 90, "float32") for name in MODELS]
if not PROOF:  # `make proof` compiles the kernels of each chip
    CASES = [("Qwen3-0.6B", 90, "bfloat16")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(map(str, case)))
def case(request, tmp_path_factory):
    name, chip, dtype = request.param
    # In a process of its own: the stand-in changes torch and Triton.
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env["PYTHONPATH"] = os.pathsep.join([str(PROOFS), str(PROOFS.parents[1] / "src")])
    env.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("figures.py")
    command = [sys.executable, script, name, str(chip), "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return (*request.param, json.loads(done.stdout.splitlines()[-1]))


def test_a_decode_step_is_one_copy_one_replay_and_one_read(case):
    *_, found = case
    for rule in ("decode", "decode, top-p", "decode, adapters"):
        batches = {batch: step for batch, step in found[rule].items() if batch != "captures"}
        assert found[rule]["captures"] == 2  # of 1 row and of 64
        for step in batches.values():
            assert step["replays"] == step["syncs"] == 1
            assert step["copies to the GPU"] == step["copies to the host"] == 1
            assert step["captures"] == step["recompilations"] == 0


def test_ragged_rows_launch_what_equal_rows_do(case):
    name, _, dtype, found = case
    launches = found["launches per layer"]
    assert launches["64 ragged rows"] == launches["64 rows"]
    if dtype == "bfloat16":
        assert set(launches.values()) == {launches["1 row"]}
        assert launches["1 row"] <= (6 if name in DENSE else 93 if name == HYBRID else 17)


def test_a_micro_batch_waits_for_nothing_and_compiles_nothing_anew(case):
    *_, dtype, found = case
    if dtype == "float32":
        pytest.skip("its products of experts read their counts on the host")
    assert found["training"]["waits"] == found["training"]["recompilations"] == 0


def test_attentions_backward_is_a_few_launches_and_no_matrix_of_scores(case):
    *_, dtype, found = case
    if dtype == "float32":
        pytest.skip("float32 forms tiles of scores")
    assert found["attention's backward"]["launches"] <= 12  # with sinks
    assert found["attention's backward"]["largest"] <= 2


SPILLS = {
    "_attention_kernel": {100: 112, 120: 56},  # the hybrid's heads of 256
    "_gemm_kernel": {80: 8, 120: 8},
    "_rms_norm_kernel": {100: 8, 120: 8},
}
"""Bytes that kernels in bfloat16 spill, by chip; no others do."""


def test_kernels_keep_to_registers_and_to_the_chips_shared_memory(case):
    _, chip, dtype, found = case
    for name, used in found["kernels"].items():
        most = SPILLS.get(name, {}).get(chip, 0) if dtype == "bfloat16" else 64
        assert used["spilled"] <= most, name
        assert used["shared"] <= of_chip(SHARED_BYTES, chip // 10), name


def test_products_are_chains_of_one_kind_of_instruction(case):
    """What `cuda_kernels.GemmTile` promises: instructions of the same rows and depth."""
    _, chip, dtype, found = case
    shapes = found["kernels"]["_gemm_kernel"]["instructions"]
    if dtype == "float32":
        assert shapes == []
        return
    assert shapes and all(shape.startswith(INSTRUCTIONS[chip]) for shape in shapes)
    assert all(shape.endswith("k16") for shape in shapes) or chip == 100
