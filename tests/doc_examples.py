"""The examples of README and docs/: every fenced block of code, with what its first line says of it.

A block begins with its language and how it is run:

    sh            commands, run in the order of the page; console: one after "$", and what it printed once
    python        run in the order of the page, in one namespace
    toml FILE     a file of that name for the commands of its page; jinja likewise
    c             compiled with the header that the page's commands wrote
    sh setup      changes the environment of whoever reads it: checked, not run
    sh gpu        needs a GPU: checked here, run by tests/gpu; python gpu likewise
    sh gpu postgres   needs a database too: checked
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: The file it stands in.
        line: Where.
        language: First word after the fence.
        marks: The words after it.
        text: What is inside.
    """

    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        pieces = [piece for line in lines for piece in line.split(" && ")]
        return [words for piece in pieces if (words := shlex.split(piece, comments=True))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        language, *marks = match[1].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, tuple(marks), match[2]))
    return found


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows, and link what its commands read of the checkout."""
    for name in ("tests", "search_spaces", "templates"):
        (folder / name).symlink_to(ROOT / name)
    for block in blocks(page):
        if block.language in ("toml", "jinja"):
            (name,) = block.marks
            (folder / name).write_text(block.text)


def lessened(words: list[str]) -> list[str]:
    """Return a command with less work, which does the same."""
    if words[1] == "tune":
        words = ["64" if word == "4096" else word for word in words]
        if "--suite" in words and "mine.toml" not in words:
            words += ["--only", "P01", "--only", "P14"]
        return [*words, "--budget", "2" if "--target" in words else "5s"]  # of two budgets the last counts
    if words[1] == "replay":
        return [*words, "--seeds", "2"]
    return words
