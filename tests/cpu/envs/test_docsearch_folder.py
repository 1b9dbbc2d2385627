"""Document search over a user's folder: chunks, index, questions, errors before a model loads."""

import json
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.agent.config import AgentConfig
from lockstep.envs.docsearch.config import DocSearchConfig
from lockstep.envs.docsearch.folder import KeywordIndex, Library, cut, is_correct, read_documents
from lockstep.errors import DataError
from lockstep.types import Message, Task, ToolCall

HANDBOOK = """# Handbook

The office opens at nine. The porter has the key.

## Travel

Tickets are booked by Ada. She sits in room 12.

## Food

Lunch is at noon. Bring a spoon.
"""


def pieces(text: str, smallest: int = 20, largest: int = 60, overlap: int = 0):
    return cut(text, document="d", chunk_chars=(smallest, largest), overlap_chars=overlap)


# -- chunks -----------------------------------------------------------------------------------


def test_chunks_end_at_paragraphs_and_begin_with_headings():
    assert [chunk.text for chunk in pieces(HANDBOOK, 20, 80)] == [
        "# Handbook\n\nThe office opens at nine. The porter has the key.",
        "## Travel\n\nTickets are booked by Ada. She sits in room 12.",
        "## Food\n\nLunch is at noon. Bring a spoon.",
    ]
    assert [chunk.id for chunk in pieces(HANDBOOK, 20, 80)] == ["d#0", "d#1", "d#2"]


def test_a_long_paragraph_is_cut_at_sentences_then_words_then_anywhere():
    sentences = "One is here. Two is here too. Three is the last one of them all."
    assert [c.text for c in pieces(sentences, 1, 32)] == [
        "One is here. Two is here too.",
        "Three is the last one of them",
        "all.",
    ]
    assert [len(c.text) for c in pieces("x" * 100, 1, 32)] == [32, 32, 32, 4]


def test_an_overlap_repeats_whole_words_of_the_chunk_before():
    first, second = pieces("alpha beta gamma delta epsilon zeta eta theta", 1, 32, overlap=12)
    assert first.text == "alpha beta gamma delta epsilon"
    assert second.text == "epsilon zeta eta theta"


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="ab #.\n\u00e9", max_size=400),
    largest=st.integers(32, 90),
    overlap=st.integers(0, 30),
)
def test_no_word_is_lost_and_no_chunk_is_too_long(text, largest, overlap):
    chunks = pieces(text, 16, largest, overlap)
    covered = set()
    for chunk in chunks:
        first, last = chunk.span
        assert chunk.text == text[first:last] and 0 < len(chunk.text) <= largest + overlap
        covered |= set(range(first, last))
    assert all(at in covered for at, character in enumerate(text) if not character.isspace())


def test_documents_are_read_in_order_of_their_paths(tmp_path):
    for name in ("z.txt", "a/two.md", "a/one.markdown", "skip.pdf", "empty.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "empty" in name else f"text of {name}\r\n", newline="")
    assert list(read_documents(tmp_path)) == ["a/one.markdown", "a/two.md", "z.txt"]
    assert read_documents(tmp_path)["z.txt"] == "text of z.txt\n"


def test_a_folder_without_text_or_with_other_bytes_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        read_documents(tmp_path / "none")
    with pytest.raises(DataError, match="holds no document"):
        read_documents(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(DataError, match=r"bad\.txt:2.*UTF-8"):
        read_documents(tmp_path)


# -- search -----------------------------------------------------------------------------------


def test_rare_words_weigh_more_and_ties_keep_the_order():
    library = Library({f"d{i}": f"the common text number{i}" for i in range(4)})
    index = library.index

    def found(*keywords, num_results=2):
        return [c.document for c in index.search(keywords, num_results=num_results)]

    assert found("common", "number3") == ["d3", "d0"]
    assert found("COMMON text") == ["d0", "d1"]
    assert found("common", num_results=9) == ["d0", "d1", "d2", "d3"]
    assert found("absent", "") == []


def test_search_finds_what_scanning_every_chunk_would():
    rng = random.Random(0)
    words = [f"word{i}" for i in range(60)]
    documents = {f"d{i}": " ".join(rng.choices(words, k=8)) + "." for i in range(40)}
    chunks = Library(documents).chunks
    index = KeywordIndex(chunks)
    for _ in range(40):
        asked = rng.sample([*words, "absent", "other"], 1)
        best = index.search(asked, num_results=5)
        holding = [c for c in chunks if set(asked) & set(c.text.replace(".", " ").split())]
        assert {c.id for c in best} <= {c.id for c in holding}
        assert bool(best) == bool(holding)


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("The Anchor bakery.", "the anchor bakery", True),
        ("anchor  BAKERY", "the Anchor bakery", True),
        ("It is the Anchor bakery", "the Anchor bakery", False),
        ("1,702!", "1702", True),
        ("-5", "5", False),
        ("3.5", "3", False),
        ("(B)", "B", True),
        ("A", "a", True),
        ("", "x", False),
    ],
)
def test_answers_are_compared_by_their_words(answer, accepted, expected):
    assert is_correct(answer, [accepted]) is expected


# -- questions --------------------------------------------------------------------------------


