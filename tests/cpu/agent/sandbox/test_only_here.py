"""Model-written code runs in a sandbox and nowhere else in the package."""

import ast
import re
from pathlib import Path

LOCKSTEP = Path(__file__).parents[4] / "src" / "lockstep"

RUNS_CODE = {"exec", "eval", "compile", "__import__", "run_path", "run_module"}
STARTS_PROGRAMS = {
    "Popen", "check_call", "check_output", "create_subprocess_exec", "create_subprocess_shell",
    "system", "popen", "posix_spawn", "execv", "execve", "fork",
}  # fmt: skip
WHOLE_NAMES = {
    "subprocess.run", "pickle.load", "pickle.loads", "marshal.loads", "sympify", "parse_expr",
}  # fmt: skip
WORDS = re.compile(
    rf"\b({'|'.join([*RUNS_CODE, *STARTS_PROGRAMS])})\s*\("
    "|subprocess|pickle|marshal|sympify|parse_expr"
)

KNOWN = {
    "agent/sandbox": "the sandboxes themselves",
    "children.py": "programs of the package, by a command of its own",
    "envs/programs/program.py": "an agent of the user's, by a command of the config",
    "engines/vllm/model.py": "the ops of the trainer, which hands them to the vLLM that it starts",
    "launch/keeper.py": "an engine's server or a tool's server, by a command of the config",
    "launch/gpu.py": "nvidia-smi, which names the processes on a card",
    "launch/ray.py": "objects of this run's own processes",
    "launch/workers.py": "objects of this run's own processes, and those processes",
    "models/gguf.py": "pip, which downloads a wheel of the package's own table",
    "store/run.py": "git, for the commit of a run",
}
"""Who may, and what it is that they run. Never what a model wrote, the first one apart."""


def calls(path: Path) -> set[str]:
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    if not WORDS.search(text):  # most files: parsing all of them takes seconds
        return found
    for node in ast.walk(ast.parse(text)):
        func = node.func if isinstance(node, ast.Call) else None
        func = func.value if isinstance(func, ast.Subscript) else func  # Popen[bytes](...)
        if not isinstance(func, ast.Name | ast.Attribute):
            continue
        name = ast.unparse(func)
        last = name.split(".")[-1]
        is_builtin = isinstance(func, ast.Name) or last not in ("compile", "eval")
        if (last in RUNS_CODE and is_builtin) or last in STARTS_PROGRAMS or name in WHOLE_NAMES:
            found.add(name)
    return found


def test_nothing_outside_of_the_sandbox_runs_code_or_programs_but_those_named():
    unknown = {}
    for path in sorted(LOCKSTEP.rglob("*.py")):
        inside = path.relative_to(LOCKSTEP).as_posix()
        found = calls(path)
        if found and not inside.startswith(tuple(KNOWN)):
            unknown[inside] = sorted(found)
    assert not unknown, f"say in KNOWN what these run, or use a sandbox: {unknown}"
