"""The tool `python`: code that the model writes, run in a sandbox."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from lockstep.agent.sandbox.base import Sandbox
from lockstep.agent.tools import Tool, ToolOutput, tool

NO_OUTPUT = "[no output]"
"""Output of a program that printed nothing, most often because a print is missing."""


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

    async def python(code: Annotated[str, "The program."]) -> ToolOutput:
        result = await sandbox.run(code, session=session)
        return ToolOutput(text=result.output or NO_OUTPUT, metrics=result.metrics)

    keeps = (
        "Variables stay for the next call."
        if session
        else "Nothing stays for the next call: write whole programs."
    )
    about = "Runs a Python program and returns its printed text and the value of its last line."
    made: Tool = tool(python, name=name, description=f"{about} {keeps} {sandbox.dialect}")
    return replace(made, bounds_itself=True)
