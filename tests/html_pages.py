"""Reads the HTML of a page that the package wrote, as it is and as a browser draws it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

BROWSERS = ("chromium", "chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1200,900", "--enable-logging=stderr", "--dump-dom",
)  # fmt: skip


def drawn(url, profile, *, waits="--virtual-time-budget=2000"):
    """The page's body in a browser, without its scripts. Skips the test where there is none.

    profile: a folder for the browser. Fails if the page writes to the browser's console.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no chromium on this machine to draw the page with")
    command = [browser, *FLAGS, f"--user-data-dir={profile}", waits, url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in shown.stderr, shown.stderr
    return re.sub(r"<script.*?</script>", "", shown.stdout, flags=re.DOTALL)


class Page(HTMLParser):
    """Collects the start tags, and the text of script and style elements."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.raw, self._open = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.raw.append((*self._open, data))
