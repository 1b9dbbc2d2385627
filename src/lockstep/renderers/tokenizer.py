"""Text to ids and back, with a wall between text and control tokens.

A tokenizer as shipped turns the text `<|im_start|>` into the control token of that name, so that a
user or a web page could open a turn of its own. Here `encode` sees ordinary text only and never
returns a control token. `control_id`, given a name, is the only way to one.
"""

# The tokenizers library ships no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from lockstep.config import read_json
from lockstep.errors import RendererError
from lockstep.renderers.large_texts import CURRENT
from lockstep.renderers.vocabulary import (
    characters_of,
    merge_parts,
    read_vocabulary,
    unwritable_bytes,
    without_prefix_space,
)

_PROBE = 'Hello, world!\n\t  {"key": [1, 2]} <|x|> \u00e9\u4e2d\u0416\U0001f600\n\n end '
"""Probe text: a tokenizer that does not return it byte for byte is refused."""


GENERATION_FILE = "generation_config.json"


class Tokenizer:
    """A BPE vocabulary that keeps every byte: a token is a run of bytes, or a control token.

    Make one with `from_file` or `from_json`. `vocabulary` decides which added
    tokens of a file are control tokens.

    >>> from lockstep.testing.tokenizers import byte_tokenizer
    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode("<|end|>") == [tokenizer.control_id("<|end|>")]
    False
    >>> tokenizer.decode([*tokenizer.encode("hi"), tokenizer.control_id("<|end|>")])
    'hi<|end|>'
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        *,
        text_tokens: Mapping[int, bytes],
        control_tokens: Mapping[str, int],
        where: str = "tokenizer",
        fast: FastTokenizer | None = None,
    ) -> None:
        """encode: turns ordinary text into ids, never control ids. text_tokens: id -> its bytes.
        control_tokens: name -> id. fast: the tokenizer behind `encode`, for `encode_batch` and
        `with_dropout`.

        Raises RendererError if the probe text does not come back byte for byte.
        """
        self._encode = encode
        self._control_tokens = dict(control_tokens)
        self._fast = fast
        self.where = where
        """Source of the vocabulary, for messages."""
        self._unwritable = b""
        self.eos_ids: tuple[int, ...] = ()
        """Ids that end a reply by the generation_config.json beside the file."""
        self.num_encoded = 0
        """Number of tokens that `encode` has produced: the cost of tokenization."""
        self.vocab_size: int = 1 + max((*text_tokens, *control_tokens.values()), default=-1)
        """Largest id plus 1. A model's vocabulary may be larger: it is often padded."""
        self._control_names = {id_: name for name, id_ in control_tokens.items()}
        self.control_ids: frozenset[int] = frozenset(self._control_names)
        """Ids of all added tokens that are not text, "special" or not."""
        self._token_bytes = [b""] * self.vocab_size
        for id_, piece in text_tokens.items():
            self._token_bytes[id_] = piece
        for name, id_ in control_tokens.items():
            self._token_bytes[id_] = name.encode()
        self._known = frozenset(text_tokens) | self.control_ids
        self._longest = max(map(len, text_tokens.values()), default=1)
        probe_ids = encode(_PROBE)
        if self.decode_bytes(probe_ids) != _PROBE.encode():
            raise RendererError(
                f"{where}: encoding {_PROBE!r} and decoding it gave {self.decode(probe_ids)!r}. "
                "The tokenizer changes text; token-exact rendering needs every byte."
            )

    # -- loading ------------------------------------------------------------------------------

    @classmethod
    def from_file(cls, path: str | Path, *, has_prefix: bool = True) -> Tokenizer:
        """Reads a Hugging Face `tokenizer.json`, given its path or its directory.

        Also reads the added tokens that only a `tokenizer_config.json` beside it declares.
        has_prefix: False leaves out the space that some write before every text: ids of rows can
        then be read, and prompts cannot be written as the model's own tokenizer writes them.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise RendererError(f"no tokenizer at {file}: expected a tokenizer.json.")
        config_file = file.with_name("tokenizer_config.json")
        config = read_json(config_file, RendererError) if config_file.is_file() else {}
        extra = config.get("added_tokens_decoder") or {}
        spec = read_json(file, RendererError)
        spec = spec if has_prefix else without_prefix_space(spec)
        found = cls._from_spec(spec, where=str(file), extra=extra)
        found.eos_ids = _eos_ids(file.with_name(GENERATION_FILE), found.vocab_size)
        return found

    @classmethod
    def from_json(cls, text: str, *, where: str = "tokenizer") -> Tokenizer:
        """Reads the text of a `tokenizer.json`, as `tokenizers.Tokenizer.to_str()` returns it."""
        return cls._from_spec(json.loads(text), where=where, extra={})

    @classmethod
    def _from_spec(
        cls, spec: dict[str, Any], *, where: str, extra: Mapping[str, Mapping[str, Any]]
    ) -> Tokenizer:
        try:
            text_tokens, control_tokens, plain = read_vocabulary(spec, extra=extra, where=where)
            fast = FastTokenizer.from_str(json.dumps(plain))
            out = cls(
                # The library lets other threads run while it encodes a batch, even of one text.
                lambda text: _encoded(fast, [text], where)[0],
                text_tokens=text_tokens,
                control_tokens=control_tokens,
                where=where,
                fast=fast,
            )
            out._unwritable = unwritable_bytes(text_tokens)
            return out
        except RendererError:
            raise
        except Exception as error:  # the library's own errors have no other class
            found = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise RendererError(
                f"{where}: expected a file of the tokenizers library, found a damaged one "
                f"({found:.200}). Save it again, or fetch it again."
            ) from None

    # -- text to ids --------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`. No id is a control token, whatever the text spells.

        Halves of surrogate pairs, which JSON can spell and UTF-8 cannot, become U+FFFD. Raises
        RendererError for a character that the vocabulary has no token for.
        """
        if (call := CURRENT.get()) is not None:
            return call.encode(text, self._encode_storable, longest=self._longest)
        return self._encode_storable(text)

    def _encode_storable(self, text: str) -> list[int]:
        text = self._storable(text)
        ids = self._encode(text) if text else []
        self.num_encoded += len(ids)
        return ids

    def _storable(self, text: str) -> str:
        """`text` without halves of surrogate pairs. Raises RendererError for a byte that the
        library would leave out."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            data = text.encode()
        if self._unwritable and len(data.translate(None, self._unwritable)) < len(data):
            found = next(c for c in text if set(c.encode()) & set(self._unwritable))
            raise RendererError(
                f"{self.where}: no token writes the character U+{ord(found):04X}, found in "
                f"{text!r:.60}. Take it out of the text, or train a model whose vocabulary has it."
            )
        return text

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes many texts in one call, several times as fast as `encode` for short ones."""
        if self._fast is None:
            return [self.encode(text) for text in texts]
        out = _encoded(self._fast, [self._storable(text) for text in texts], self.where)
        self.num_encoded += sum(map(len, out))
        return out

    def control_id(self, name: str) -> int:
        """Returns the id of the control or added token `name`. Raises RendererError if there is
        none."""
        return self.require((name,))[name]

    def require(self, names: Iterable[str]) -> dict[str, int]:
        """Returns name -> id for all `names`. Raises one RendererError that lists every missing
        name."""
        names = list(names)
        missing = [name for name in names if name not in self._control_tokens]
        if missing:
            raise RendererError(
                f"{self.where} lacks the control tokens {', '.join(missing)}. Choose the renderer "
                "that this model was trained with, or add the tokens and train their embeddings."
            )
        return {name: self._control_tokens[name] for name in names}

    def has(self, name: str) -> bool:
        """Whether `name` is a control or added token."""
        return name in self._control_tokens

    def control_name(self, id_: int) -> str:
        """Returns the name of a control id, such as `<|end|>`. Raises KeyError for any other id."""
        return self._control_names[id_]

    # -- ids to text --------------------------------------------------------------------------

    def token_bytes(self, id_: int) -> bytes:
        """Returns the bytes of one token: a control token's name, nothing for an unused id."""
        return self._token_bytes[id_] if 0 <= id_ < self.vocab_size else b""

    def all_token_bytes(self) -> list[bytes]:
        """[vocab_size] bytes of each id, for matching stop strings across tokens."""
        return list(self._token_bytes)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the exact bytes of `ids`; incomplete characters stay incomplete."""
        return b"".join(self.token_bytes(int(id_)) for id_ in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns readable text: control tokens by name, incomplete characters as U+FFFD, nothing
        for ids that the tokenizer does not have. Do not encode the result."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    # -- other spellings ----------------------------------------------------------------------

    def with_dropout(self, prob: float, *, seed: int = 0) -> Tokenizer:
        """Returns a copy whose `encode` skips each merge with `prob` (BPE dropout, Provilkov et al.
        2020).

        Training on it teaches a model that a text has many spellings. `seed` makes it repeatable;
        the dropout of the tokenizers library draws from a generator that cannot be seeded.
        """
        assert self._fast is not None, "a tokenizer without a tokenizer.json has no merges"
        fast: Any = self._fast
        spec: dict[str, Any] = json.loads(fast.to_str())
        vocab: dict[str, int] = spec["model"]["vocab"]
        ranks = {tuple(merge_parts(m)[:2]): rank for rank, m in enumerate(spec["model"]["merges"])}
        symbols = {token["content"]: int(token["id"]) for token in spec["added_tokens"]}
        longest_first = sorted(symbols, key=len, reverse=True)
        splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if symbols else None
        generator = random.Random(seed)

        def encode(text: str) -> list[int]:
            ids: list[int] = []
            for part in splitter.split(text) if splitter else [text]:
                if part in symbols:
                    ids.append(symbols[part])
                    continue
                if fast.normalizer is not None:
                    part = fast.normalizer.normalize_str(part)
                for word, _ in fast.pre_tokenizer.pre_tokenize_str(part):
                    pieces = characters_of(word, vocab)
                    ids += [vocab[piece] for piece in _merge(pieces, ranks, prob, generator)]
            return ids

        out = Tokenizer(
            encode,
            text_tokens={id_: self._token_bytes[id_] for id_ in self._known - self.control_ids},
            control_tokens=self._control_tokens,
            where=self.where,
        )
        out.eos_ids, out._unwritable = self.eos_ids, self._unwritable
        return out


def _encoded(fast: Any, texts: list[str], where: str) -> list[list[int]]:
    """Raises RendererError where a pattern of the file takes too many steps for a text."""
    try:
        found = fast.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as error:  # a panic is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise RendererError(f"{where}: the tokenizer cannot encode a text: {error}.") from None
    return [encoding.ids for encoding in found]


def _eos_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids of a generation_config.json that end a reply, as far as the tokenizer has them."""
    named: Any = read_json(path, RendererError).get("eos_token_id") if path.is_file() else None
    ids: list[Any] = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(id_) is int for id_ in ids):
        raise RendererError(f"{path}: eos_token_id is {named!r}, expected an id or a list of ids.")
    return tuple(id_ for id_ in ids if 0 <= id_ < vocab_size)


def _merge(
    pieces: list[str], ranks: Mapping[tuple[str, ...], int], prob: float, generator: random.Random
) -> list[str]:
    """Merges one word by byte-pair encoding, skipping each candidate with `prob` at each step."""
    while True:
        found = [
            (ranks[pair], at)
            for at, pair in enumerate(pairwise(pieces))
            if pair in ranks and not (prob and generator.random() < prob)
        ]
        if not found:
            return pieces
        at = min(found)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
