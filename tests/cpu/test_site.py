"""The pages as a site: few, reachable, each with an answer at its top, and no broken link.

All but the build needs nothing but the pages. `make docs` builds the site, and so does the last
test where its tools are installed.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from quickstarts import quickstart_with

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MENTIONED = [*PAGES, *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))]
MAX_PAGES = 30
GENERATED = {"changelog.md"}
"""Pages of the navigation that the site's hook makes."""


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """Anchors that are the same on the site and where the repository is browsed."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), flags=re.M)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading)) for heading in headings]
    return {
        slug for text in plain if "--" not in (slug := re.sub(r"\s", "-", text.strip().lower()))
    }


def navigation(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [path for part in parts for path in navigation(part)]


def test_there_are_at_most_thirty_pages():
    assert len(PAGES) <= MAX_PAGES, f"{len(PAGES)} pages; merge or delete some"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_its_title_and_a_paragraph(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and not lines[1]
    paragraphs = [line for line in lines[2:10] if re.match(r"[A-Z`*\[]", line)]
    assert paragraphs and lines[2] == paragraphs[0], f"{page.name}: no paragraph under the title"


def test_the_navigation_has_every_page_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    found = navigation(config["nav"])
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert sorted(found) == sorted(pages | GENERATED)


@pytest.mark.parametrize("page", MENTIONED, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            broken.append(link)
    assert not broken, f"{page.name}: {broken}"


def test_every_setting_that_stands_beside_a_peers_setting_is_one():
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (DOCS / "coming-from.md").read_text(), flags=re.M)
    not_resolved = ("lockstep ", "from=", "FILE", "tasks=", "reward=", "tools=")
    tried = 0
    for _, ours in rows:
        for span in re.findall(r"`([^`]+)`", ours):
            if "=" not in span or any(part in span for part in not_resolved):
                continue
            given = span.split()
            needed = {"lora.": "lora.rank=8", "advantage.normalize": "advantage=grpo"}
            needed["objective.max_divergence"] = "objective=dppo"
            needed["distill."] = "distill.teacher.model=tiny-gpt-oss"
            given = [more for name, more in needed.items() if name in span] + given
            quickstart_with(*given)
            tried += 1
    assert tried > 50


def test_every_setting_of_verl_that_is_named_exists_in_its_configuration():
    package = importlib.util.find_spec("verl")
    if package is None or package.origin is None:
        pytest.skip("verl, whose configuration is read, is not installed")
    path = Path(package.origin).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    section = (DOCS / "coming-from.md").read_text().partition("## verl")[2].partition("\n## ")[0]
    rooms = "data|actor_rollout_ref|algorithm|trainer|reward"
    names = re.findall(rf"[`\s]((?:{rooms})\.[\w.]+)=", section)
    ours = {"trainer.lr", "trainer.updates_per_batch", "trainer.max_tokens_per_microbatch"}
    for name in set(names) - ours:
        functools.reduce(lambda tree, key: tree[key], name.split("."), config)
    assert len(set(names) - ours) > 15


class _Fetched(HTMLParser):
    """What a browser fetches for a page: scripts, styles, images, fonts."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        is_fetched = tag != "link" or given.get("rel") in ("stylesheet", "preload", "icon")
        names = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
        if is_fetched and (address := given.get(names.get(tag, ""))):
            self.addresses.append(address)


def test_the_site_builds_strictly_and_fetches_nothing_from_elsewhere(tmp_path):
    own = ROOT / ".venv-docs" / "bin" / "mkdocs"
    mkdocs = str(own) if own.exists() else shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed; `make docs` installs it into .venv-docs")
    command = [mkdocs, "build", "--strict", "-q", "-f", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "-d", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for html in tmp_path.rglob("*.html"):
        fetched = _Fetched()
        fetched.feed(html.read_text(encoding="utf-8"))
        assert not [url for url in fetched.addresses if re.match(r"(\w+:)?//", url)], html
    assert "bit for bit" in (tmp_path / "search" / "search_index.js").read_text(encoding="utf-8")
