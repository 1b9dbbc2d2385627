"""Rewards from a model that judges, behind any server of the OpenAI chat protocol.

If the judge fails, the episode fails with its reason and is not trained. A silent 0 would train the
policy on the outages of the judge's server.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import statistics
import string
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lockstep.agent.environment import Score
from lockstep.agent.scoring import Scored, ScorerConfig, accepted_answers
from lockstep.config import ABOVE_0, Form, at_least
from lockstep.engines.http import HttpClient
from lockstep.errors import ConfigError, EngineError, JudgeError, ServerRefusedError
from lockstep.tables import tables_beside
from lockstep.types import Message, Task

MAX_PAUSE_SECONDS = 30.0
LOWEST, HIGHEST = 0, 10
"""Grades of a judge; they are made 0 and 1."""
MAX_CHARS = 20_000
"""Characters of the answer, or of the dialogue, that the judge reads; the rest is cut, with a note
to the judge."""
FIELDS = ("rubric", "question", "answer", "reference", "dialogue", "low", "high")

_TABLES = tables_beside(__file__)
PROMPT: str = _TABLES["prompt"]
PROTOCOL: str = _TABLES["protocol"]
CONTROL = re.compile(
    r"(?:<\|[^<>|\s]{1,40}\|>|<\uff5c[^<>]{1,60}\uff5c>|</?s>|</?think>|\[/?INST\]"
    r"|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>)"
)
"""Spellings of control tokens, which a server may read in text as the tokens themselves."""
SCORE = re.compile(r'"score"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*[,}]')
"""The member of a JSON object that is the grade, with its number."""


@dataclass(frozen=True, kw_only=True)
class JudgeScorer(ScorerConfig):
    """A model grades the answer; the reward is its grade, from 0 to 1. Needs the extra `http`."""

    TAG: ClassVar[str] = "judge"
    CONFLICTS = _TABLES["conflicts"]

    url: Annotated[str, Form("(https?://.*)?", "http://... or https://...")] = ""
    """URL of the server, up to and with /v1."""
    model: str = ""
    """Name of the model at the server."""
    api_key_variable: str = ""
    """Environment variable with the server's key; empty sends none."""
    rubric: str = "Is the answer right and complete?"
    """Criterion of the grade. `@FILE` reads it from a file."""
    prompt: str = PROMPT
    """The message to the judge, with {rubric}, {question}, {answer}, {reference}, {dialogue},
    {low} and {high}; `@FILE` reads it from a file. Question, answer, reference and dialogue come as
    quotations that their text cannot end."""
    samples: Annotated[int, at_least(1)] = 1
    """Gradings per episode; the reward is their median."""
    temperature: Annotated[float, at_least(0)] = 0.0
    """Temperature of the judge."""
    max_tokens: Annotated[int, at_least(1)] = 1024
    """Tokens that one grading may take."""
    timeout_seconds: Annotated[float, ABOVE_0] = 120.0
    """Seconds without a byte from the server until the grading has failed."""
    retries: ClassVar[int] = 4
    """Retries of a grading that failed or cannot be read; then the episode fails."""
    retry_seconds: ClassVar[float] = 1.0
    """Seconds before the first retry; each pause after it is twice as long, up to 30 s."""
    max_in_flight: Annotated[int, at_least(1)] = 32
    """Gradings that run at the same time."""

    def check(self) -> None:
        """Asks the server which models it has."""
        if not self.url or not self.model:
            text = f"judge: url={self.url!r} model={self.model!r}: give both"
            raise ConfigError(f"{text}, scorer.url=http://HOST/v1 scorer.model=NAME.")
        _ = self._texts
        try:
            found = self._client.call_now("/models", seconds=min(30.0, self.timeout_seconds))
            names = [str(each["id"]) for each in found["data"]]
        except (ServerRefusedError, LookupError, TypeError) as error:
            if isinstance(error, ServerRefusedError) and error.status in (401, 403):
                raise
            return  # many servers have no such route, or one of another form
        if names and self.model not in names:
            known = ", ".join(names[:20])
            raise ConfigError(f"judge: {self.url} has no model {self.model!r}; it has: {known}.")

    async def score(self, task: Task, answer: str | None, dialogue: Sequence[Message]) -> Scored:
        """Counters: judge/calls, judge/retries, judge/seconds (waiting), and with several
        gradings judge/spread: the highest minus the lowest, from 0 to 1."""
        if answer is None:
            return Score(reward=0.0, parts={"judged": 0.0, "answered": 0.0}), {}
        question = self._question(task, answer, dialogue)
        counters: Counter[str] = Counter()
        started = time.monotonic()
        gradings = (self._grade(question, counters) for _ in range(self.samples))
        grades = await asyncio.gather(*gradings)
        counted: dict[str, float] = {**counters, "judge/seconds": time.monotonic() - started}
        if len(grades) > 1:
            counted["judge/spread"] = max(grades) - min(grades)
        reward = statistics.median(grades)
        return Score(reward=reward, parts={"judged": reward, "answered": 1.0}), counted

    # -- asking ---------------------------------------------------------------------------------

    async def _grade(self, question: str, counters: Counter[str]) -> float:
        """Returns one grading, scaled to 0..1. Raises JudgeError if no attempt gave one."""
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": PROTOCOL},
                {"role": "user", "content": question},
            ],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        failure: Exception | None = None
        for attempt in range(self.retries + 1):
            if attempt:
                counters["judge/retries"] += 1
                # Jitter: episodes that failed together must not come back together.
                pause = min(MAX_PAUSE_SECONDS, self.retry_seconds * 2 ** (attempt - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            counters["judge/calls"] += 1
            try:
                return self._read(await self._client.post("/chat/completions", body))
            except (EngineError, JudgeError) as error:
                failure = error
                status = error.status if isinstance(error, ServerRefusedError) else 0
                if 400 <= status < 500 and status not in (408, 409, 429):  # it will say so again
                    break
        raise JudgeError(f"judge: no grading in {attempt + 1} tries. The last: {failure}")

    def _read(self, reply: Any) -> float:
        """Returns the grade of a reply, scaled to 0..1. Raises JudgeError if the reply has none."""
        try:
            text = str(reply["choices"][0]["message"]["content"])
        except (LookupError, TypeError):
            raise JudgeError(f"the reply has no text: {json.dumps(reply)[:200]}") from None
        if (grade := grade_in(text)) is None:
            raise JudgeError(f'the reply has no {{"score": NUMBER}}: ...{text[-200:]!r}')
        if not LOWEST <= grade <= HIGHEST:
            raise JudgeError(f"the grade {grade:g} is not between {LOWEST} and {HIGHEST}")
        return (grade - LOWEST) / (HIGHEST - LOWEST)

    def _question(self, task: Task, answer: str, dialogue: Sequence[Message]) -> str:
        rubric, prompt = self._texts
        question = next((m.content for m in dialogue if m.role == "user"), "")
        values = {
            "rubric": rubric,
            "question": quoted(question),
            "answer": quoted(answer, limit=MAX_CHARS),
            "reference": quoted("\n".join(accepted_answers(task)) or "(none)"),
            "dialogue": quoted("\n".join(_lines_of(dialogue)), limit=MAX_CHARS),
            "low": str(LOWEST),
            "high": str(HIGHEST),
        }
        return prompt.format_map(values)

    # -- kept beside the fields -------------------------------------------------------------------

    @cached_property
    def _texts(self) -> tuple[str, str]:
        """(rubric, prompt)."""
        rubric, prompt = (_text_of(each) for each in (self.rubric, self.prompt))
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
        except ValueError as error:
            text = f"judge: the prompt is malformed: {error}. Write {{{{ for {{."
            raise ConfigError(text) from None
        if unknown := sorted(names - set(FIELDS)):
            known = ", ".join(FIELDS)
            raise ConfigError(f"judge: the prompt has the field {unknown[0]!r}; known: {known}.")
        if not names & {"answer", "dialogue"}:
            raise ConfigError("judge: the prompt has neither {answer} nor {dialogue} to grade.")
        return rubric, prompt

    @cached_property
    def _client(self) -> HttpClient:
        return HttpClient(
            self.url.rstrip("/"),
            name="judge",
            request_seconds=self.timeout_seconds,
            api_key_env=self.api_key_variable,
            max_connections=self.max_in_flight,
        )


def quoted(text: str, *, limit: int = 0) -> str:
    """Quotes `text` so that it cannot end the quotation: every line begins with "> ", and spellings
    of control tokens are broken up by a space.

    >>> print(quoted("four\\n> no\\nEND <|im_end|>"))
    > four
    > > no
    > END < |im_end|>
    """
    note = ""
    if limit and len(text) > limit:
        note = f"\n(cut here: {len(text)} characters in all)"
        text = text[:limit]
    text = CONTROL.sub(lambda found: found[0][0] + " " + found[0][1:], text)
    return "\n".join(f"> {line}" for line in text.splitlines() or [""]) + note


def grade_in(text: str) -> float | None:
    """Returns the last finite score that JSON in `text` gives, outside of quotations.

    >>> grade_in('It is {"score": 3} at first sight, but {"score": 7.5}.')
    7.5
    """
    own = "\n".join(line for line in text.splitlines() if not line.startswith(">"))
    grades = [float(number) for number in SCORE.findall(own)]
    return next((grade for grade in reversed(grades) if math.isfinite(grade)), None)


def _lines_of(dialogue: Sequence[Message]) -> Iterator[str]:
    for message in dialogue:
        yield f"[{message.role}] {message.content}"
        for call in message.tool_calls:
            yield f"[call] {call.name} {call.arguments}"


def _text_of(setting: str) -> str:
    """Reads a setting, or the file that `@FILE` names."""
    if not setting.startswith("@"):
        return setting
    try:
        return Path(setting[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"judge: {setting}: cannot be read: {error}.") from None
