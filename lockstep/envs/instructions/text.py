"""Counting in a text: words, sentences, words in capitals, letters of a script; and its language.

Every function takes time linear in the text and raises for no text.
"""

# langdetect is in an extra.
# pyright: reportMissingImports=false

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice

from lockstep.errors import MissingExtraError

_WORD = re.compile(r"\w+")


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD.finditer(text))


# -- sentences -------------------------------------------------------------------------------------
#
# A sentence ends with . ? or ! before white space, as in the Punkt algorithm (Kiss and Strunk 2006,
# the tokenizer behind the published scores), with its rules for abbreviations, initials and
# ellipses. The two lists below replace Punkt's learnt tables.

_ABBREVIATED = """
adj adm adv apr asst aug ave bldg blvd bros capt cf cmdr co col comdr corp cpl dec dept dr etc feb
fig fri ft gen gov inc jan jr lt ltd maj messrs mr mrs ms mt nov oct ok oz ph.d pp prof rep rev sen
sep sept sgt sr st thurs tues viz vol vols vs wed yr
"""
"""Abbreviations in lower case, without the last period. Initials as in "U.S." count as well."""

_STARTING = """
a after all also although an and another as at because before both but by despite during each even
for from he her here his however i if in instead it its last many meanwhile more most my no not now
on once one our several she since so some such that the their then there these they this those
though to under until we what when where while who why with yet you your
"""
"""Words whose capital letter begins a sentence even after an abbreviation or an ellipsis."""

_ABBREVIATIONS, _STARTERS = frozenset(_ABBREVIATED.split()), frozenset(_STARTING.split())
_ENDS = frozenset(".?!")
_CLOSERS = "\"')]}*_\u2019\u201d\u00bb"
_OPENERS = "\"'([{*_`\u2018\u201c\u00ab"
_TOKEN = re.compile(r"\S+")
_ELLIPSIS = re.compile(r"\.\.+$")
_INITIAL = re.compile(r"^(?:[^\W\d_]\.)+$")
_NUMBER = re.compile(r"^-?[\d.,]*\d\.$")


def sentences(text: str) -> list[str]:
    """The sentences of a text, without the white space around them."""
    out: list[str] = []
    begin = 0
    tokens = list(_TOKEN.finditer(text))
    for at, token in enumerate(tokens):
        following = tokens[at + 1].group() if at + 1 < len(tokens) else ""
        if not following or _ends_sentence(token.group(), following):
            out.append(text[begin : token.end()].strip())
            begin = token.end()
    return [sentence for sentence in out if sentence]


def _ends_sentence(token: str, following: str) -> bool:
    core = token.rstrip(_CLOSERS)
    if not core or core[-1] not in _ENDS:
        return False
    if core[-1] != ".":
        return True
    word = following.lstrip(_OPENERS)
    starts = word[:1].isupper() and word.strip(".,;:!?" + _CLOSERS).lower() in _STARTERS
    core = core.lstrip(_OPENERS)
    if _ELLIPSIS.search(core):
        return starts
    if _INITIAL.match(core):
        return starts and core != "I."
    if _NUMBER.match(core):
        return not word[:1].islower()
    if core[:-1].lower().rpartition("-")[2] in _ABBREVIATIONS:
        return starts
    return True


# -- capital words ---------------------------------------------------------------------------------

