"""The child process for tools and rewards of the task kind `custom`: `task.workers`.

    python -m lockstep.envs.custom_child        (started by `lockstep.envs.custom`)

A call that holds Python's lock, such as a regular expression that explodes, stops this process
alone, which is killed at the limit of the call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lockstep.agent.references import find
from lockstep.agent.tools import as_output
from lockstep.children import serve
from lockstep.envs.custom import Columns, Episode, ToolUse, score_of
from lockstep.types import Message

MAX_CHARS = 1_000_000
"""Characters of a tool's output that are sent; the model reads far fewer."""


def main() -> None:
    serve(_answer)


def _answer(
    reference: str, arguments: Mapping[str, Any], episode: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The result of a tool, or the score of a reward if there is an episode."""
    try:
        found = find(reference, setting="task.tools or task.reward")
        function = getattr(found, "function", found)
        if episode is None:
            output = as_output(_result(function(**arguments)))
            return {"text": output.text[:MAX_CHARS], "metrics": output.metrics}
        return asdict(score_of(_result(function(_episode(**episode))), reference))
    except Exception:
        raise
    except BaseException as error:  # it ends the call, and not the process
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _result(found: Any) -> Any:
    async def awaited() -> Any:
        return await found

    return asyncio.run(awaited()) if inspect.isawaitable(found) else found


def _episode(
    task: Mapping[str, Any],
    messages: Sequence[Any],
    calls: Sequence[Any],
    left_out: Mapping[str, str],
    **fields: Any,
) -> Episode:
    said, uses = tuple(map(Message.from_dict, messages)), tuple(ToolUse(**each) for each in calls)
    return Episode(task=Columns(task, left_out), messages=said, calls=uses, **fields)
