"""Search-space files: where they are, the parts they use, the files they extend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import SpaceError
from autotune.outside import TOML_LIMIT, parse_toml, printable, read_bytes, shown
from autotune.paths import data_dir
from autotune.space.expression import Expression
from autotune.space.statements import HEAD, Fallback, Reader, SpaceFile, codes_of
from autotune.values.digest import digest_of
from autotune.values.lazy import cached_property

_SHARED = ("derived", "constraints", "search", "launch")  # what files may have in common
_CHANGEABLE = ("parameters", "constraints", "search", "presets")


@dataclass(frozen=True)
class Heading:
    """What a space file says before its other tables, which are parsed when they are asked for.

    Attributes:
        path: The file.
        text: All of it, as it was read.
        family: As in `SpaceFile`, like what follows.
        serves: The arithmetic.
        serves_when: The condition.
        fallback: The family that computes what this one's kernel leaves.
        codes: Of the words that problems have.
        uses: Names of the parts.
        template: Of a file that says which, all is read at once.
    """

    path: Path
    text: str
    family: str
    serves: str | None
    serves_when: Expression | None
    fallback: Fallback | None
    codes: dict[str, int]
    uses: tuple[str, ...]
    template: None = None

    @property
    def origin(self) -> Path:
        """The file: it extends none."""
        return self.path

    @cached_property
    def content_digest(self) -> str:
        """SHA-256 of the text, over those of the parts it uses."""
        return digest_of(self.text, *self._parts.values())

    @cached_property
    def _parts(self) -> dict[Path, str]:
        return _parts(self.uses, self.path)

    def whole(self) -> SpaceFile:
        """Parse the text, and those of the parts.

        Raises:
            SpaceError: One of them is malformed, or names what it does not have.
        """
        content = _with_parts(_parsed(self.text, self.path), self._parts, self.path)
        return Reader(content, self.path).space_file(self.content_digest)


def read_space_file(name_or_path: str | Path) -> SpaceFile:
    """Read a built-in space by family name, or a file by path.

    Raises:
        SpaceError: The file is missing, malformed, or names what it does not have.
    """
    content, path, origin, digest = _content(name_or_path, ())
    return Reader(content, path, origin).space_file(digest)


def read_heading(path: Path) -> Heading | SpaceFile:
    """Read a file that begins with its family, ``[serves]`` and ``[fallback]``, no further; or all of it.

    Raises:
        SpaceError: The file is missing or malformed.
    """
    text = _text(path)
    cut = re.search(r"^\[(?!(?:serves|fallback)\])", text, re.MULTILINE)
    beginning = text[: cut.start()] if cut else text
    try:
        content = parse_toml(beginning)
    except ValueError:  # such as a "[" within a text of several lines
        return read_space_file(path)
    rest = text[len(beginning) :]
    said_later = any(name not in content and name in rest for name in ("serves", "fallback"))
    if said_later or not content.keys() <= {*HEAD, "fallback"}:
        return read_space_file(path)
    reader = Reader(content, path)
    reader.codes = codes_of(reader.words)
    return Heading(
        path=path,
        text=text,
        family=reader.family(),
        serves=reader.math(),
        serves_when=reader.when(),
        fallback=reader.fallback(),
        codes=reader.codes,
        uses=reader.uses(),
    )


def _content(name_or_path: str | Path, extending: tuple[Path, ...]) -> tuple[dict[str, Any], Path, Path, str]:
    """Read a file over the one that it extends: their statements, its path, that of the last, the digest."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        built_in = {file.stem: file for file in sorted(data_dir("search_spaces").glob("*.toml"))}
        if str(name_or_path) not in built_in:
            have = ", ".join(built_in)
            raise SpaceError(
                f"family {shown(str(name_or_path))} is unknown: give one of {have}, or a .toml file"
            )
        path = built_in[str(name_or_path)]
    text = _text(path)
    content = _parsed(text, path)
    if isinstance(content.get("template"), str):
        content["template"] = str(path.resolve().parent / content["template"])
    below = content.get("extends")
    if below is None:
        parts = _parts(Reader(content, path).uses(), path)
        return _with_parts(content, parts, path), path, path, digest_of(text, *parts.values())
    if not isinstance(below, str):
        raise SpaceError(f"{path}: extends must be a family or a .toml file, not {shown(below)}")
    if path.resolve() in extending:
        raise SpaceError(f"{path}: extends itself")
    base, base_path, origin, base_digest = _content(
        path.parent / below if below.endswith(".toml") else below, (*extending, path.resolve())
    )
    read = Reader(base, base_path).space_file(
        base_digest
    )  # so that a fault there is told with that file's name
    if read.presets:  # in full: a preset may be replaced or dropped from which another one differs
        base = {**base, "presets": read.presets}
    return _extended(base, content, path.name), path, origin, digest_of(base_digest, text)


