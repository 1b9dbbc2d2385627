"""Finds the tokenizer and the renderer of a dump. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.config import choices, from_dict, tag
from lockstep.doctor.inputs.base import Facts
from lockstep.errors import ConfigError, LockstepError
from lockstep.models.config import ModelConfig
from lockstep.models.locate import fetch, locate_model, shipped_models
from lockstep.renderers.base import Renderer
from lockstep.renderers.config import JinjaConfig, RendererConfig
from lockstep.renderers.jinja.source import has_template
from lockstep.renderers.registry import make_renderer
from lockstep.renderers.tokenizer import Tokenizer
from lockstep.run.preflight import RENDERER_FILE, RendererFile, renderer_of
from lockstep.types import Message, ToolSchema

GENERATION_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of that file that change what an engine draws from."""
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    GENERATION_FILE,
    RENDERER_FILE,
)
"""Files that are fetched from the hub for a model: a few MB, no weights."""
_PROBE = (
    [Message(role="system", content="s"), Message(role="user", content="u")],
    [ToolSchema(name="t", description="d", parameters={"type": "object", "properties": {}})],
)
"""Messages and tools whose rendering tells a template from a format that it resembles."""


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """Tokenizer and renderer of the rows. `lacks` gives the reason for each that is None."""

    tokenizer: Tokenizer | None = None
    renderer: Renderer | None = None
    pad_id: int | None = None
    """Padding id of the tokenizer's own settings."""
    eos_ids: frozenset[int] = frozenset()
    """Ids at which engines stop by the model's generation_config.json or config.json."""
    generation_defaults: Mapping[str, float] | None = None
    """Sampling settings of the model's generation_config.json; None without one."""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """"tokenizer", "renderer" -> why it is missing and how to give it."""


def find_tokenization(facts: Facts, *, tokenizer: str = "", renderer: str = "") -> Tokenization:
    """The tokenizer and renderer that the user names, or else those that `facts` name.

    tokenizer: a directory or a tokenizer.json, a shipped model, or ORGANISATION/NAME on the hub
    (only the small files are fetched). renderer: a name (harmony, chatml, ...) or settings as JSON.
    Raises ConfigError or RendererError if the user's choice is missing; a
    missing choice of the input is left out, and nothing is fetched for it.
    """
    try:
        place = _locate(tokenizer, may_fetch=True) if tokenizer else _place_named(facts)
        found = Tokenizer.from_file(place, has_prefix=False)
    except LockstepError as error:
        if tokenizer:
            raise
        if renderer:
            raise ConfigError(
                f"--renderer {renderer} needs the tokenizer of the model, which was not found: "
                f"{error}"
            ) from None
        how = "Name it: --tokenizer DIR, or ORGANISATION/NAME to fetch it"
        lacks = {"tokenizer": f"{error} {how}", "renderer": "it needs the tokenizer: --tokenizer"}
        return Tokenization(lacks=lacks)
    directory = place if place.is_dir() else place.parent
    known = Tokenization(
        tokenizer=found,
        pad_id=_pad_id(found, directory),
        eos_ids=_eos_ids(directory),
        generation_defaults=_generation_defaults(facts, directory),
    )
    try:
        made = make_renderer(_renderer_config(renderer or facts.renderer, directory), found)
        if not renderer and not facts.renderer:
            made = _by_own_template(made, directory)
    except LockstepError as error:
        if renderer:
            raise
        lacks = {"renderer": f"{error} Name it: --renderer {'|'.join(_names())}"}
        return replace(known, lacks=lacks)
    return replace(known, renderer=made)


def _by_own_template(made: Renderer, directory: Path) -> Renderer:
    """The directory's chat template, if that declares a tool otherwise than the format of the
    architecture: the dump's program writes by the template."""
    if not has_template(directory) or (directory / RENDERER_FILE).is_file():
        return made
    with suppress(LockstepError):
        own = make_renderer(JinjaConfig(), made.tokenizer)
        if own.render(*_PROBE) != made.render(*_PROBE):
            return own
    return made


def _place_named(facts: Facts) -> Path:
    """The place that the input names, if it is on this machine."""
    for named in filter(None, (facts.tokenizer, facts.model)):
        with suppress(LockstepError):
            return _locate(named, may_fetch=False)
    if named := facts.tokenizer or facts.model:
        raise ConfigError(f"the tokenizer of {named}, which the input names, is not here.")
    raise ConfigError("the input does not name its model.")


def _locate(named: str, *, may_fetch: bool) -> Path:
    """A file, a directory, a shipped model, or the hub's copy of the small files."""
    path = Path(named).expanduser()
    if path.is_file() or (path / "tokenizer.json").is_file():
        return path
    if named in shipped_models():
        return locate_model(named)
    if named.count("/") == 1 and not named.startswith((".", "/", "~")) and not path.exists():
        place = fetch(named, files=_FILES, may_download=may_fetch, option="--tokenizer")
        if (place / "tokenizer.json").is_file():
            return place
    raise ConfigError(
        f"--tokenizer {named}: expected a directory with a tokenizer.json, such a file, a shipped "
        f"model ({', '.join(shipped_models())}), or ORGANISATION/NAME on the Hugging Face hub."
    )


def _renderer_config(named: str, directory: Path) -> RendererConfig:
    """The settings that `named` means: JSON, or a name; empty takes the model's own."""
    if named.lstrip().startswith("{"):
        try:
            return from_dict(RendererFile, {"renderer": json.loads(named)}).renderer
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"--renderer: {error}") from None
    if named and named not in _names():
        raise ConfigError(
            f"--renderer {named}: expected one of {', '.join(_names())}, or settings as "
            "JSON. A renderer of your own comes with --plugin FILE.py."
        )
    own = JinjaConfig() if has_template(directory) else None
    try:
        own = renderer_of(directory, ModelConfig.from_directory(directory))
    except LockstepError:
        if not named and (own is None or (directory / RENDERER_FILE).is_file()):
            raise
    if own is not None and named in ("", tag(type(own))):
        return own
    return from_dict(RendererFile, {"renderer": {"type": named}}).renderer


def _names() -> list[str]:
    return sorted(choices(RendererConfig))


def _generation_defaults(facts: Facts, directory: Path) -> Mapping[str, float] | None:
    """The sampling settings in the generation_config.json of the model, or else of its tokenizer's
    directory. An engine reads the model's."""
    places = [directory]
    if facts.model:
        with suppress(LockstepError):
            place = _locate(facts.model, may_fetch=False)
            places = [place if place.is_dir() else place.parent, *places]
    for place in places:
        path = place / GENERATION_FILE
        if path.is_file():
            try:
                given: Any = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                return None  # the engine would not start on it either
            kinds = (int, float)
            named = given if isinstance(given, dict) else {}
            return {n: float(named[n]) for n in _SAMPLING if type(named.get(n)) in kinds}
    return None


def _pad_id(tokenizer: Tokenizer, directory: Path) -> int | None:
    """The padding token that tokenizer_config.json names."""
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    declared: Any = json.loads(path.read_text(encoding="utf-8")).get("pad_token")
    name = declared.get("content") if isinstance(declared, dict) else declared
    try:
        return tokenizer.control_id(name) if isinstance(name, str) else None
    except LockstepError:
        return None


def _eos_ids(directory: Path) -> frozenset[int]:
    """The ids that end a reply for an engine that loads this model; none if the files do not say
    it in numbers."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        found: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if ids and all(type(id_) is int for id_ in ids):
            return frozenset(ids)
    return frozenset()
