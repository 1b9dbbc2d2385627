"""Records what `lockstep doctor` reads, from any program: copy this file, or import it. It needs
the standard library alone.

    recorder = Recorder("rows.jsonl", model="DIR", temperature=1.0, tools=tools)
    row = recorder.row(messages=first_messages)
    row.reply(prompt_ids, ids, logprobs, finish_reason="stop")     # after each call of the engine
    row.say(message)                                               # each further message, as a dict
    row.train(token_ids, loss_mask, trainer_logprobs, step=step)   # as the trainer has them
    recorder.close()

Then: lockstep doctor rows.jsonl --model DIR. Record each value where the program has it.
"""

from __future__ import annotations

import json
import math
from typing import Any


class Recorder:
    """Writes one line of JSON per training row, after a first line with the facts of the run."""

    def __init__(self, path: str, *, tools: Any = None, **facts: Any) -> None:
        """facts: model, temperature, top_p, top_k, stop_ids, pad_id, as far as they are known.
        tools: the list that the template is given."""
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        known = {**facts, "tools": json.dumps(tools) if tools else None}
        self._write({"lockstep.doctor": {n: v for n, v in known.items() if v is not None}})

    def row(self, *, messages: Any = ()) -> Row:
        """One dialogue that will be a training row. messages: before the first reply."""
        return Row(self, list(messages))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, default=lambda x: x.tolist() if hasattr(x, "tolist") else list(x))
        print(text, file=self._file, flush=True)


class Row:
    """The request and reply of the engine, then the trainer's log-probs of it."""

    def __init__(self, recorder: Recorder, messages: list[Any]) -> None:
        self._recorder, self._messages = recorder, messages
        self._prompts, self._replies = list[list[int]](), list[list[int]]()
        self._logprobs: list[Any] = []
        self._finish, self._version = None, None

    def reply(self, prompt_ids, ids, logprobs, finish_reason=None, version=None) -> None:
        """One answer of the engine, its stop id included. A token without a log-prob has None.
        version: of the weights that drew it."""
        if len(logprobs) != len(ids):
            raise ValueError(f"logprobs: {len(logprobs)} for {len(ids)} ids, not one each.")
        self._prompts.append([int(i) for i in prompt_ids])
        self._replies.append([int(i) for i in ids])
        self._logprobs += logprobs
        self._finish, self._version = finish_reason, version

    def say(self, *messages: Any) -> None:
        """Further messages: the reply as it was parsed, then messages of tools and users."""
        self._messages += messages

    def train(self, token_ids: Any, loss_mask: Any, trainer_logprobs: Any, **columns: Any) -> None:
        """The row as it is trained; ends the row. All lists have one entry per token of the row.

        trainer_logprobs: before the update. columns: step, reward, group, advantages,
        trainer_version, prompt_length, and rollout_logprobs: the sampler's as the trainer has them.
        Without these, the engine's are laid onto the trained tokens in order.
        """
        mask = [bool(x) for x in loss_mask]
        left = iter(self._logprobs)
        laid = [next(left, None) if is_on else None for is_on in mask]
        laid = columns.pop("rollout_logprobs", laid)
        lists = {"loss_mask": mask, "rollout_logprobs": laid, "trainer_logprobs": trainer_logprobs}
        for name, values in lists.items():
            if len(values) != len(token_ids):
                raise ValueError(f"{name}: {len(values)} for {len(token_ids)} ids, not one each.")
        line = {
            "token_ids": [int(i) for i in token_ids],
            "loss_mask": mask,
            "rollout_logprobs": _numbers(laid, mask),
            "trainer_logprobs": _numbers(trainer_logprobs, mask),
            "engine_ids": self._replies,
            "engine_prompt_ids": self._prompts,
            "messages": self._messages,
            "finish_reason": self._finish,
            "policy_version": self._version,
            **columns,
        }
        self._recorder._write({name: value for name, value in line.items() if value is not None})


def _numbers(values: Any, mask: list[bool]) -> list[float | None]:
    """Numbers of trained tokens; null elsewhere, and where there is none. JSON has no NaN."""
    pairs = zip(values, mask, strict=True)
    found = [None if x is None or not is_on else float(x) for x, is_on in pairs]
    return [None if x is None or math.isnan(x) else x for x in found]
