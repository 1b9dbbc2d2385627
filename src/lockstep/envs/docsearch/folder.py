"""A user's folder of documents, cut into chunks and indexed by words, with questions about it.

All is read and checked before a model is loaded: an unreadable document, a malformed question and a
gold passage that is in no document raise DataError.
"""

from __future__ import annotations

import heapq
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.agent.tasks import read_entries
from lockstep.errors import DataError

SUFFIXES = (".md", ".markdown", ".txt")

_WORD = re.compile(r"\w+")
_ANSWER_WORD = re.compile(r"(?<!\w)[-+]?\d+(?:[.,]\d+)*(?!\w)|\w+")
_PARAGRAPH = re.compile(r"\S.*?(?=\n[ \t]*\n|\Z)", re.S)
_SENTENCE_END = re.compile(r"[.!?:;]['\")\]]*\s+|\n")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage of a document."""

    id: str
    """FILE#NUMBER: the path below the folder, with slashes, and the chunk's number from 0."""
    text: str
    document: str
    span: tuple[int, int]
    """(begin, end) of `text` in the document, in characters."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question, with its accepted answers and its gold passages."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[frozenset[str], ...]
    """Per gold passage, the ids of chunks that each contain it."""
    label: str = ""


# ---------------------------------------------------------------------------------------------
# Chunks
# ---------------------------------------------------------------------------------------------


def cut(
    text: str, *, document: str, chunk_chars: tuple[int, int], overlap_chars: int
) -> list[Chunk]:
    """Cuts a document into chunks at paragraphs, or within a long paragraph at sentences.

    Paragraphs are joined up to the larger of `chunk_chars`; a heading starts a new chunk once the
    smaller is reached. Each chunk but the first repeats up to `overlap_chars` of the one before, in
    whole words, so that a passage across a border is whole in one chunk.
    """
    smallest, largest = chunk_chars
    spans: list[tuple[int, int]] = []
    begin = end = 0
    for first, last in _pieces(text, largest):
        is_full = last - begin > largest or (text[first] == "#" and end - begin >= smallest)
        if end > begin and is_full:
            spans.append((begin, end))
            begin = first
        elif end == begin:
            begin = first
        end = last
    if end > begin:
        spans.append((begin, end))
    chunks: list[Chunk] = []
    for number, (first, last) in enumerate(spans):
        if number and overlap_chars:
            first = _word_start(text, max(spans[number - 1][0], first - overlap_chars), first)
        chunk_id, span = f"{document}#{number}", (first, last)
        chunks.append(Chunk(id=chunk_id, text=text[first:last], document=document, span=span))
    return chunks


def _pieces(text: str, largest: int) -> list[tuple[int, int]]:
    """Spans of paragraphs, and of the parts of paragraphs longer than `largest`."""
    pieces: list[tuple[int, int]] = []
    for paragraph in _PARAGRAPH.finditer(text):
        first, last = paragraph.start(), paragraph.start() + len(paragraph.group().rstrip())
        while last - first > largest:
            ends = [m.end() for m in _SENTENCE_END.finditer(text, first, first + largest)]
            at = ends[-1] if ends else text.rfind(" ", first + 1, first + largest) + 1
            if at <= first:  # one long word
                at = first + largest
            pieces.append((first, first + len(text[first:at].rstrip())))
            first = at + len(text[at:last]) - len(text[at:last].lstrip())
        if last > first:
            pieces.append((first, last))
    return pieces


def _word_start(text: str, earliest: int, latest: int) -> int:
    """First position in [earliest, latest] where a word begins."""
    for at in range(earliest, latest):
        if not text[at].isspace() and (at == 0 or text[at - 1].isspace()):
            return at
    return latest


def read_documents(folder: str | Path) -> dict[str, str]:
    """path below the folder -> text, of all text and markdown files, sorted by path. Raises
    DataError if there is none, or one is not UTF-8."""
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root}: not a folder; docs= names the folder of documents.")
    texts: dict[str, str] = {}
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    for name, path in sorted(paths.items()):
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise DataError(f"{path}:{line}: not UTF-8: {error.reason}.") from error
        if text.strip():
            texts[name] = text.replace("\r\n", "\n")
    if not texts:
        raise DataError(f"{root}: holds no document: expected {', '.join(SUFFIXES)} with text.")
    return texts


# ---------------------------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """Words as a search compares them: lower case, in Unicode's normal form KC."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


class KeywordIndex:
    """Search for chunks by words, ranked by BM25.

    Source: Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond",
    eq. 3.15, with the never-negative idf of Lucene; k1 = 1.2, b = 0.75.
    """

    K1, B = 1.2, 0.75

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = tuple(chunks)
        counts = [Counter(words_of(chunk.text)) for chunk in self.chunks]
        lengths = [sum(count.values()) for count in counts]
        mean_length = sum(lengths) / max(1, len(lengths)) or 1.0
        postings: dict[str, list[tuple[int, int]]] = {}
        for at, count in enumerate(counts):
            for word, times in count.items():
                postings.setdefault(word, []).append((at, times))
        norms = [self.K1 * (1 - self.B + self.B * length / mean_length) for length in lengths]
        self._weights: dict[str, list[tuple[int, float]]] = {}
        """word -> (index of the chunk, weight of the word in it), in order of the chunks."""
        for word, places in postings.items():
            idf = math.log(1 + (len(counts) - len(places) + 0.5) / (len(places) + 0.5))
            self._weights[word] = [
                (at, idf * times * (self.K1 + 1) / (times + norms[at])) for at, times in places
            ]

    def search(self, keywords: Sequence[str], *, num_results: int) -> list[Chunk]:
        """The best chunks, best first; ties in order of the chunks. A keyword may have several
        words; each word counts once. Chunks with none of the words are left out."""
        scores: dict[int, float] = {}
        for word in sorted({word for keyword in keywords for word in words_of(keyword)}):
            for at, weight in self._weights.get(word, ()):
                scores[at] = scores.get(at, 0.0) + weight
        best = heapq.nsmallest(num_results, scores.items(), key=lambda pair: (-pair[1], pair[0]))
        return [self.chunks[at] for at, _ in best]


