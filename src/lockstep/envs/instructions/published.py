"""Files in the published form of IFEval and Multi-IF."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Literal

from lockstep.dialogues import parsed_json
from lockstep.envs.instructions.checkers import Detector, instruction
from lockstep.errors import DataError
from lockstep.store.tables import data_files, read_rows
from lockstep.types import Task

BadRows = Literal["error", "drop"]

MAX_TURNS = 16


def read_published(
    path: str, *, detector: Detector = "script", bad_rows: BadRows = "error"
) -> list[Task]:
    """The tasks of files in the form of IFEval (`prompt`, `instruction_id_list`, `kwargs`) or of
    Multi-IF (`turn_1_prompt`, `turn_1_instruction_id_list`, `turn_1_kwargs`, `turn_2_...`).

    bad_rows: "drop" leaves out records with instructions that cannot be checked, and records with a
    repeated key; otherwise the first such record raises DataError, `path:line` first.
    """
    tasks: dict[str, Task] = {}
    places: dict[str, str] = {}
    rows = [(file, *row) for file in data_files(path) for row in read_rows(file)]
    for number, (file, where, record) in enumerate(rows, start=1):
        try:
            task = _task(record, detector=detector, name=f"{file.stem}-{number}")
            if task.id in tasks:
                raise DataError(f"the key {task.id!r} is at {places[task.id]} too.")
        except DataError as error:
            if bad_rows == "drop":
                continue
            hint = "" if "task.bad_rows" in str(error) else " task.bad_rows=drop leaves it out."
            raise DataError(f"{where}: {error}{hint}") from error
        tasks[task.id], places[task.id] = task, where
    if not tasks:
        raise DataError(f"{path}: none of its {len(rows)} records is a task.")
    return list(tasks.values())


def _task(record: Mapping[str, Any], *, detector: Detector, name: str) -> Task:
    """One record as a task with checked instructions. name: its id if it has no key."""
    turns = _turns(record)
    for number, turn in enumerate(turns):
        if not turn["instructions"]:
            raise DataError(f"turn {number + 1} has no instruction to check.")
        for given in turn["instructions"]:
            instruction(given["id"], given["arguments"], detector=detector)
    language = str(record.get("language") or "")
    key = record.get("key")
    task_id = name if key in (None, "") else f"{key} {language}".strip()
    return Task(id=task_id, payload={"turns": turns, "language": language})


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "prompt" in record:
        return [_turn(record, "")]
    prefixes = [f"turn_{number}_" for number in range(1, MAX_TURNS + 1)]
    # A dialogue of fewer turns has none, or "None".
    given = takewhile(lambda p: record.get(f"{p}prompt") not in (None, "", "None"), prefixes)
    turns = [_turn(record, prefix) for prefix in given]
    if not turns:
        raise DataError(
            f"expected the fields prompt, instruction_id_list and kwargs (IFEval), or "
            f"turn_1_prompt and so on (Multi-IF); found {sorted(map(str, record))}."
        )
    return turns


def _turn(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    names = ("prompt", "instruction_id_list", "kwargs")
    fields = {name: record.get(prefix + name) for name in names}
    prompt = fields["prompt"]
    if prefix:  # Multi-IF has it as a message
        message = parsed_json(prompt, f"{prefix}prompt")
        prompt = message.get("content") if isinstance(message, dict) else message
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{prefix}prompt must be text that is not empty, found {prompt!r}.")
    ids = parsed_json(fields["instruction_id_list"], f"{prefix}instruction_id_list")
    arguments = parsed_json(fields["kwargs"], f"{prefix}kwargs")
    if not isinstance(ids, list) or not isinstance(arguments, list) or len(ids) != len(arguments):
        raise DataError(
            f"{prefix}instruction_id_list and {prefix}kwargs must be lists of the same length, "
            f"found {ids!r:.80} and {arguments!r:.80}."
        )
    instructions = []
    for instruction_id, given in zip(ids, arguments, strict=True):
        found = parsed_json(given, f"{prefix}kwargs") if given else {}
        if not isinstance(found, dict) or not isinstance(instruction_id, str):
            raise DataError(f"{instruction_id!r} with {prefix}kwargs {found!r:.80}.")
        filled = {name: value for name, value in found.items() if value is not None}
        instructions.append({"id": instruction_id, "arguments": filled})
    return {"prompt": prompt, "instructions": instructions}
