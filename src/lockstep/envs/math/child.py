"""The child process that compares two expressions with math-verify.

    python -m lockstep.envs.math.child          (started by `lockstep.envs.math.grading`)

math-verify hands an answer to sympy, which may take minutes and gigabytes on a short text.
"""

from typing import Any

from lockstep.children import serve
from lockstep.system import limit_process

MEMORY_BYTES = 2 << 30


def main() -> None:
    limit_process(AS=MEMORY_BYTES)
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    def compare(expected: str, answer: str) -> dict[str, Any]:
        # Its own time limits are signals that only Python code notices; the parent has a real one.
        without_limit: Any = None
        gold, found = (
            parse(f"\\boxed{{{text}}}", parsing_timeout=without_limit)
            for text in (expected, answer)
        )
        return {"is_equal": bool(verify(gold, found, timeout_seconds=None))}

    serve(compare)
