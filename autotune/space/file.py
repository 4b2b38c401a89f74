"""Turns a search-space file, over the file that it extends, into its checked statements."""

from __future__ import annotations

import hashlib
import keyword
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from autotune.errors import SpaceError
from autotune.paths import data_dir
from autotune.space.expression import FUNCTIONS, Expression
from autotune.values.problem import MATHS

Value = int | str
FACTS = (
    *("m", "n", "k", "lda", "ldb", "ldc", "align_a", "align_b", "align_c"),
    *("beta", "math", "layout_a", "layout_b"),
)
LIMITS = (
    "capability",
    "sm_count",
    "shared_per_block",
    "shared_per_sm",
    "registers_per_sm",
    "registers_per_thread",
    "max_threads_per_block",
    "max_threads_per_sm",
    "max_blocks_per_sm",
    "l2_bytes",
)
LAUNCH = ("grid", "block", "shared_bytes")
OPTIONAL = ("block_y", "workspace_bytes")  # may be left out of [launch]
SERVES = ("math", "when")
TEMPLATE_NAMES = ("family", "config_id", "template_digest", "layout")  # what rendering adds
_KEYS = {
    "parameters": ("values", "known", "meaning"),
    "derived": ("expr", "meaning"),
    "constraints": ("expr", "reason"),
    "search": ("expr", "reason"),
}
_ADAPTS = (  # how a tile meets a problem's edges and alignment, and a GPU's age: not what the tile is
    *("edge", "vec_a", "vec_b", "vec_c", "spread_n", "transpose_a", "loader", "stages"),
    *("unroll_stages", "fragment_pipeline", "min_blocks"),
)
_HEAD = ("family", "summary", "model", "adapts", "uses", "serves")
_SECTIONS = (*_HEAD, "extends", *_KEYS, "launch", "presets", "ladder")
_SHARED = ("derived", "constraints", "search", "launch")  # what files may have in common
_CHANGEABLE = ("parameters", "constraints", "search", "presets")
_WORD_FACTS: dict[str, tuple[str, ...]] = {"math": MATHS, "layout_a": ("n", "t"), "layout_b": ("n", "t")}
_LARGEST_VALUE = 2**31 - 1


class Rule(NamedTuple):
    """A named expression that must hold, and why."""

    name: str
    expression: Expression
    reason: str
    narrows: bool  # False: the kernel would be wrong or not start; True: legal, but not worth a search's time


@dataclass(frozen=True)
class SpaceFile:
    """What a file states, checked.

    Attributes:
        path: The file.
        family: Stem shared by the space file and its template.
        summary: One line.
        model: Family whose model estimates this one's time; None if the file does not say.
        adapts: Parameters that may change when a config is fitted to a problem or a device.
        parameters: Name to its values, in order.
        known: Name to its values and to those of an extended file: rules, presets and configs may name them.
        meanings: Name of a parameter or derived quantity to its one-line meaning.
        words: Name to the words it may be, for parameters and facts that are not numbers.
        codes: Word to the integer that stands for it in expressions.
        derived: Name to its expression, each over earlier names.
        rules: Constraints, then search rules.
        launch: Blocks, threads of a block, bytes of dynamic shared memory.
        block_y: Rows into which the threads of a block are arranged; None for one.
        workspace_bytes: Bytes of workspace that a launch needs; None for none.
        serves: Arithmetic that the family computes when nothing else is asked for; None for no such family.
        serves_when: Problems and devices that it serves; None for all.
        presets: Name to a choice for every parameter, however it was stated.
        ladder: The same for steps of the ladder, from which no search starts.
        digest: SHA-256 of what decides the points and where a search starts: presets in full, no comments,
            meanings or reasons, and not the ladder.
        content_digest: SHA-256 of the file's text, over those of its parts and of any file it extends.
    """

    path: Path
    family: str
    summary: str
    model: str | None
    adapts: tuple[str, ...]
    parameters: dict[str, tuple[Value, ...]]
    known: dict[str, tuple[Value, ...]]
    meanings: dict[str, str]
    words: dict[str, tuple[str, ...]]
    codes: dict[str, int]
    derived: dict[str, Expression]
    rules: tuple[Rule, ...]
    launch: tuple[Expression, ...]
    block_y: Expression | None
    workspace_bytes: Expression | None
    serves: str | None
    serves_when: Expression | None
    presets: dict[str, dict[str, Value]]
    ladder: dict[str, dict[str, Value]]
    digest: str
    content_digest: str


