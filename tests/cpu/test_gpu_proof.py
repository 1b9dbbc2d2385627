"""`docs/proof/gpu.py` where there is no GPU: its processes, limits and records, and what the pages
say of what it found."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from full_counts import PROOF

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "proof" / "gpu.py"
NOT_RUN = ("not yet run", "has not been run", "nothing has run on a gpu", "none of this has run")


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module, without its cases."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("gpu_proof", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_proof", module)
    spec.loader.exec_module(module)
    return module


def run(*arguments):
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"},
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2():
    done = run("truth")
    assert done.returncode == 2
    assert done.stdout == (
        "gpu.py: torch sees no GPU; --small --device cpu tries the cases without one.\n"
    )


def test_a_case_leaves_its_figures_and_is_left_out_when_it_is_resumed(tmp_path):
    out = tmp_path / "gpu.json"
    asked = ["truth", "--small", "--device", "cpu", "--only", "layers", "--out", out]
    done = run(*asked)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(out.read_text())["truth"]["cases"]
    assert entry["status"] == "ok" and entry["gpt-oss-20b"]["ours"] < 1e-5
    assert json.loads(done.stdout.splitlines()[0]) == entry
    again = run(*asked, "--resume")
    assert again.stdout.startswith("truth: 1 of 1 cases ok\n")
    assert "| truth | layers against float64 | ok |" in again.stdout


def test_a_case_that_fails_crashes_or_hangs_does_not_end_the_others(gpu, tmp_path, monkeypatch):
    def fails(where):
        gpu.expect(False, "two runs have other bits")

    where = gpu.Where(torch.device("cpu"), True)

    def is_too_large(where):
        raise gpu.LeftOut("needs 162 GiB")

    cases = {"a": gpu.Case("truth", 9, fails), "b": gpu.Case("speed", 9, is_too_large)}
    monkeypatch.setattr(gpu, "CASES", cases)
    assert gpu.run_case("a", where)["why"] == "two runs have other bits"
    assert gpu.run_case("a", where)["status"] == "failed"
    # In the child this name is unknown: it ends with a traceback.
    crashed = gpu.play("a", ["--device", "cpu"], seconds=60)
    assert crashed["status"] == "crashed" and "KeyError" in crashed["why"]
    assert gpu.play("a", ["--device", "cpu"], seconds=0.01)["status"] == "timed out"
    assert gpu.run_case("b", where)["status"] == "left out"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "truth", "--device", "cpu", "--seconds", "0"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 1
    (entry,) = json.loads((tmp_path / "gpu.json").read_text())["truth"]["cases"]
    assert entry == {"case": "a", "status": "no time"}


def test_a_days_parts_take_40_minutes_and_their_cases_fit_one_by_one(gpu):
    assert sum(gpu.PARTS.values()) <= 40 * 60
    for part, limit in gpu.PARTS.items():
        seconds = [case.seconds for case in gpu.CASES.values() if case.part == part]
        assert len(seconds) >= 2 and max(seconds) <= limit / 2


def test_a_case_larger_than_its_card_is_left_out_and_loses_no_other(gpu, monkeypatch):
    def make_model(*_, **__):
        raise KeyError("it is made")

    where = gpu.Where(torch.device("cuda"), False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 << 30, 24 << 30))
    monkeypatch.setattr(gpu, "make_model", make_model)
    monkeypatch.setattr(gpu, "own_ops", lambda where: None)
    with pytest.raises(KeyError):
        gpu.sampling(where, name="Qwen3-8B", rows=1)
    with pytest.raises(gpu.LeftOut, match=r"\b69 GiB.*\b24\b"):
        gpu.sampling(where, name="Qwen3-8B", rows=256)


IN_CHILDREN = ("tests/gpu", "a run of", "LoRA over", "a replica", "equal updates", "in turns")
"""Cases that start whole runs: minutes."""


def test_a_day_without_a_gpu_runs_its_cases_in_their_small_form(gpu):
    where = gpu.Where(torch.device("cpu"), True)
    names = [n for n in gpu.CASES if PROOF or not n.startswith(IN_CHILDREN)]
    found = {name: gpu.run_case(name, where) for name in names}
    status = {name: entry["status"] for name, entry in found.items()}
    assert {n for n, s in status.items() if s != "ok"} == {
        name for name in names if "vLLM" in name
    }, [entry for entry in found.values() if entry["status"] == "failed"]
    done = {"speed": {"machine": {"device": "none"}, "cases": list(found.values())}}
    assert len(list(gpu.table(done))) == 2 + len(names)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/numerics.md", "docs/troubleshooting.md", "docs/models.md"]
)
def test_pages_say_of_a_gpu_what_was_found_or_that_nothing_was(page):
    """A quote is `<!-- gpu: PART, CASE, KEY -->` after a figure."""
    text, record = (ROOT / page).read_text(), SCRIPT.with_suffix(".json")
    quotes = re.findall(r"([\d.,]+) <!-- gpu: ([^,]+), ([^,]+), ([^>]+) -->", text)
    if not record.exists():
        assert not quotes, f"{page} quotes figures of a GPU, and there is no {record.name}"
        assert any(words in " ".join(text.lower().split()) for words in NOT_RUN), page
        return
    found = json.loads(record.read_text())
    for figure, part, name, key in quotes:
        (entry,) = [case for case in found[part]["cases"] if case["case"] == name]
        assert figure == str(entry[key.strip()]), f"{page}: {name}, {key}"
