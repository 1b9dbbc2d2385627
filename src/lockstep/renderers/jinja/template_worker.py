"""The process that renders a chat template.

A template is a program that came with a model's weights. Jinja's sandbox keeps it from attributes
and files, but a loop in a loop, a power or a doubled list can take any time and any memory, and
Python cannot interrupt such a step. So the template runs here: its memory is bounded, it may not
open a file, and the parent kills it when it takes too long.

The opening has `source` and `date`, later requests have `variables`; a reply has `text`. Before the
template stands `text_tools.jinja`, which has no effect without the variable `text_tools`.
"""

import json
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, sandbox

from lockstep.children import serve
from lockstep.system import limit_process

MEMORY_BYTES = 1 << 30
"""Address space of this process, which starts with about 40 MB."""
MAX_TEXT = 1 << 26
"""Characters that a template may write: 64 Mi, about a hundred times the longest dialogues."""


class Raised(Exception):
    """The template called raise_exception."""


class Malformed(Exception):
    """The template cannot be read."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` has no effect here; transformers marks replies with it."""

    tags = {"generation"}  # noqa: RUF012  (as the base class declares it)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def refuse(message: object) -> None:
    raise Raised(str(message))


def main() -> None:
    # Settings as in transformers, utils/chat_template_utils.py.
    environment: Any = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    # Renders and fails once, so that jinja2 imports everything now: no file can be opened later.
    warm = "{% for x in [1] %}{{ 'a\\n\\u00e9' ~ x|tojson|trim }}{% endfor %}{{ none.a.b }}"
    template = environment.from_string(warm)
    text_tools = Path(__file__).with_name("text_tools.jinja").read_text("utf-8")

    def open_template(source: str, date: str) -> dict[str, str]:
        nonlocal template
        limit_process(AS=MEMORY_BYTES, NOFILE=0, CORE=0)
        environment.globals["strftime_now"] = datetime.fromisoformat(date).strftime
        try:
            template = environment.from_string(text_tools + source)
        except jinja2.TemplateSyntaxError as error:
            line = error.lineno - text_tools.count("\n")
            raise Malformed(f"TemplateSyntaxError in line {line}: {error}") from None
        return {"text": ""}

    def render(variables: dict[str, Any]) -> dict[str, str]:
        size = 0
        parts: list[str] = []
        for part in template.generate(**variables):
            size += len(part)
            if size > MAX_TEXT:
                raise MemoryError
            parts.append(part)
        return {"text": "".join(parts)}

    with suppress(jinja2.UndefinedError):
        render({})
    serve(render, opened=open_template)


if __name__ == "__main__":
    main()
