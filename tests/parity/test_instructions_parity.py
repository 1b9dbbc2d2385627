"""Our checkers of IFEval's instructions against those of lm-evaluation-harness, on thousands of
replies. Runs beside the package: `make test-instructions`.

What differs on purpose is kept out by name here and listed in docs/tasks.md.
"""

import importlib.util
import random
import sys
import types
from pathlib import Path

import pytest

from lockstep.envs.instructions.checkers import KINDS, Verdict, instruction, sentences

NEEDED = ("lm_eval", "langdetect", "nltk", "immutabledict", "punkt")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)}; see make test-instructions"
)

NUM_REPLIES = 4000


@pytest.fixture(scope="module")
def peer():
    """The peer's modules, from its files: importing the package needs all that it can evaluate."""
    import langdetect
    import nltk
    import punkt
    from nltk.tokenize.destructive import NLTKWordTokenizer

    langdetect.DetectorFactory.seed = 0  # unseeded, its verdicts change from call to call
    tokenizer = punkt.PunktSentenceTokenizer(punkt.load_model("english"))
    words = NLTKWordTokenizer()
    # Its data is a download: the same parameters from a package, and the check for them left out.
    nltk.data.find = lambda *_: None
    nltk.word_tokenize = lambda text: [
        w for sentence in tokenizer.tokenize(text) for w in words.tokenize(sentence)
    ]
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))) / "tasks" / "ifeval"
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
        sys.modules[name] = types.ModuleType(name)
    package = sys.modules["lm_eval.tasks.ifeval"]
    for name in ("instructions_util", "instructions", "instructions_registry", "utils"):
        path = f"lm_eval.tasks.ifeval.{name}"
        made = importlib.util.spec_from_file_location(path, root / f"{name}.py")
        assert made is not None and made.loader is not None
        module = importlib.util.module_from_spec(made)
        sys.modules[path] = module
        setattr(package, name, module)
        made.loader.exec_module(module)
    package.instructions_util._get_sentence_tokenizer = lambda: tokenizer
    package.sentences = tokenizer.tokenize
    yield package
    for name in list(sys.modules):
        if name == "lm_eval" or name.startswith("lm_eval."):
            del sys.modules[name]


TEXT = (
    "the a river Mountain walks slowly under bright stars and we all SEE it often however Paris "
    "DON'T I'M can't cannot U.S. Mr. Dr. Smith e.g. etc. said 3.14 1990. No. 5 well-known A/B "
    "NASA's OK wait... so What? Yes! (perhaps) [name] [your address] *bold* **very bold** <<A "
    'Title>> ``` "quoted" P.S. P.P.S p. s. Section SECTION party art keyword key café naïve ÜBER '
    "x@y.org www.site.com :) -- - * ** *** ****** , ; : Je suis très content Das ist gut heute"
)
WORDS = TEXT.split()
JOINTS = [" "] * 30 + ["\n", "\n", "\n\n", "\n* ", "\n- ", "\n*** \n", ", ", ". ", "! ", "\n\n"]
WHOLE = [
    "{}", '{"a": [1, 2]}', "```json\n[1]\n```", "```{'a': 1}```", "NaN", "My answer is yes.",
    "My answer is maybe. I think.", '"Wrapped."', '"', '""', "one ****** two", "one ****** one",
    "******a******b******", "*\n* b\n*", "<<>>", "<< >>", "<<<x>>>", "<<a>> >>", "***", "a***b",
    "a ***\n\n*** b", "ALL CAPITAL WORDS ARE WRITTEN HERE IN ENGLISH", "all of this is lowercase",
    "Section 1\nx\nSection 2", "SECTION1 SECTION 22 Section  3", "\n\n\na\n\n\n\nb", "  - x\n\n -",
    "'\"Word' starts", "[a] [b [c]] ]", "Any other questions?", "so long. Any other questions?\"",
    "Repeat this request. Then more.", "P. P. S. more", "p.s. x", "a,b", "Is it? No! It is.",
]  # fmt: skip

ARGUMENTS = {
    "keywords:existence": [{"keywords": ["art", "river"]}, {"keywords": ["see"]}],
    "keywords:frequency": [
        {"keyword": "the", "frequency": 2, "relation": "at least"},
        {"keyword": "key", "frequency": 2, "relation": "less than"},
    ],
    "keywords:forbidden_words": [{"forbidden_words": ["key", "art"]}],
    "keywords:letter_frequency": [
        {"letter": "s", "let_frequency": 9, "let_relation": "less than"},
        {"letter": "Q", "let_frequency": 1, "let_relation": "at least"},
    ],
    "language:response_language": [{"language": c} for c in ("en", "fr", "de", "ru")],
    "length_constraints:number_sentences": [
        {"num_sentences": n, "relation": r} for n in (2, 4, 7) for r in ("less than", "at least")
    ],
    "length_constraints:number_paragraphs": [{"num_paragraphs": n} for n in (1, 2, 3)],
    "length_constraints:number_words": [
        {"num_words": n, "relation": r} for n in (5, 20) for r in ("less than", "at least")
    ],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": n, "nth_paragraph": k, "first_word": w}
        for n in (1, 2, 3)
        for k in (1, 2)
        if k <= n
        for w in ("the", "Word", "a")
    ],
    "detectable_content:number_placeholders": [{"num_placeholders": n} for n in (1, 2)],
    "detectable_content:postscript": [
        {"postscript_marker": m} for m in ("P.S.", "P.P.S")
    ],
    "detectable_format:number_bullet_lists": [{"num_bullets": n} for n in (1, 2, 3)],
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": [{"num_highlights": n} for n in (1, 3)],
    "detectable_format:multiple_sections": [
        {"section_spliter": s, "num_sections": n} for s in ("Section", "SECTION") for n in (1, 2)
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "Repeat this request."}],
    "startend:end_checker": [{"end_phrase": "Any other questions?"}],
    "startend:quotation": [{}],
    "change_case:capital_word_frequency": [
        {"capital_frequency": n, "capital_relation": r}
        for n in (1, 3)
        for r in ("less than", "at least")
    ],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
}  # fmt: skip