def write(folder, *records, documents=None) -> dict[str, str]:
    docs = folder / "docs"
    docs.mkdir()
    for name, text in (documents or {"handbook.md": HANDBOOK}).items():
        (docs / name).write_text(text)
    lines = folder / "questions.jsonl"
    lines.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return {"docs": str(docs), "questions": str(lines)}


GOOD = {
    "id": "ada",
    "question": "Who books tickets?",
    "answer": "Ada",
    "gold": [{"document": "handbook.md", "quote": "Tickets are\nbooked by Ada."}],
}


def test_gold_is_a_chunk_or_a_quote_however_it_is_wrapped(tmp_path):
    by_id = {"question": "When?", "answers": ["nine", "at nine"], "gold": "handbook.md#0"}
    paths = write(tmp_path, GOOD, by_id)
    library = Library(read_documents(paths["docs"]), chunk_chars=(20, 80), overlap_chars=0)
    first, second = library.read_questions(paths["questions"])
    assert first.gold == (frozenset({"handbook.md#1"}),)
    assert second.gold == (frozenset({"handbook.md#0"}),)
    assert second.answers == ("nine", "at nine")


def test_a_quote_across_a_border_is_found_in_the_chunk_with_most_of_it():
    library = Library({"d": "x" * 40 + " " + "y" * 20}, chunk_chars=(1, 32), overlap_chars=0)
    assert [chunk.span for chunk in library.chunks] == [(0, 32), (32, 61)]
    assert library._holding("d", (20, 40)) == {"d#0"}
    overlapping = Library({"d": "one two three four five six seven"}, chunk_chars=(1, 32))
    assert overlapping._holding("d", (24, 27)) == {"d#0", "d#1"}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ("{", "not a JSON object"),
        ({"question": "q", "answer": "a"}, "`gold`"),
        ({**GOOD, "gold": []}, "`gold`"),
        ({**GOOD, "gold": ["handbook.md#9"]}, "'handbook.md#9'.*#0.*#0"),
        ({**GOOD, "gold": ["other.md#0"]}, "is in no document"),
        ({**GOOD, "gold": [{"document": "handbook.md"}]}, "a gold passage is"),
        ({**GOOD, "gold": [{"document": "handbook.md", "quote": "zzz"}]}, "does not contain"),
        ({**GOOD, "gold": [7]}, "a gold passage is"),
        ({**GOOD, "question": " "}, "`question`"),
        ({**GOOD, "answers": ["x"]}, "give either"),
        ({"question": "q", "gold": "handbook.md#0"}, "give either"),
        ({**GOOD, "answer": "..."}, "at least one word"),
        ({**GOOD, "answer": 7}, "`answer`"),
        ({**GOOD, "sources": []}, "unknown keys"),
        ({**GOOD, "id": 1.5}, "id must be text"),
        (GOOD, r"'ada'.*line 1\b"),
    ],
)
def test_a_malformed_question_is_named_by_file_and_line(tmp_path, record, text):
    paths = write(tmp_path, GOOD, record)
    with pytest.raises(DataError, match=text) as caught:
        DocSearchConfig(**paths).check()
    assert str(caught.value).startswith(f"{paths['questions']}:2: ")


def test_questions_that_leave_no_split_are_refused(tmp_path):
    paths = write(tmp_path, GOOD)
    with pytest.raises(DataError, match=r"\b1\b.*eval_share=0\.1"):
        DocSearchConfig(**paths).check()
    with pytest.raises(DataError, match="cannot be evaluated on"):
        DocSearchConfig(**paths, eval_questions=paths["questions"]).check()


# -- an episode -------------------------------------------------------------------------------


async def test_an_episode_is_rewarded_for_finding_and_answering(tmp_path):
    two = {
        "id": "both", "question": "Both?", "answer": "a", "label": "2-hop",
        "gold": ["handbook.md#0", "handbook.md#0"],
    }  # fmt: skip
    config = DocSearchConfig(**write(tmp_path, GOOD, two), eval_share=0.5)
    environment = config.environment(Task(id="both"), AgentConfig())
    assert config.label(Task(id="both")) == "2-hop"

    def calls(arguments: str) -> Message:
        call = ToolCall(name="get_document_chunks", arguments=arguments)
        return Message(role="assistant", tool_calls=(call,))

    opening = await environment.reset()
    assert opening[1].content == "Both?"
    bad = await environment.step(calls(json.dumps({"keywords": []})))
    wrong = await environment.step(calls("{}"))
    words = config._library.chunks[0].text.split()
    found = await environment.step(calls(json.dumps({"keywords": words})))
    score = await environment.score()
    assert bad.messages[0].content == "no results"
    assert wrong.messages[0].content == "error: the call lacks 'keywords'"
    assert found.messages[0].content.startswith("[handbook.md#0]")
    assert score.parts == {"retrieval": 1.0, "correctness": 0.0, "format_penalty": 1.0}


def test_settings_of_rooms_load_without_torch():
    modules = (
        "lockstep.envs.docsearch.config, lockstep.agent.config, lockstep.agent.tools, "
        "lockstep.agent.loop, lockstep.envs.docsearch.config"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