# Penn Treebank's word borders: (pattern, what stands in its place), in order.
_TREEBANK = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"([\u00ab\u201c\u2018\u201e`\"\u00bb\u201d\u2019])", r" \1 "),
        (r"([:,])(?=\D|$)", r" \1 "),
        (r"(?<=[^.])(\.)(?=[\])}>\"'\u00bb\u201d\u2019 ]*$)", r" \1 "),
        (r"(\.{2,})", r" \1 "),
        (r"([;@#$%&?!*\[\](){}<>])", r" \1 "),
        (r"--", " -- "),
        (r"''", " '' "),
        (r"(?<=[^' ])('[sS]|'[mM]|'[dD]|')(?= |$)", r" \1 "),
        (r"(?<=[^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T)(?= |$)", r" \1 "),
        (r"(?i)\b(can)(not)\b", r" \1 \2 "),
        (r"(?i)\b(gim|lem)(me)\b", r" \1 \2 "),
        (r"(?i)\b(gon|wan)(na)\b", r" \1 \2 "),
        (r"(?i)\b(got)(ta)\b", r" \1 \2 "),
        (r"(?i) ('t)(is|was)\b", r" \1 \2 "),
    )
]


def count_capital_words(text: str) -> int:
    """Number of words in capitals, with the word borders of Penn Treebank: a hyphen or a slash
    joins one word, and a contraction is two ("DON'T" is DO and N'T)."""
    count = 0
    for sentence in sentences(text):
        if sentence == sentence.lower():
            continue
        spaced = " " + " ".join(sentence.split()) + " "
        for pattern, replacement in _TREEBANK:
            spaced = pattern.sub(replacement, spaced)
        count += sum(word.isupper() for word in spaced.split())
    return count


# -- languages -------------------------------------------------------------------------------------

_LANGUAGES = """
ar=Arabic bg=Bulgarian bn=Bengali de=German en=English es=Spanish fa=Persian fi=Finnish
fr=French gu=Gujarati he=Hebrew hi=Hindi it=Italian ja=Japanese kn=Kannada ko=Korean
ml=Malayalam mr=Marathi ne=Nepali pa=Punjabi pl=Polish pt=Portuguese ru=Russian sw=Swahili
ta=Tamil te=Telugu th=Thai uk=Ukrainian ur=Urdu vi=Vietnamese zh=Chinese
"""
LANGUAGES = {code: name for code, _, name in (p.partition("=") for p in _LANGUAGES.split())}
"""Languages that an instruction may ask for: ISO 639-1 code -> name."""

_SCRIPTS = """
bn=BENGALI gu=GUJARATI he=HEBREW ko=HANGUL ja=HIRAGANA+KATAKANA+CJK kn=KANNADA ml=MALAYALAM
pa=GURMUKHI ta=TAMIL te=TELUGU th=THAI zh=CJK
"""
SCRIPTS = {k: tuple(v.split("+")) for k, v in (p.split("=") for p in _SCRIPTS.split())}
"""Languages that the script alone tells from all others of LANGUAGES."""

MAX_LETTERS = 4000  # a script shows in the first few; one that changes later is seen up to here


def is_in_script(text: str, scripts: Sequence[str], *, share: float = 0.8) -> bool:
    """Whether at least `share` of the first letters are of these scripts. False without letters."""
    letters = islice(filter(str.isalpha, text), MAX_LETTERS)
    found = Counter(re.split("[ -]", unicodedata.name(char, ""))[0] for char in letters)
    # Japanese is told from Chinese by its syllables.
    if "HIRAGANA" in scripts and not (found["HIRAGANA"] + found["KATAKANA"]):
        return False
    return bool(found) and sum(found[script] for script in scripts) >= share * found.total()


MAX_DETECTED_CHARS = 20_000
"""Characters that langdetect reads: its time grows with the text, and the language shows early."""


def require_langdetect() -> None:
    """Raises MissingExtraError if the package is not installed."""
    if find_spec("langdetect") is None:
        raise MissingExtraError.of(
            "langdetect", extra="instructions", needed_for="task.detector=langdetect"
        )


def detected_language(text: str) -> str | None:
    """ISO 639-1 code by the package langdetect, `zh` for both kinds of Chinese; None for a text
    without letters. The same text always has the same result."""
    require_langdetect()
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # it draws at random
    try:
        return detect(text[:MAX_DETECTED_CHARS]).partition("-")[0]
    except LangDetectException:
        return None
