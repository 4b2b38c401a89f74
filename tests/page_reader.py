"""Reads a page as a browser would, and checks what holds for every page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

EMPTY = {"meta", "link", "path", "rect", "br"}


class Page(HTMLParser):
    """Reads a page; elements that are not closed in order, and what it would load, fail the test."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.section = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert "src" not in given
        assert not any(name.startswith("on") for name in given)
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "section":
            self.section = given["id"]
        if tag == "tr":
            self.tables.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.tables[self.section][-1].append("")
        if given.get("id"):
            assert given["id"] not in self.ids
            self.ids.add(given["id"])
        if given.get("href"):
            self.links.append(given["href"])

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self.section][-1][-1] += text


def check(html: str, most: int = 200_000) -> Page:
    """Check what holds for every page, and return what it says."""
    assert len(html.encode()) < most
    page = Page(html)
    assert all(link == "data:," or link.removeprefix("#") in page.ids for link in page.links)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", html)
    for svg in re.findall("<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
    for rows in page.tables.values():
        assert {len(row) for row in rows} == {len(rows[0])}
    return page
