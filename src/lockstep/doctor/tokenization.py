"""Finds the tokenizer and the renderer of a dump. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import choices, from_dict, read_json, tag
from lockstep.doctor.inputs.base import Facts
from lockstep.doctor.rows import Rows
from lockstep.errors import ConfigError, LockstepError
from lockstep.models.config import ModelConfig
from lockstep.models.gguf import PACKAGED
from lockstep.models.locate import fetch, locate_model, shipped_models
from lockstep.renderers.base import Renderer
from lockstep.renderers.config import RendererConfig
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import GENERATION_FILE, Tokenizer
from lockstep.run.preflight import (
    DEFAULT_RENDERERS,
    RENDERER_FILE,
    RendererFile,
    choose_model_renderer,
    stored_renderer,
)

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of that file that change what an engine draws from."""
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"),
    *(GENERATION_FILE, RENDERER_FILE),
)
"""Files that are fetched from the hub for a model: a few MB, no weights."""
MAX_UNKNOWN_IDS = 0.01
"""Largest share of ids that may be beyond the tokenizer: a model may draw a few from the padding of
its vocabulary. Above it the tokenizer is another model's."""
_RUN, _NUM_RUNS, _MIN_SPELT = 8, 64, 0.5
"""Characters of a run of recorded text, runs of a text that are looked for, and the share of them
that the ids of its row must spell: eight characters are more than most tokens, so that other tokens
seldom spell them by chance."""
_MAX_UNLIKE = 0.9
"""Largest share of rows whose ids may spell no recorded text: a program's defect changes a part of
a text. Above it the tokenizer is not theirs."""


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """Tokenizer and renderer of the rows. `lacks` gives the reason for each that is None."""

    tokenizer: Tokenizer | None = None
    renderer: Renderer | None = None
    why: str = ""
    """Why the model's files chose that renderer; empty if they left no choice."""
    pad_id: int | None = None
    """Padding id of the tokenizer's own settings."""
    eos_ids: frozenset[int] = frozenset()
    """Ids that stop an engine, by the model's generation_config.json or config.json."""
    generation_defaults: Mapping[str, float] | None = None
    """Sampling settings of the model's generation_config.json; None without one."""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """"tokenizer", "renderer" -> why it is missing and how to give it."""


def find_tokenization(
    facts: Facts, *, tokenizer: Tokenizer | str | None = "", renderer: Renderer | str | None = ""
) -> Tokenization:
    """The tokenizer and renderer that the user gives, as objects or by name; or else the names in
    `facts`.

    tokenizer: a directory or a tokenizer.json, a shipped model, or ORGANISATION/NAME on the hub
    (only the small files are fetched). renderer: a name (harmony, chatml, ...) or settings as JSON.
    Raises ConfigError or RendererError if the user's choice is missing; a
    missing choice of the input is left out, and nothing is fetched for it.
    """
    if renderer is not None and not isinstance(renderer, str):
        return Tokenization(tokenizer=renderer.tokenizer, renderer=renderer)
    if isinstance(tokenizer, Tokenizer):
        return Tokenization(tokenizer=tokenizer, lacks={"renderer": "none was given"})
    try:
        place = locate(tokenizer, may_fetch=True) if tokenizer else _place_named(facts)
        found = Tokenizer.from_file(place, has_prefix=False)
    except LockstepError as error:
        if tokenizer:
            raise
        if renderer:
            raise ConfigError(
                f"--renderer {renderer} needs the tokenizer of the model, not found: {error}"
            ) from None
        how = "Name it: --tokenizer DIR, or ORGANISATION/NAME to fetch it"
        lacks = {"tokenizer": f"{error} {how}", "renderer": "it needs the tokenizer: --tokenizer"}
        return Tokenization(lacks=lacks)
    directory = place if place.is_dir() else place.parent
    known = Tokenization(
        tokenizer=found,
        pad_id=_pad_id(found, directory),
        eos_ids=frozenset(found.eos_ids) or _eos_ids(directory),
        generation_defaults=_generation_defaults(facts, directory),
    )
    try:
        if named := renderer or facts.renderer:
            made, why = make_renderer(_renderer_config(named, directory), found), ""
        else:
            choice = choose_model_renderer(directory, _architecture(directory), found)
            made, why = choice.renderer, choice.why
    except LockstepError as error:
        if renderer:
            raise
        lacks = {"renderer": f"{error} Name it: --renderer {'|'.join(_names())}"}
        return replace(known, lacks=lacks)
    return replace(known, renderer=made, why=why)


def _architecture(directory: Path) -> str:
    """Empty if the directory has only the tokenizer of a model."""
    try:
        return ModelConfig.from_directory(directory).architecture
    except LockstepError:
        return ""


def _place_named(facts: Facts) -> Path:
    """The place that the input names, if it is on this machine."""
    for named in filter(None, (facts.tokenizer, facts.model)):
        with suppress(LockstepError):
            return locate(named, may_fetch=False)
    if named := facts.tokenizer or facts.model:
        raise ConfigError(f"the tokenizer of {named}, which the input names, is not here.")
    raise ConfigError("the input does not name its model.")