# ---------------------------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------------------------


class Library:
    """Documents, their chunks and the index of the chunks."""

    def __init__(
        self,
        documents: Mapping[str, str],
        *,
        chunk_chars: tuple[int, int] = (200, 600),
        overlap_chars: int = 80,
    ) -> None:
        self.documents = dict(documents)
        self._of_document = {
            name: cut(text, document=name, chunk_chars=chunk_chars, overlap_chars=overlap_chars)
            for name, text in self.documents.items()
        }
        self.chunks = [chunk for chunks in self._of_document.values() for chunk in chunks]
        self.index = KeywordIndex(self.chunks)
        self._by_id = {chunk.id: chunk for chunk in self.chunks}

    def read_questions(self, path: str | Path) -> list[Question]:
        """Questions of a JSONL file. Raises DataError, `path:line` first, for a malformed line and
        for a gold passage that does not exist."""
        return read_entries(path, self._question)

    def _question(self, question_id: str, record: Mapping[str, Any]) -> Question:
        known = ("id", "question", "answer", "answers", "gold", "label")
        if unknown := sorted(set(record) - set(known)):
            raise DataError(f"unknown keys {unknown}; known are {', '.join(known)}.")
        if ("answer" in record) == ("answers" in record):
            raise DataError("give either `answer` (text) or `answers` (a list of texts).")
        answers = [_text(record, "answer")] if "answer" in record else record["answers"]
        are_texts = isinstance(answers, list) and all(isinstance(each, str) for each in answers)
        if not are_texts or not answers or not all(map(normalise, answers)):
            raise DataError(f"answers must be texts with at least one word: {answers!r}.")
        entries = record.get("gold")
        entries = [entries] if isinstance(entries, str | dict) else entries
        if not isinstance(entries, list) or not entries:
            raise DataError(
                "`gold` is missing: name the passages that hold the answer, as "
                '"FILE#CHUNK" or {"document": FILE, "quote": TEXT}.'
            )
        return Question(
            id=question_id,
            question=_text(record, "question"),
            answers=tuple(answers),
            gold=tuple(map(self._gold, entries)),
            label=_text(record, "label") if "label" in record else "",
        )

    def _gold(self, entry: Any) -> frozenset[str]:
        """Ids of the chunks that hold a gold passage."""
        if isinstance(entry, str) and entry in self._by_id:
            return frozenset((entry,))
        if not isinstance(entry, str) and (
            not isinstance(entry, dict) or set(entry) != {"document", "quote"}
        ):
            raise DataError(
                f'a gold passage is "FILE#CHUNK" or {{"document": FILE, "quote": TEXT}}, found '
                f"{entry!r}."
            )
        named = entry.rpartition("#")[0] if isinstance(entry, str) else _text(entry, "document")
        if named not in self.documents:
            raise DataError(f"gold {entry!r} is in no document of this folder.")
        if isinstance(entry, str):
            last = len(self._of_document[named]) - 1
            raise DataError(f"there is no chunk {entry!r}; {named} has the chunks #0 to #{last}.")
        quote = _text(entry, "quote")
        # Any white space: a quote may be wrapped differently than its document.
        pattern = r"\s+".join(re.escape(word) for word in quote.split())
        places = re.finditer(pattern, self.documents[named])
        found = {id_ for match in places for id_ in self._holding(named, match.span())}
        if not found:
            raise DataError(f"{named} does not contain the quote {quote[:80]!r}.")
        return frozenset(found)

    def _holding(self, document: str, span: tuple[int, int]) -> set[str]:
        """Chunks that contain a passage; if it crosses a border, the chunks with most of it."""
        covered = {
            chunk.id: min(span[1], chunk.span[1]) - max(span[0], chunk.span[0])
            for chunk in self._of_document[document]
        }
        most = max(covered.values())
        return {id_ for id_, chars in covered.items() if chars == most}


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"expected `{key}` to be text, found {value!r}.")
    return value


def normalise(answer: str) -> str:
    """An answer in the form that is compared: words in lower case and numbers, without punctuation
    and without English articles before a word. A number keeps its sign and point, not its commas.

    >>> normalise("The 1,702 hens."), normalise("-3.5"), normalise("(A)")
    ('1702 hens', '-3.5', 'a')
    """
    text = unicodedata.normalize("NFKC", answer).lower()
    words = [re.sub(r"(?<=\d),(?=\d)", "", word) for word in _ANSWER_WORD.findall(text)]
    last = len(words) - 1  # an "A" at the end is no article
    kept = [w for at, w in enumerate(words) if at == last or w not in ("a", "an", "the")]
    return " ".join(kept)


def is_correct(answer: str, accepted: Sequence[str]) -> bool:
    """True if the answer equals an accepted one, both normalised."""
    return normalise(answer) in map(normalise, accepted)
