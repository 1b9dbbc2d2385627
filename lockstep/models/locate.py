"""Finds a model's files: in the package, in a directory, or on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config import did_you_mean
from lockstep.errors import CheckpointError, ConfigError

SHIPPED_ROOT = Path(__file__).parent / "shipped"
"""One directory per model of the package; `lockstep sft NAME` rebuilds it."""

CONFIG_FILES = ("*.json", "*.jinja")
"""Everything but the weights."""
HUB_FILES = (*CONFIG_FILES, "*.safetensors")
NOT_HUB_FILES = ("*/*", "consolidated*")
"""Second copies of the weights that some repositories hold in another format."""


def shipped_models() -> list[str]:
    return sorted(p.name for p in SHIPPED_ROOT.iterdir() if (p / "config.json").is_file())


def locate_model(name: str, *, files: Sequence[str] = HUB_FILES) -> Path:
    """The checkpoint directory of `name`; the `files` of a model on the hub are downloaded first.

    Raises ConfigError for an unknown name, CheckpointError if the download fails.
    """
    if not name:
        raise ConfigError(
            "model is empty; expected a shipped model "
            f"({', '.join(shipped_models())}), a checkpoint directory, or ORGANISATION/NAME."
        )
    if name in shipped_models():
        return SHIPPED_ROOT / name
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model={name} is a directory without a config.json.")
        return path
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return fetch(name, files=files)
    raise ConfigError(
        f"model={name!r} is neither a shipped model nor a directory."
        f"{did_you_mean(name, shipped_models())}"
    )


def fetch(
    name: str, *, files: Sequence[str] = HUB_FILES, may_download: bool = True, option: str = "model"
) -> Path:
    """The directory of the hub's files. may_download: False takes them from the local cache alone.
    option: the user's setting, for errors. Raises CheckpointError if they cannot be had."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=list(files),
                ignore_patterns=list(NOT_HUB_FILES),
                local_files_only=not may_download,
            )
        )
    except Exception as error:  # the hub's client raises a dozen kinds; each means the same here
        said = " ".join(str(error).split())
        raise CheckpointError(
            f"{option}={name}: no such directory, and no download from the Hugging Face hub "
            f"({type(error).__name__}: {said}). On a machine that reaches it: "
            f"`hf download {name} --local-dir DIR`; then {option}=DIR."
        ) from error