def locate(named: str, *, may_fetch: bool) -> Path:
    """A file, a directory, a shipped model, or the hub's copy of the small files."""
    path = Path(named).expanduser()
    if named in (*shipped_models(), *PACKAGED) or path.suffix == ".gguf":
        return locate_model(named)
    if path.is_file() or (path / "tokenizer.json").is_file():
        return path
    if named.count("/") == 1 and not named.startswith((".", "/", "~")) and not path.exists():
        place = fetch(named, files=_FILES, may_download=may_fetch, option="--tokenizer")
        if (place / "tokenizer.json").is_file():
            return place
    raise ConfigError(
        f"--tokenizer {named}: expected a directory with a tokenizer.json, such a file, a shipped "
        f"model ({', '.join(shipped_models())}), or ORGANISATION/NAME on the Hugging Face hub."
    )


def _renderer_config(named: str, directory: Path) -> RendererConfig:
    """The settings that `named` means: JSON, or a name, with the model's own settings for it."""
    if named.lstrip().startswith("{"):
        try:
            return from_dict(RendererFile, {"renderer": json.loads(named)}).renderer
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"--renderer: {error}") from None
    if named not in _names():
        raise ConfigError(
            f"--renderer {named}: expected one of {', '.join(_names())}, or settings as "
            "JSON. A renderer of your own comes with --plugin FILE.py."
        )
    own, default = stored_renderer(directory), DEFAULT_RENDERERS.get(_architecture(directory))
    if own is None and default is not None:
        own = default()
    if own is not None and named == tag(type(own)):
        return own
    return from_dict(RendererFile, {"renderer": {"type": named}}).renderer


def _names() -> list[str]:
    return sorted(choices(RendererConfig))


def _generation_defaults(facts: Facts, directory: Path) -> Mapping[str, float] | None:
    """The sampling settings in the generation_config.json of the model, if it is here: an engine
    reads this file. Otherwise the settings in the tokenizer's directory; None without any."""
    place = directory
    if facts.model:
        with suppress(LockstepError):
            of_model = locate(facts.model, may_fetch=False)
            of_model = of_model if of_model.is_dir() else of_model.parent
            place = of_model if (of_model / GENERATION_FILE).is_file() else directory
    if (named := settings_beside(place, GENERATION_FILE)) is None:
        return None
    return {n: float(named[n]) for n in _SAMPLING if type(named.get(n)) in (int, float)}


def settings_beside(directory: Path, name: str) -> Mapping[str, Any] | None:
    """A file of settings of a model, such as its generation_config.json; None without one, or
    if it holds no JSON object: an engine would not start on it either."""
    with suppress(ConfigError):
        return read_json(directory / name, ConfigError)
    return None


def _pad_id(tokenizer: Tokenizer, directory: Path) -> int | None:
    """The padding token that tokenizer_config.json names."""
    declared: Any = (settings_beside(directory, "tokenizer_config.json") or {}).get("pad_token")
    name = declared.get("content") if isinstance(declared, dict) else declared
    try:
        return tokenizer.control_id(name) if isinstance(name, str) else None
    except LockstepError:
        return None


def _eos_ids(directory: Path) -> frozenset[int]:
    """The ids that end a reply for an engine that loads a model without a generation_config.json;
    none if the file does not say it in numbers."""
    found: Any = (settings_beside(directory, "config.json") or {}).get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return frozenset(ids) if all(type(id_) is int for id_ in ids) else frozenset()


def control_spelling(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches the name of any control token, the longest first."""
    names = sorted((tokenizer.control_name(i) for i in tokenizer.control_ids), key=len)
    return re.compile("|".join(map(re.escape, reversed(names))) or r"(?!)")


# -- is it the rows' tokenizer? -------------------------------------------------------------------


def why_beyond(tokenizer: Tokenizer, rows: Rows) -> str:
    """Reason why rows with ids beyond the tokenizer are of another one; empty for others."""
    is_beyond = rows.token_ids >= tokenizer.vocab_size
    if not rows.num_tokens or is_beyond.mean() <= MAX_UNKNOWN_IDS:
        return ""
    row, place = rows.where(at := int(np.argmax(is_beyond)))
    return (
        f"{is_beyond.mean():.0%} of the rows' ids, up to {rows.token_ids.max()}, are not in the "
        f"tokenizer ({tokenizer.where}), which has {tokenizer.vocab_size}: it is of another model. "
        f"The first is {rows.token_ids[at]}, row {row}, token {place}."
    )


def why_unlike(tokenizer: Tokenizer, rows: Rows) -> str:
    """Reason why the tokenizer is not theirs if, by it, nearly all rows spell none of the
    texts and messages recorded with them; empty otherwise."""
    unlike, num_told = list[str](), 0
    for r, tokens in enumerate(rows.slices):
        texts = [rows.texts[r] or ""] if rows.texts else []
        texts += [m.content for m in rows.messages[r] or ()] if rows.messages else []
        if texts := [text for text in texts if len(_plain(text)) >= _RUN]:
            num_told += 1
            spelt = tokenizer.decode(rows.token_ids[tokens])
            if max(_share_spelt(_plain(text), _plain(spelt)) for text in texts) < _MIN_SPELT:
                unlike.append(
                    f"row {rows.row_ids[r]} is {spelt[:40]!r}... and not {texts[-1]!r:.40}"
                )
    if len(unlike) <= _MAX_UNLIKE * num_told:
        return ""
    return (
        f"by the tokenizer ({tokenizer.where}) the ids of {len(unlike)} of {num_told} rows do not "
        f"spell the texts recorded with them ({unlike[0]}...): it is of another model, or the "
        "texts are of other rows."
    )


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()


def _share_spelt(text: str, spelt: str) -> float:
    begins = range(0, len(text) - _RUN + 1, 1 + len(text) // _NUM_RUNS)
    return sum(text[i : i + _RUN] in spelt for i in begins) / len(begins)
