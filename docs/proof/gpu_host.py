"""What steps ask of a GPU, found without one, for six models and four chips: gpu_host.json.

python docs/proof/gpu_host.py        # `make gpu-host`, 4 minutes on two cores

See tests/gpu_host: the real engine and decoder run over fake tensors, and kernels are compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import triton
from gpu_models import MODELS
from run import ROOT, save, stamp

CHIPS = (80, 90, 100, 120)


def figures(model: str, chip: int) -> dict[str, object]:
    paths = (Path(__file__).parent, ROOT / "src", os.environ.get("PYTHONPATH", ""))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, ROOT / "tests" / "gpu_host" / "figures.py", model, str(chip)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    found: dict[str, dict[str, object]] = {}
    for model in MODELS:
        for chip in CHIPS:
            found.setdefault(model, {})[f"sm_{chip}"] = figures(model, chip)
            print(model, f"sm_{chip}", flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    save("gpu_host", {**stamp("python docs/proof/gpu_host.py"), **versions, "models": found})


if __name__ == "__main__":
    main()
