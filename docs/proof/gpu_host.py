"""What steps ask of a GPU, found without one, for five models and four chips: gpu_host.json.

python docs/proof/gpu_host.py        # `make gpu-host`, 4 minutes on two cores

See tests/gpu_host: the real engine and decoder run over fake tensors, and kernels are compiled.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from gpu_models import MODELS

ROOT = Path(__file__).parents[2]
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
    host = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    made = {
        "command": "python docs/proof/gpu_host.py",
        "host": host,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps({**made, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
