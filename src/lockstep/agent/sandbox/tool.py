"""The tool `python`: code that the model writes, run in a sandbox."""

from __future__ import annotations

from lockstep.agent.sandbox.base import Sandbox
from lockstep.agent.tools import Tool, ToolOutput

NO_OUTPUT = "[no output]"
"""Output of a program that printed nothing, most often because a print is missing."""
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The program."}},
    "required": ["code"],
}


def python_tool(sandbox: Sandbox, *, session: str = "", name: str = "python") -> Tool:
    """The tool `python(code: str)`. The model reads the printed text, the last value and the error
    of a program; a failed program is not a failure of the tool.

    session: programs of one session share their variables; the environment ends it in `close`.
    Empty: each program starts from nothing.

    >>> from lockstep.agent.sandbox.monty import MontyConfig
    >>> tool = python_tool(MontyConfig().open())
    >>> tool.name, list(tool.parameters["properties"])
    ('python', ['code'])
    """

    async def python(code: str) -> ToolOutput:
        result = await sandbox.run(code, session=session)
        return ToolOutput(text=result.output or NO_OUTPUT, metrics=result.metrics)

    keeps = (
        "Variables stay for the next call."
        if session
        else "Nothing stays for the next call: write whole programs."
    )
    return Tool(
        name=name,
        description=(
            "Runs a Python program and returns its printed text and the value of its last line. "
            f"{keeps} {sandbox.dialect}"
        ),
        parameters=PARAMETERS,
        function=python,
        bounds_itself=True,
    )
