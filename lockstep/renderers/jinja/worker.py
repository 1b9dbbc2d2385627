"""The process that renders a chat template: started as a script, it knows nothing of Lockstep.

A template is a program that came with a model's weights. Jinja's sandbox keeps it from attributes
and from files, but a loop in a loop, a power or a doubled list can take any time and any memory,
and no step of Python's interrupts them. So it runs here: bounded in memory, without the right to
open a file, and killed by the parent when it takes too long.

One JSON object per line. In: {"source", "date"} first, then {"variables"}. Out: {"text"}, or
{"kind", "message"}: "refused" (the template's own raise_exception), "syntax", "unsafe", "loader",
"memory", "failed".
"""

import json
import sys
from datetime import datetime
from typing import Any

MEMORY_BYTES = 1 << 30
"""Address space of this process; it starts with about 40 MB."""
MAX_TEXT = 1 << 26
"""Characters that a template may write: 64 Mi, some hundred times the longest dialogues."""


def main() -> None:
    import jinja2
    import jinja2.ext
    from jinja2 import nodes, sandbox

    class Refusal(Exception):
        pass

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, by which transformers marks what the model wrote: nothing here."""

        tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: object) -> None:
        raise Refusal(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    # The settings are transformers' (utils/chat_template_utils.py).
    environment: Any = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse

    def answer(kind: str, error: BaseException) -> dict[str, str]:
        return {"kind": kind, "message": f"{error}"[:2000] or type(error).__name__}

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
        except Refusal as error:
            return answer("refused", error)
        except jinja2.exceptions.SecurityError as error:
            return answer("unsafe", error)
        except (MemoryError, RecursionError, OverflowError) as error:
            return answer("memory", error)
        except TypeError as error:  # Jinja's own words: it has no exception for this
            if "no loader for this environment" in str(error):
                return answer("loader", error)
            return {"kind": "failed", "message": f"TypeError: {error}"[:2000]}
        except Exception as error:  # whatever a foreign program raises is its failure
            return {"kind": "failed", "message": f"{type(error).__name__}: {error}"[:2000]}

    def reply(to: dict[str, str]) -> None:
        sys.stdout.buffer.write(json.dumps(to).encode() + b"\n")
        sys.stdout.buffer.flush()

    # A first render and a first error load what jinja2 loads late: no file can be opened below.
    warm = "{% for x in [1] %}{{ 'a\\n\\u00e9' ~ x|tojson|trim }}{% endfor %}{{ none.a.b }}"
    template = environment.from_string(warm)
    render({"variables": {}})
    _limit()
    first = json.loads(sys.stdin.buffer.readline())
    date = datetime.fromisoformat(first["date"])
    environment.globals["strftime_now"] = date.strftime
    try:
        template = environment.from_string(first["source"])
    except jinja2.exceptions.TemplateSyntaxError as error:
        reply({"kind": "syntax", "message": f"line {error.lineno}: {error.message}"})
        return
    except (MemoryError, RecursionError, OverflowError) as error:
        reply(answer("memory", error))
        return
    reply({"text": ""})
    for line in sys.stdin.buffer:
        reply(render(json.loads(line)))


def _limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