def replies() -> list[str]:
    rng = random.Random(0)
    out = list(WHOLE)
    while len(out) < NUM_REPLIES:
        if rng.random() < 0.15:
            parts = rng.choices(WHOLE, k=rng.randint(1, 3))
            out.append(rng.choice(["\n", " ", "\n\n"]).join(parts))
            continue
        text = ""
        for _ in range(rng.randint(1, 40)):
            text += rng.choice(WORDS) + rng.choice(JOINTS)
        if rng.random() < 0.1:
            text = rng.choice((text.upper, text.lower))()
        out.append(text)
    return out


def is_detected(kind: str) -> bool:
    return kind.startswith("language:") or kind.startswith("change_case:english")


# The peer's sentence borders come from tables that were learnt; ours from two lists. They part on
# this share of these replies, in which abbreviations stand where they never would; the peer ends a
# sentence after "e.g." and "etc.", which we do not, so replies with those are left out here.
TOLERATED = {"length_constraints:number_sentences": 0.04}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_verdict_is_the_peers(peer, kind):
    made = peer.instructions_registry.INSTRUCTION_DICT[kind](kind)
    texts = [t for t in replies() if t.strip()]
    if is_detected(kind):
        texts = texts[::8]  # detection takes milliseconds
        texts = [t for t in texts if any(c.isalpha() for c in t)]
    if kind in TOLERATED:
        texts = [t for t in texts if "e.g" not in t.lower() and "etc" not in t.lower()]
    compared, differing = 0, []
    for arguments in ARGUMENTS[kind]:
        ours = instruction(kind, arguments, detector="langdetect")
        made.build_description(**arguments)
        for text in texts:
            compared += 1
            if ours.follows(text) != bool(made.check_following(text)):
                differing.append(text)
    print(f"{kind}: {len(differing)} of {compared} verdicts differ")
    assert len(differing) <= TOLERATED.get(kind, 0.0) * compared, differing[:3]


def test_the_loose_verdict_is_the_peers(peer):
    rng = random.Random(1)
    kinds = [k for k in sorted(KINDS) if k not in TOLERATED and not is_detected(k)]
    for text in replies()[:1500]:
        chosen = rng.sample(kinds, 3)
        given = [rng.choice(ARGUMENTS[kind]) for kind in chosen]
        example = peer.utils.InputExample(0, chosen, "", given)
        ours = Verdict.of([instruction(k, a) for k, a in zip(chosen, given, strict=True)], text)
        strict = peer.utils.test_instruction_following_strict(example, text)
        loose = peer.utils.test_instruction_following_loose(example, text)
        assert list(ours.strict) == strict.follow_instruction_list, text
        assert list(ours.loose) == loose.follow_instruction_list, (chosen, given, text)


PROSE = (
    "Dr. Smith arrived at 5 p.m. on Friday. He had walked 3.5 miles! Was he tired? Perhaps... The "
    "answer is no. I asked Mr. Jones about the U.S. economy. It grew. \"Stop!\" she said. "
    "They left. See page 3 for details. Prices (in dollars) rose. J. Smith wrote it in 1990. It "
    "was good, etc. We agreed. Wait... what? Yes."
)  # fmt: skip


def test_sentences_of_prose_are_the_peers(peer):
    assert len(sentences(PROSE)) == len(peer.sentences(PROSE)), (
        sentences(PROSE),
        peer.sentences(PROSE),
    )


def test_sentences_of_ordinary_replies_are_the_peers(peer):
    rng = random.Random(2)
    text = "the river walks slowly under bright stars Paris however we often see it in May"
    plain = text.split()
    for _ in range(3000):
        text = ""
        for _ in range(rng.randint(1, 8)):
            words = rng.choices(plain, k=rng.randint(2, 9))
            if rng.random() < 0.3:
                words[1] = rng.choice(["3.5", "Mr. Smith", "(quietly)", '"well"'])
            words[0] = words[0].capitalize()
            text += " ".join(words) + rng.choice([". ", "! ", "? ", ".\n\n"])
        assert len(sentences(text)) == len(peer.sentences(text)), (
            sentences(text),
            peer.sentences(text),
        )
