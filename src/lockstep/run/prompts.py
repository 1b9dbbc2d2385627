"""The first prompts of tasks: their size, and the tasks whose prompt leaves no room for a reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from lockstep.agent.environment import Environment
from lockstep.agent.task_config import Split, TaskConfig
from lockstep.agent.tasks import FilteredSource, TaskSource
from lockstep.errors import DataError
from lockstep.renderers.base import Renderer
from lockstep.renderers.large_texts import Call, TextTooLargeError
from lockstep.run_config import Config
from lockstep.types import Message, Task, ToolSchema

FRAME_TOKENS = 64
"""Tokens that a format may put around a message, by a wide margin."""


class FirstPrompts:
    """The prompts of a run's tasks, where they are known without an environment."""

    def __init__(self, config: Config, renderer: Renderer) -> None:
        self._config, self._renderer = config, renderer
        self._frames: dict[str, tuple[Sequence[ToolSchema], int]] = {}

    def tasks(self, split: Split) -> TaskSource:
        """The tasks of a split, those left out whose prompt is too long."""
        config = self._config
        source = config.task.tasks(split=split, seed=config.seed)
        is_known = type(config.task).opening is not TaskConfig.opening
        return FilteredSource(source, self.fits) if is_known else source

    def fits(self, task: Task) -> bool:
        return self._excess(task) == 0

    def left_out(self, split: Split) -> str:
        """How many of the listed tasks of a split are left out; empty if none is. Raises DataError
        if all are."""
        config = self._config
        listed = config.task.tasks(split=split, seed=config.seed).listed()
        if not (too_long := [task for task in listed if not self.fits(task)]):
            return ""
        text = f"{len(too_long):,} of {len(listed):,} {split} tasks"
        if len(too_long) == len(listed):
            raise DataError(
                f"the prompt of task {too_long[0].id} has {self._excess(too_long[0])} tokens and "
                f"max_tokens={config.max_tokens}: no row fits, as in {text}. Raise "
                "max_tokens."
            )
        return text

    def _excess(self, task: Task) -> int:
        """Tokens of the prompt if it leaves no room for a reply; 0 if it does, or is not known
        yet."""
        most = self._config.max_tokens - 2
        messages = None if task.problem else self._config.task.opening(task)
        if messages is None:
            return 0
        tools, frame = self._frame(task)
        written = sum(FRAME_TOKENS + len(json.dumps(message.to_dict())) for message in messages)
        if frame + written <= most:  # no token is shorter than a byte
            return 0
        size = prompt_size(self._renderer, messages, tools, max_tokens=most + 2)
        return size if size > most else 0

    def _frame(self, task: Task) -> tuple[Sequence[ToolSchema], int]:
        """The tools of a task's source, and the tokens of a prompt that has them alone."""
        if task.source not in self._frames:
            environment = self._config.task.environment(task, self._config.agent)
            assert isinstance(environment, Environment), "a task with an opening has an environment"
            tools = environment.tools
            hello = [Message(role="user", content="?")]
            size = prompt_size(self._renderer, hello, tools, max_tokens=self._config.max_tokens)
            self._frames[task.source] = tools, size
        return self._frames[task.source]


def prompt_size(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema], *, max_tokens: int
) -> int:
    """Tokens of a prompt; a lower bound if the prompt is far too long."""
    try:
        return len(Call(max_tokens).run(partial(renderer.render, messages, tools), is_beside=True))
    except TextTooLargeError as error:
        return error.num_tokens
