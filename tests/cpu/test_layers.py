"""The direction of imports: a file imports only from rows above its own, inside functions too."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ROWS = [
    ["errors"],
    ["types", "children"],
    ["config", "renderers", "ops", "observe", "store"],
    ["models", "correction", "report", "launch"],
    ["objectives"],
    ["engines", "training"],
    ["agent", "sync"],
    ["envs"],
    ["run_config"],
    ["memory"],
    ["run"],
    ["doctor"],
    ["model_server", "supervised"],
    ["recipes"],
    ["testing"],
    ["cli"],
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
TORCH_FREE = [
    "lockstep", "lockstep.types", "lockstep.config", "lockstep.cli", "lockstep.recipes",
    "lockstep.run_config", "lockstep.memory", "lockstep.run.preflight", "lockstep.run.plan",
    "lockstep.run.build", "lockstep.renderers.registry",
    "lockstep.store.run", "lockstep.observe.live", "lockstep.report.page",
    "lockstep.agent.environment", "lockstep.agent.tools",
    "lockstep.envs.docsearch.config", "lockstep.envs.math.config", "lockstep.testing.faults",
    "lockstep.launch.processes", "lockstep.doctor.checks.examine", "lockstep.doctor.diagnose",
    "lockstep.doctor.rendering",
    "lockstep.agent.gateway.config", "lockstep.agent.gateway.exchange", "lockstep.model_server",
]  # fmt: skip


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "lockstep"}


def test_every_room_has_a_row():
    rooms = {p.stem for p in (ROOT / "lockstep").iterdir() if p.suffix == ".py" or p.is_dir()}
    assert rooms - {"__init__", "__pycache__", "py"} - set(ROW_OF) == set()


def test_a_file_imports_only_from_rows_above_its_own():
    wrong = []
    for path in sorted((ROOT / "lockstep").rglob("*.py")):
        inside = path.relative_to(ROOT / "lockstep")
        room = inside.parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for module in imports_of(path):
            other = room_of(module)
            if other in ("", room):
                continue
            if ROW_OF[other] >= ROW_OF[room]:
                wrong.append(
                    f"{inside} (row {ROW_OF[room]}) imports {module} (row {ROW_OF[other]})"
                )
    assert not wrong, "\n".join(wrong)


def test_torch_is_not_imported_by_what_runs_before_a_model():
    code = "import sys\n" + "".join(
        f"import {module}\nif 'torch' in sys.modules: sys.exit('torch came with {module}')\n"
        for module in TORCH_FREE
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
