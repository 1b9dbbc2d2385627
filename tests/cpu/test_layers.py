"""The direction of imports: a file imports only from rows above its own, in no circle.

Imports inside functions and under TYPE_CHECKING count.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"

ROWS = [
    ["errors", "package", "system", "tables"],
    ["display", "habits"],
    ["types", "children", "config"],
    ["dialogues", "ops", "renderers", "store", "launch"],
    ["models", "observe"],
    ["engines", "correction", "report"],
    ["objectives"],
    ["agent", "training"],
    ["envs", "sync", "tinker_config"],
    ["run_config"],
    ["memory"],
    ["recipes"],
    ["run"],
    ["doctor", "supervised"],
    ["tinker", "integrations"],
    ["model_server"],
    ["verbs"],
    ["testing"],
    ["cli"],
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
TORCH_FREE = [
    "lockstep",
    "lockstep.types",
    "lockstep.config",
    "lockstep.cli",
    "lockstep.recipes",
    "lockstep.run_config",
    "lockstep.memory",
    "lockstep.run.preflight",
    "lockstep.run.build",
    "lockstep.renderers.registry",
    "lockstep.store.run",
    "lockstep.report.document",
    "lockstep.agent.environment",
    "lockstep.agent.tools",
    "lockstep.testing.faults",
    "lockstep.launch.processes",
    "lockstep.doctor.diagnose",
    "lockstep.agent.gateway.config",
    "lockstep.model_server",
    "lockstep.engines.vllm.plugin",
    "lockstep.integrations",
]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(FILES)


def test_every_room_has_a_row():
    assert {room_of(module) for module in FILES} - {""} == set(ROW_OF)


def test_a_file_imports_only_from_rows_above_its_own():
    wrong = [
        f"{module} (row {ROW_OF[room]}) imports {other}"
        for module, path in FILES.items()
        if (room := room_of(module))
        for other in imports_of(path)
        if room_of(other) != room and ROW_OF.get(room_of(other), len(ROWS) - 2) >= ROW_OF[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle():
    graph = {module: imports_of(path) - {module} for module, path in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_faults_wrap_a_run_from_outside():
    users = {m for m, path in FILES.items() if any("testing" in i for i in imports_of(path))}
    assert {room_of(module) for module in users} <= {"testing", "cli"}


def test_torch_is_not_imported_by_what_runs_before_a_model():
    code = "import sys\n" + "".join(
        f"import {module}\nif 'torch' in sys.modules: sys.exit('torch came with {module}')\n"
        for module in TORCH_FREE
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_file_escapes_the_formatter():
    marked = [str(path) for path in PACKAGE.rglob("*.py") if "fmt: " in path.read_text()]
    assert not marked


def test_docstrings_begin_with_a_subject_or_a_verb():
    """Archaic openings are hard to read: `Of those, what says that ...`."""
    wrong = []
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str) and text.lstrip().startswith(
                    ("Of ", "What ", "That ", "Whose ", "By what ", "To what ")
                ):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text.strip()[:60]}")
    assert not wrong, "\n".join(wrong)
