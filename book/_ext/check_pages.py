"""After a build: every page of the table of contents is there, and no page loads anything over the network."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DELIVERY = re.compile(r"https?://(?:cdn|unpkg)[^\s\"'<]*")
"""An address of a content delivery network, wherever it stands: a script may load it."""


class Loaded(HTMLParser):
    """Collects the remote addresses that a browser fetches by itself when it opens a page. Links to follow are none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        address = ""
        if tag in ("script", "img", "iframe"):
            address = given.get("src") or ""
        elif tag == "link" and {"stylesheet", "preload", "preconnect"} & set((given.get("rel") or "").lower().split()):
            address = given.get("href") or ""
        if re.match(r"\s*(https?:)?//", address, re.IGNORECASE):
            self.remote.add(address.strip())


def pages(toc: Path = ROOT / "_toc.yml") -> list[str]:
    """The documents that a table of contents lists, without suffix, the root first."""
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            found.extend(node[key] for key in ("root", "file") if key in node)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(yaml.safe_load(toc.read_text(encoding="utf-8")))
    return found


def problems(html: Path, toc: Path = ROOT / "_toc.yml") -> list[str]:
    """What is wrong with a built book, one message each."""
    wanted = ["index", *pages(toc)]
    found = [f"{page}.html is in the table of contents but was not built" for page in wanted if not (html / f"{page}.html").is_file()]
    for path in sorted(html.rglob("*.html")):
        text = path.read_text(encoding="utf-8")
        page = Loaded()
        page.feed(text)
        found += [f"{path.relative_to(html)} loads {address}" for address in sorted(page.remote | set(DELIVERY.findall(text)))]
    return found


if __name__ == "__main__":
    messages = problems(Path(sys.argv[1]))
    print("\n".join(messages), file=sys.stderr)
    sys.exit(1 if messages else 0)