@dataclass(frozen=True)
class Heading:
    """What a space file says before its other tables, which are parsed when they are asked for.

    Attributes:
        path: The file.
        text: All of it, as it was read.
        family: As in `SpaceFile`, like what follows.
        serves: The arithmetic.
        serves_when: The condition.
        codes: Of the words that problems have.
        uses: Names of the parts.
    """

    path: Path
    text: str
    family: str
    serves: str | None
    serves_when: Expression | None
    codes: dict[str, int]
    uses: tuple[str, ...]

    @cached_property
    def content_digest(self) -> str:
        """SHA-256 of the text, over those of the parts it uses."""
        return _digest(self.text, *self._parts.values())

    @cached_property
    def _parts(self) -> dict[Path, str]:
        return _parts(self.uses, self.path)

    def whole(self) -> SpaceFile:
        """Parse the text, and those of the parts.

        Raises:
            SpaceError: One of them is malformed, or names what it does not have.
        """
        content = _with_parts(_parsed(self.text, self.path), self._parts, self.path)
        return _Reader(content, self.path).space_file(self.content_digest)


def read_space_file(name_or_path: str | Path) -> SpaceFile:
    """Read a built-in space by family name, or a file by path.

    Raises:
        SpaceError: The file is missing, malformed, or names what it does not have.
    """
    content, path, digest = _content(name_or_path, ())
    return _Reader(content, path).space_file(digest)


def read_heading(path: Path) -> Heading | SpaceFile:
    """Read a file that begins with its family and ``[serves]``, no further; any other one is read whole.

    Raises:
        SpaceError: The file is missing or malformed.
    """
    text = _text(path)
    cut = re.search(r"^\[(?!serves\])", text, re.MULTILINE)
    beginning = text[: cut.start()] if cut else text
    try:
        content = tomllib.loads(beginning)
    except ValueError:  # such as a "[" within a text of several lines
        return read_space_file(path)
    said_later = "serves" not in content and "serves" in text[len(beginning) :]
    if said_later or not content.keys() <= {*_HEAD}:
        return read_space_file(path)
    reader = _Reader(content, path)
    reader.codes = _codes(reader.words)
    return Heading(
        path=path,
        text=text,
        family=reader.family(),
        serves=reader.math(),
        serves_when=reader.when(),
        codes=reader.codes,
        uses=reader.uses(),
    )


def check_choice(
    parameters: dict[str, tuple[Value, ...]], choice: Mapping[str, Any], family: str
) -> str | None:
    """Say why a choice does not name one known value for every parameter; None if it does."""
    for name in choice:
        if name not in parameters:
            return f"{name!r} is not a parameter of {family}: give {', '.join(parameters)}"
    missing = [name for name in parameters if name not in choice]
    if missing:
        return f"the config misses {', '.join(missing)}"
    for name, value in choice.items():
        if type(value) is not type(parameters[name][0]) or value not in parameters[name]:
            return f"{name} = {value!r}: give one of {', '.join(map(str, parameters[name]))}"
    return None


