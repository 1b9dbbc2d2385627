"""Counts phrases that make readers stumble, in docstrings, comments, messages and pages.

    python docs/proof/english.py                 counts by folder, and the worst files
    python docs/proof/english.py PATH ...        every place in these files

The count is a thermometer: rewrite the sentence, do not dodge the pattern. AGENTS.md has examples.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("src/*.py", "benchmarks/*.py", "examples/*.py", "docs/*.md", "*.md")
PATTERNS = (
    # A pronoun in place of the noun.
    r"\b(?:those|that) of\b|\bthose (?:that|which|who|in|with|whose)\b",
    r"\bones? (?:that|which|whose|more|less)\b",
    r"\bwhat (?:is|are|was|were|of|has|have|had|it|they|comes|holds|needs|follows|each|makes)\b",
    # A preposition at the front of a clause.
    r"\b(?:of|by|in|from|with|for|to|over|under|at|on|after|before) (?:which|whom|whose)\b",
    # A sentence without its subject at the front.
    r"^(?:Of|By|From|What|That|Those|Whose|Whether|None where) \w+[^.:?]*(?:[.:]|$)",
    # Words that no colleague says, and code that is spoken of as a person.
    r"\bbut for\b|\bso many\b|\bas many\b|\band (?:its|the) like\b",
    r"\bstands? (?:in|for|at|there|here|beside)\b|\b(?:is|are) told\b|\blets? go\b",
)
MAX_PER_1000 = 5.0
"""Phrases per 1,000 lines of all files; verl has 1.4, httpx 2.7, OpenAI's client 5.8."""
MAX_OF_A_FILE = 10.0
"""Phrases per 1,000 lines of one file; two are always allowed."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, comment and message; of every line of prose on a page."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fences = re.compile(r"^```.*?^```$", re.M | re.S)
        prose = fences.sub(lambda fence: "\n" * fence[0].count("\n"), source)
        yield from ((i, t) for i, t in enumerate(prose.split("\n"), 1) if not t.startswith("|"))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"\s+", " ", node.value.split(">>>")[0]).strip()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def phrases(path: Path) -> list[tuple[int, str]]:
    """(line, phrase) of every place in a file."""
    found = [(i, m[0]) for i, text in texts(path) for p in PATTERNS for m in re.finditer(p, text)]
    return sorted(found)


def counts() -> dict[str, tuple[int, int]]:
    """File -> (phrases, lines), for all files in PLACES that git tracks."""
    listed = subprocess.run(["git", "ls-files", *PLACES], cwd=ROOT, capture_output=True, text=True)
    paths = {name: ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()}
    return {n: (len(phrases(p)), len(p.read_text("utf-8").splitlines())) for n, p in paths.items()}


def share(number: int, lines: int) -> float:
    """Phrases per 1,000 lines."""
    return 1000 * number / max(lines, 1)


def main() -> None:
    for name in sys.argv[1:]:
        for line, phrase in phrases(Path(name)):
            print(f"{name}:{line}: {phrase[:60]}")
    if sys.argv[1:]:
        return
    found, folders = counts(), Counter[str]()
    for name, (number, _) in found.items():
        folders["/".join(name.split("/")[: 2 if name.startswith("lockstep") else 1])] += number
    print(*(f"{number:5}  {folder}" for folder, number in folders.most_common(15)), sep="\n")
    for name in sorted(found, key=lambda name: -share(*found[name]))[:10]:
        print(f"{share(*found[name]):5.1f}  per 1,000 lines: {name}")
    number, lines = (sum(column) for column in zip(*found.values(), strict=True))
    print(f"{share(number, lines):5.1f}  per 1,000 lines of all files, at most {MAX_PER_1000}")


if __name__ == "__main__":
    main()