def _text(path: Path) -> str:
    try:
        return read_bytes(path, TOML_LIMIT).decode("utf-8-sig")
    except OSError as error:
        raise SpaceError(f"{_shown(path)}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}"
        raise SpaceError(f"{_shown(path)}: is not TOML (not UTF-8 text: {why})") from None
    except ValueError as error:  # of a path that holds a zero
        raise SpaceError(f"{_shown(path)}: cannot be read ({error})") from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise SpaceError(f"{_shown(path)}: is not TOML ({error})") from None


def _shown(path: Path) -> str:
    return printable(str(path), 300)


def _parts(names: tuple[str, ...], path: Path) -> dict[Path, str]:
    """Read the parts that a file uses: each beside it in ``parts``, else the built-in one."""
    found: dict[Path, str] = {}
    for name in names:
        places = [folder / "parts" / f"{name}.toml" for folder in (path.parent, data_dir("search_spaces"))]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            raise SpaceError(f"{path.name}: uses {name!r}, but there is no {' or '.join(map(str, places))}")
        found[place] = _text(place)
    return found


def _with_parts(content: dict[str, Any], parts: Mapping[Path, str], path: Path) -> dict[str, Any]:
    """Put the statements of parts before those of a file, which may restate one, or drop it by false."""
    merged: dict[str, Any] = {section: {} for section in _SHARED} if parts else {}
    for place, text in parts.items():
        for section, entries in _parsed(text, place).items():
            if section not in _SHARED or not isinstance(entries, dict):
                raise SpaceError(
                    f"{place}: {section!r} has no place in a part: its tables are {', '.join(_SHARED)}"
                )
            merged[section] |= entries
    for section, entries in content.items():
        if section not in merged or not isinstance(entries, dict):
            merged[section] = entries
            continue
        for name, entry in entries.items():
            if entry is not False:
                merged[section][name] = entry
            elif merged[section].pop(name, None) is None:
                raise SpaceError(f"{path.name}: {section}.{name} does not exist, so it cannot be dropped")
    return merged


def _extended(base: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    merged = {**base, "summary": changes.get("summary", base.get("summary", ""))}
    for section, entries in changes.items():
        if section in ("extends", "summary"):
            continue
        if section in ("model", "adapts", "template"):
            merged[section] = entries
            continue
        if section not in _CHANGEABLE or not isinstance(entries, dict):
            raise SpaceError(
                f"{where}: {section!r} has no place in a file that extends another: "
                f"its tables are {', '.join(_CHANGEABLE)}"
            )
        merged[section] = dict(base.get(section, {}))
        for name, entry in entries.items():
            if section == "parameters":
                if name not in merged[section]:
                    raise SpaceError(f"{where}: parameters.{name} is not a parameter of {base['family']}")
                if isinstance(entry, dict) and "absent" in entry:
                    raise SpaceError(
                        f"{where}: parameters.{name}.absent has no place in a file that extends another: "
                        f"what older configs of {base['family']} mean is said where {name} was added"
                    )
                merged[section][name] = _with_values(merged[section][name], entry)
            elif entry is not False:
                merged[section][name] = entry
            elif merged[section].pop(name, None) is None:
                raise SpaceError(f"{where}: {section}.{name} does not exist, so it cannot be dropped")
    return merged


def _with_values(parameter: dict[str, Any], entry: Any) -> dict[str, Any]:
    """Return a parameter with new values; those it had stay known."""
    changes = entry if isinstance(entry, dict) else {"values": entry}
    values = changes.get("values", parameter["values"])
    known = parameter.get("known", parameter["values"])
    added = [value for value in values if value not in known] if isinstance(values, list) else []
    return {**parameter, **changes, "known": [*known, *added]}