def _content(name_or_path: str | Path, extending: tuple[Path, ...]) -> tuple[dict[str, Any], Path, str]:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        built_in = {file.stem: file for file in sorted(data_dir("search_spaces").glob("*.toml"))}
        if str(name_or_path) not in built_in:
            have = ", ".join(built_in)
            raise SpaceError(
                f"family {str(name_or_path)!r:.80} is unknown: give one of {have}, or a .toml file"
            )
        path = built_in[str(name_or_path)]
    text = _text(path)
    content = _parsed(text, path)
    below = content.get("extends")
    if below is None:
        parts = _parts(_Reader(content, path).uses(), path)
        return _with_parts(content, parts, path), path, _digest(text, *parts.values())
    if not isinstance(below, str):
        raise SpaceError(f"{path}: extends must be a family or a .toml file, not {below!r}")
    if path.resolve() in extending:
        raise SpaceError(f"{path}: extends itself")
    base, base_path, base_digest = _content(
        path.parent / below if below.endswith(".toml") else below, (*extending, path.resolve())
    )
    read = _Reader(base, base_path).space_file(
        base_digest
    )  # so that a fault there is told with that file's name
    if read.presets:  # in full: a preset may be replaced or dropped from which another one differs
        base = {**base, "presets": read.presets}
    return _extended(base, content, path.name), path, _digest(base_digest, text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpaceError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise SpaceError(f"{path}: is not TOML ({error})") from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpaceError(f"{path}: is not TOML ({error})") from None


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


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


def _codes(words: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    distinct = dict.fromkeys(word for choices in words.values() for word in choices)
    return {word: code for code, word in enumerate(distinct)}


def _extended(base: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    merged = {**base, "summary": changes.get("summary", base.get("summary", ""))}
    for section, entries in changes.items():
        if section in ("extends", "summary"):
            continue
        if section in ("model", "adapts"):
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
                merged[section][name] = _with_values(merged[section][name], entry)
            elif entry is not False:
                merged[section][name] = entry
            elif merged[section].pop(name, None) is None:
                raise SpaceError(f"{where}: {section}.{name} does not exist, so it cannot be dropped")
    return merged


def _with_values(parameter: dict[str, Any], entry: Any) -> dict[str, Any]:
    """Give a parameter new values; those it had stay known."""
    changes = entry if isinstance(entry, dict) else {"values": entry}
    values = changes.get("values", parameter["values"])
    known = parameter.get("known", parameter["values"])
    added = [value for value in values if value not in known] if isinstance(values, list) else []
    return {**parameter, **changes, "known": [*known, *added]}


class _Reader:
    """Checks the sections of one file, in the order in which they may name each other."""

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.content = content
        self.path = path
        self.where = path.name
        self.parameters: dict[str, tuple[Value, ...]] = {}
        self.known: dict[str, tuple[Value, ...]] = {}
        self.meanings: dict[str, str] = {}
        self.words = dict(_WORD_FACTS)
        self.codes: dict[str, int] = {}
        self.derived: dict[str, Expression] = {}

    def space_file(self, content_digest: str) -> SpaceFile:
        for section in self.content:
            if section not in _SECTIONS:
                self.refuse(f"unknown section {section!r}; known are {', '.join(_SECTIONS)}")
        family = self.family()
        for name, entry in self.table("parameters").items():
            self.parameter(name, entry)
        if not self.parameters:
            self.refuse("[parameters] is empty: give at least one parameter")
        self.codes = _codes(self.words)
        for name, entry in self.table("derived").items():
            self.require_free(name, "derived")
            self.derived[name] = self.expression(entry, "expr", f"derived.{name}")
            self.meanings[name] = str(entry.get("meaning", ""))
        rules = tuple(
            self.rule(section, name, entry)
            for section in ("constraints", "search")
            for name, entry in self.table(section).items()
        )
        launch = self.table("launch")
        presets = self.presets(family)
        serves, serves_when = self.math(), self.when()
        said = (  # what decides which points there are and where a search starts, however it is written
            (family, serves, None if serves_when is None else serves_when.text),
            (list(self.parameters.items()), sorted(self.known.items())),
            sorted((name, expression.text) for name, expression in self.derived.items()),
            sorted((rule.name, rule.narrows, rule.expression.text) for rule in rules),
            sorted((part, " ".join(str(entry).split())) for part, entry in launch.items()),
            list(presets.items()),
        )
        return SpaceFile(
            path=self.path,
            family=family,
            summary=str(self.content.get("summary", "")),
            model=self.model(),
            adapts=self.adapts(),
            parameters=self.parameters,
            known=self.known,
            meanings=self.meanings,
            words=self.words,
            codes=self.codes,
            derived=self.derived,
            rules=rules,
            launch=tuple(self.expression(launch, part, "launch") for part in LAUNCH),
            **{
                part: self.expression(launch, part, "launch") if part in launch else None for part in OPTIONAL
            },
            serves=serves,
            serves_when=serves_when,
            presets=presets,
            ladder=self.ladder(family),
            digest=_digest(repr(said)),
            content_digest=content_digest,
        )

    def family(self) -> str:
        return self.name(self.text(self.content, "family", "family"), "family")

    def uses(self) -> tuple[str, ...]:
        """Read the names of the parts."""
        names = self.content.get("uses", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.refuse("uses must be a list of names of parts")
        return tuple(self.name(name, "uses") for name in names)

    def model(self) -> str | None:
        return (
            self.name(self.text(self.content, "model", "model"), "model") if "model" in self.content else None
        )

    def adapts(self) -> tuple[str, ...]:
        """Read which parameters adapt; where the file does not say, those with the usual names."""
        if "adapts" not in self.content:
            return tuple(name for name in _ADAPTS if name in self.parameters)
        stated = self.content["adapts"]
        if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
            self.refuse("adapts must be a list of parameters")
        unknown = [name for name in stated if name not in self.parameters]
        if unknown:
            self.refuse(f"adapts names {unknown[0]!r}: give parameters, of {', '.join(self.parameters)}")
        return tuple(stated)

    def math(self) -> str | None:
        """Read the arithmetic that the family serves."""
        table = self.table("serves")
        if not table:
            return None
        math = self.text(table, "math", "serves.math")
        if math not in MATHS:
            self.refuse(f"serves.math = {math!r}: give one of {', '.join(MATHS)}")
        return math

    def when(self) -> Expression | None:
        """Read the condition under which it does, over the problem and the device alone."""
        table = self.table("serves")
        if "when" not in table:
            return None
        expression = self.expression(table, "when", "serves")
        chosen = sorted(expression.names - {*FACTS, *LIMITS})
        if chosen:
            self.refuse(f"serves.when uses {chosen[0]!r}: only the problem and the device are known there")
        return expression

    def parameter(self, name: str, entry: dict[str, Any]) -> None:
        self.require_free(name, "parameters")
        self.parameters[name] = self.values(name, entry, "values")
        known = self.known[name] = self.values(name, entry, "known" if "known" in entry else "values")
        if isinstance(known[0], str):
            self.words[name] = tuple(map(str, known))
        self.meanings[name] = str(entry.get("meaning", ""))

    def values(self, name: str, entry: dict[str, Any], key: str) -> tuple[Value, ...]:
        place = f"parameters.{name}.{key}"
        values = entry.get(key)
        if not isinstance(values, list) or not values:
            self.refuse(f"{place} must be a non-empty list")
        kinds = {type(value) for value in values}
        if kinds not in ({int}, {str}) or len(set(values)) < len(values):
            self.refuse(f"{place} must be distinct integers or distinct words")
        for value in values:
            if isinstance(value, str):
                self.name(value, place)
            elif abs(value) > _LARGEST_VALUE:
                self.refuse(f"{place}: {value} is beyond {_LARGEST_VALUE} (2^31 - 1)")
        return tuple(values)

    def rule(self, section: str, name: str, entry: dict[str, Any]) -> Rule:
        place = f"{section}.{name}"
        reason = self.text(entry, "reason", f"{place}.reason")
        return Rule(name, self.expression(entry, "expr", place), reason, narrows=section == "search")

    def presets(self, family: str) -> dict[str, dict[str, Value]]:
        """Read the presets; one with ``from``, a preset above it, states only how it differs from that."""
        presets: dict[str, dict[str, Value]] = {}
        for name, entry in self.table("presets").items():
            whole = entry
            if isinstance(entry, dict) and "from" in entry:
                origin = entry["from"]
                if not isinstance(origin, str) or origin not in presets:
                    have = ", ".join(presets) or "none"
                    self.refuse(
                        f"presets.{name}.from = {origin!r}: give a preset above it, of which are {have}"
                    )
                whole = {**presets[origin], **entry}
                del whole["from"]
            presets[name] = self.preset("presets", name, whole, family)
        return presets

    def preset(self, section: str, name: str, entry: Any, family: str) -> dict[str, Value]:
        if not isinstance(entry, dict):
            self.refuse(f"{section}.{name} must be a table, not {entry!r}")
        why = check_choice(self.known, entry, family)
        if why is not None:
            self.refuse(f"{section}.{name}: {why}")
        return {parameter: entry[parameter] for parameter in self.parameters}

    def ladder(self, family: str) -> dict[str, dict[str, Value]]:
        """Read the steps; each states what it changes of the one before, the first every parameter."""
        steps: dict[str, dict[str, Value]] = {}
        before: dict[str, Value] = {}
        for name, entry in self.table("ladder").items():
            whole = {**before, **entry} if isinstance(entry, dict) else entry
            before = steps[name] = self.preset("ladder", name, whole, family)
        return steps

    def expression(self, entry: dict[str, Any], key: str, place: str) -> Expression:
        text = self.text(entry, key, f"{place}.{key}")
        expression = Expression(text, f"{self.where}: {place}", self.codes, self.words)
        known = {*self.parameters, *self.derived, *FACTS, *LIMITS}
        unknown = sorted(expression.names - known)
        if unknown:
            self.refuse(f"{place} uses the unknown name {unknown[0]!r}; known are {', '.join(sorted(known))}")
        return expression

    def table(self, section: str) -> dict[str, Any]:
        table = self.content.get(section, {})
        if not isinstance(table, dict):
            self.refuse(f"[{section}] must be a table")
        if section == "launch":
            self.require_keys(table, (*LAUNCH, *OPTIONAL), section)
        if section == "serves":
            self.require_keys(table, SERVES, section)
        for name, entry in table.items() if section in _KEYS else ():
            if not isinstance(entry, dict):
                self.refuse(f"{section}.{name} must be a table, not {entry!r}")
            self.require_keys(entry, _KEYS[section], f"{section}.{name}")
        return table

    def require_keys(self, entry: dict[str, Any], allowed: tuple[str, ...], place: str) -> None:
        for key in entry:
            if key not in allowed:
                self.refuse(f"{place}.{key} is unknown; known are {', '.join(allowed)}")

    def text(self, entry: dict[str, Any], key: str, place: str) -> str:
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip():
            self.refuse(f"{place} must be a non-empty string")
        return value

    def name(self, name: str, place: str) -> str:
        """Refuse what cannot stand in an expression, in CUDA and in a file name."""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
            self.refuse(f"{place}: {name!r} is not a name: use letters, digits and _")
        return name

    def require_free(self, name: str, section: str) -> None:
        self.name(name, section)
        if name in {*self.parameters, *self.derived, *FACTS, *LIMITS, *TEMPLATE_NAMES, *FUNCTIONS}:
            self.refuse(f"{section}.{name} hides a name that is already there: rename it")

    def refuse(self, why: str) -> NoReturn:
        raise SpaceError(f"{self.where}: {why}")
