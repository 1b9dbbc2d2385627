"""Public sets of mathematical problems, read from their files as published.

Each source has its own columns, prompt and form of the answer. Every row is checked before a model
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.agent.task_config import Split
from lockstep.agent.tasks import derive_seed
from lockstep.envs.math.grading import Form, find_answer, why_ungradable
from lockstep.errors import DataError
from lockstep.store.tables import locate_data, read_rows
from lockstep.tables import tables_beside

BadRows = Literal["error", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem and its answer."""

    id: str
    question: str
    """Text of the user message."""
    answer: str
    """The final answer alone, without a solution."""
    where: str = ""
    """`path:line`, or `path:row N` of a parquet file; counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSource:
    """Published form of one set of problems."""

    repository: str
    """Data set on the Hugging Face hub; "" for a user's own file."""
    columns: Sequence[str]
    """Columns that are read."""
    train: Sequence[str]
    """Patterns of the training files; the first pattern with a match is taken."""
    eval: Sequence[str]
    """Patterns of the test files; none if none were published."""
    form: Form
    """Place of the answer in a reply."""
    read: Callable[[Mapping[str, Any], str], tuple[str, str]]
    """(row, where) -> (question, answer). Raises DataError."""
    is_prompt_whole: bool = False
    """True if the question says how to answer, so that no instructions precede it."""


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {key} must be text, found {value!r:.60}.")
    return value.strip()


def _read_gsm8k(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    solution = _text(row, "answer", where)
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise DataError(f"{where}: answer must end in `#### NUMBER`, found {solution[-60:]!r}.")
    return _text(row, "question", where), answer.strip()


def _read_dapo(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    prompt, reward_model = row.get("prompt"), row.get("reward_model")
    message = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else None
    if not isinstance(message, dict) or not isinstance(reward_model, dict):
        raise DataError(
            f"{where}: expected prompt=[{{content, role}}] with one message and reward_model="
            f"{{ground_truth, style}}; found {prompt!r:.60} and {reward_model!r:.60}."
        )
    return _text(message, "content", where), _text(reward_model, "ground_truth", where)


def _read_aime(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    if row.get("answer") is not None:
        return _text(row, "problem", where), _text(row, "answer", where)
    # math-ai/aime24 has the answer in its column `solution` alone, as \boxed{204}.
    solution = _text(row, "solution", where)
    answer, is_found = find_answer(solution, form="boxed")
    if not is_found:
        raise DataError(f"{where}: neither `answer` nor a \\boxed{{}} in {solution[-60:]!r}.")
    return _text(row, "problem", where), answer


def _read_own(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    return _text(row, "question", where), _text(row, "answer", where)


_READERS = {"gsm8k": _read_gsm8k, "dapo": _read_dapo, "aime": _read_aime, "file": _read_own}
PUBLIC: dict[str, PublicSource] = {
    name: PublicSource(read=_READERS[name], **table)
    for name, table in tables_beside(__file__).items()
}
"""Sources by the setting `task.source`."""


def _files_of(source: str, path: str, split: Split) -> list[Path]:
    """The files of a split in the file or folder that `path` names, downloaded if it is a data set
    of the hub; [] if there are none. A single file is the training split. path: "" is the data set
    that the source was published as."""
    public = PUBLIC[source]
    name = path or public.repository
    if not name:
        raise DataError(
            f"task.source={source} needs task.path: a .jsonl or .parquet file, or a folder with "
            "train and test files."
        )
    root = locate_data(name, patterns=[*public.train, *public.eval])
    if root.is_file():
        return [root] if split == "train" else []
    for pattern in public.train if split == "train" else public.eval:
        if files := sorted(root.glob(pattern)):
            return files
    if split == "train":
        raise DataError(f"{root}: has no file of {source}; looked for {', '.join(public.train)}.")
    return []


def read_problems(source: str, path: str, split: Split, *, bad_rows: BadRows) -> list[Problem]:
    """All problems of a split; [] if it has no files. Rows with the same question and answer are
    one problem: DAPO's file has each row about a hundred times.

    bad_rows: what to do with an answer that cannot be graded, and with a question that has two
    answers: raise DataError, or leave out all rows of the question. A malformed row always raises.
    """
    public, files = PUBLIC[source], _files_of(source, path, split)
    by_question: dict[str, Problem] = {}
    dropped: set[str] = set()
    for file in files:
        for number, (where, row) in enumerate(read_rows(file, columns=public.columns)):
            if not number or file.suffix != ".parquet":  # a parquet file has one schema
                _check_columns(row, source, where)
            question, answer = public.read(row, where)
            known = by_question.get(question)
            if known is not None and known.answer == answer:
                continue
            why = why_ungradable(answer)
            if known is not None:
                why = f"the same question has the answer {known.answer!r} at {known.where}"
            if why and bad_rows == "error":
                raise DataError(
                    f"{where}: answer {answer!r:.80}: {why}. Correct it, or leave such questions "
                    "out with task.bad_rows=drop."
                )
            if why:
                dropped.add(question)
            name = f"{source}-{derive_seed(question):016x}"
            by_question[question] = Problem(id=name, question=question, answer=answer, where=where)
    problems = [p for p in by_question.values() if p.question not in dropped]
    if files and not problems:
        names = ", ".join(map(str, files))
        raise DataError(f"{names}: none of {len(by_question)} problems is usable.")
    return problems


def _check_columns(row: Mapping[str, Any], source: str, where: str) -> None:
    # AIME's two repositories name the answer's column differently; one of the two is enough.
    needed = {"aime": ("problem",)}.get(source, PUBLIC[source].columns)
    if missing := [c for c in needed if c not in row]:
        found = f"found {sorted(row)}"
        raise DataError(f"{where}: no column {missing[0]!r}, which {source} has; {found}.")
