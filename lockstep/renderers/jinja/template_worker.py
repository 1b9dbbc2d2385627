"""The process that renders a chat template. It runs as a script and imports nothing of Lockstep.

A template is a program that came with a model's weights. Jinja's sandbox keeps it from attributes
and files, but a loop in a loop, a power or a doubled list can take any time and any memory, and
Python cannot interrupt such a step. So the template runs here: its memory is bounded, it may not
open a file, and the parent kills it when it takes too long.

The protocol is that of `lockstep.children`. Request 0 has `source` and `date`, later ones have
`variables`; a reply has `text`. Kinds of errors: "refused" (the template called raise_exception),
"memory", and "failed".
"""

import json
import sys
from datetime import datetime
from functools import partial
from typing import Any

MEMORY_BYTES = 1 << 30
"""Address space of this process, which starts with about 40 MB."""
MAX_TEXT = 1 << 26
"""Characters that a template may write: 64 Mi, about a hundred times the longest dialogues."""


def main() -> None:
    import jinja2
    import jinja2.ext
    from jinja2 import nodes, sandbox

    class Refusal(Exception):
        pass

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, with which transformers marks replies, has no effect here."""

        tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: object) -> None:
        raise Refusal(str(message))

    # Settings as in transformers, utils/chat_template_utils.py.
    environment: Any = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse

    def answer(error: Exception) -> dict[str, str]:
        if isinstance(error, Refusal):
            return {"error": "refused", "text": f"{error}"[:2000]}
        is_memory = isinstance(error, (MemoryError, RecursionError, OverflowError))
        place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        text = f"{type(error).__name__}{place}: {error}"[:2000]
        return {"error": "memory" if is_memory else "failed", "text": text}

    def render(request: dict[str, Any]) -> dict[str, str]:
        try:
            size = 0
            parts: list[str] = []
            for part in template.generate(**request["variables"]):
                size += len(part)
                if size > MAX_TEXT:
                    raise MemoryError
                parts.append(part)
            return {"text": "".join(parts)}
        except Exception as error:  # any exception is the template's failure
            return answer(error)

    def reply(fields: dict[str, str], *, number: int) -> None:
        sys.stdout.buffer.write(json.dumps({**fields, "id": number}).encode() + b"\n")
        sys.stdout.buffer.flush()

    # Render and fail once, so that jinja2 imports everything now: no file can be opened later.
    warm = "{% for x in [1] %}{{ 'a\\n\\u00e9' ~ x|tojson|trim }}{% endfor %}{{ none.a.b }}"
    template = environment.from_string(warm)
    render({"variables": {}})
    _limit()
    first = json.loads(sys.stdin.buffer.readline())
    date = datetime.fromisoformat(first["date"])
    environment.globals["strftime_now"] = date.strftime
    try:
        template = environment.from_string(first["source"])
    except Exception as error:
        reply(answer(error), number=0)
        return
    reply({"text": ""}, number=0)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        reply(render(request), number=request["id"])


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows has no limits of a process
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
