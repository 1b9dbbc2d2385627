"""Reads the HTML of a page that the package wrote."""

from html.parser import HTMLParser


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
