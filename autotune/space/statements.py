"""The statements of a search space, checked: parameters, derived quantities, rules, launch, presets."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast, get_args

from autotune.errors import SpaceError
from autotune.outside import printable, shown
from autotune.space.expression import FUNCTIONS, Expression
from autotune.values.digest import digest_of
from autotune.values.measurement import Argument
from autotune.values.problem import MATHS

Value = int | str
FACTS = (
    *("m", "n", "k", "lda", "ldb", "ldc", "align_a", "align_b", "align_c"),
    *("batch", "stride_a", "stride_b", "stride_c"),
    *("beta", "math", "layout_a", "layout_b", "prepared"),
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
OPTIONAL = (  # may be left out of [launch]
    *("grid_y", "grid_z", "block_y"),
    *("workspace_bytes", "scratch_bytes", "prepared_bytes", "waits"),
)
SERVES = ("math", "when")
FALLBACK = ("family", "unless")
TEMPLATE_NAMES = (  # what rendering adds
    *("family", "config_id", "template_digest", "layout"),
    *("fallback", "gate", "gate_parameters"),
)
_KEYS = {
    "parameters": ("values", "known", "absent", "meaning"),
    "derived": ("expr", "meaning"),
    "constraints": ("expr", "reason"),
    "search": ("expr", "reason"),
    "before": (*LAUNCH, "arguments"),
    "prepare": (*LAUNCH, "arguments"),
}
_ADAPTS = (  # how a tile meets a problem's edges and alignment, and a GPU's age: not what the tile is
    *("edge", "vec_a", "vec_b", "vec_c", "spread_n", "transpose_a", "loader", "stages"),
    *("unroll_stages", "fragment_pipeline", "min_blocks"),
)
HEAD = ("family", "summary", "model", "adapts", "uses", "serves")
_SECTIONS = (*HEAD, "extends", "template", "fallback", *_KEYS, "launch", "presets", "ladder")
_WORD_FACTS: dict[str, tuple[str, ...]] = {"math": MATHS, "layout_a": ("n", "t"), "layout_b": ("n", "t")}
_LARGEST_VALUE = 2**31 - 1
_ONE_PRODUCT = {"expr": "batch == 1", "reason": "without grid_z in [launch] a family computes no batches"}


class Rule(NamedTuple):
    """A named expression that must hold, and why."""

    name: str
    expression: Expression
    reason: str
    narrows: bool  # False: the kernel would be wrong or not start; True: legal, but not worth a search's time


class Fallback(NamedTuple):
    """A family whose kernel computes what that of another one leaves, decided on the device."""

    family: str
    unless: str  # a function of the template that its kernel calls first, to return where nothing was left


class Before(NamedTuple):
    """A kernel that is launched before that of the product, where it has blocks."""

    entry: str
    launch: tuple[Expression, ...]  # as `SpaceFile.launch`
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class SpaceFile:
    """What a file states, checked.

    Attributes:
        path: The file.
        family: Stem shared by the space file and its template.
        summary: One line.
        origin: The file at the end of the chain of those that this one extends; itself if it extends none.
        template: The template, where the file says which.
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
        grid_y: Blocks along y; None for one.
        grid_z: Blocks along z; None for one, and for a family that computes no batches.
        block_y: Rows into which the threads of a block are arranged; None for one.
        workspace_bytes: Bytes of workspace that a launch needs; None for none.
        scratch_bytes: How many of them, the last, need not be zero before the first launch; None for none.
        prepared_bytes: Bytes of a B that is prepared for any number of products; None where none can be.
        waits: Whether each kernel first waits for those before it on the stream; None for no.
        before: Kernels that are launched before that of the product.
        prepare: Kernels that prepare a B.
        fallback: The family that computes what this one's kernel leaves; None for none.
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
    origin: Path
    template: Path | None
    model: str | None
    adapts: tuple[str, ...]
    parameters: dict[str, tuple[Value, ...]]
    known: dict[str, tuple[Value, ...]]
    absent: dict[str, Value]
    meanings: dict[str, str]
    words: dict[str, tuple[str, ...]]
    codes: dict[str, int]
    derived: dict[str, Expression]
    rules: tuple[Rule, ...]
    launch: tuple[Expression, ...]
    grid_y: Expression | None
    grid_z: Expression | None
    block_y: Expression | None
    workspace_bytes: Expression | None
    scratch_bytes: Expression | None
    prepared_bytes: Expression | None
    waits: Expression | None
    before: tuple[Before, ...]
    prepare: tuple[Before, ...]
    fallback: Fallback | None
    serves: str | None
    serves_when: Expression | None
    presets: dict[str, dict[str, Value]]
    ladder: dict[str, dict[str, Value]]
    digest: str
    content_digest: str


def check_choice(
    parameters: dict[str, tuple[Value, ...]], choice: Mapping[str, Any], family: str
) -> str | None:
    """Return why a choice does not name one known value for every parameter; None if it does."""
    for name in choice:
        if name not in parameters:
            return f"{shown(name)} is not a parameter of {family}: give {', '.join(parameters)}"
    missing = [name for name in parameters if name not in choice]
    if missing:
        return f"the config misses {', '.join(missing)}"
    for name, value in choice.items():
        if type(value) is not type(parameters[name][0]) or value not in parameters[name]:
            return f"{name} = {shown(value)}: give one of {', '.join(map(str, parameters[name]))}"
    return None


def completed(
    known: dict[str, tuple[Value, ...]],
    absent: Mapping[str, Value],
    choice: Mapping[str, Any],
    family: str,
) -> dict[str, Value] | str:
    """Return a choice in the order of the parameters, with what it leaves out as it is where it is absent.

    Returns:
        Why not, as `check_choice` does, where that names no known value for every parameter.
    """
    whole = {**absent, **choice}
    why = check_choice(known, whole, family)
    return {name: whole[name] for name in known} if why is None else why


def codes_of(words: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Number all words that names may be, each word once."""
    distinct = dict.fromkeys(word for choices in words.values() for word in choices)
    return {word: code for code, word in enumerate(distinct)}


class Reader:
    """Checks the sections of one file, in the order in which they may name each other."""

    def __init__(self, content: dict[str, Any], path: Path, origin: Path | None = None) -> None:
        self.content = content
        self.path = path
        self.origin = origin or path
        self.where = path.name
        self.parameters: dict[str, tuple[Value, ...]] = {}
        self.known: dict[str, tuple[Value, ...]] = {}
        self.absent: dict[str, Value] = {}
        self.meanings: dict[str, str] = {}
        self.words = dict(_WORD_FACTS)
        self.codes: dict[str, int] = {}
        self.derived: dict[str, Expression] = {}

    def space_file(self, content_digest: str) -> SpaceFile:
        """Read every section.

        Raises:
            SpaceError: One is malformed, or names what the file does not have.
        """
        for section in self.content:
            if section not in _SECTIONS:
                self._refuse(f"unknown section {shown(section)}; known are {', '.join(_SECTIONS)}")
        family = self.family()
        for name, entry in self._table("parameters").items():
            self._parameter(name, entry)
        if not self.parameters:
            self._refuse("[parameters] is empty: give at least one parameter")
        self.codes = codes_of(self.words)
        for name, entry in self._table("derived").items():
            self._require_free(name, "derived")
            self.derived[name] = self._expression(entry, "expr", f"derived.{name}")
            self.meanings[name] = self._optional(entry, "meaning", f"{name}.meaning")
        launch, before, prepare = (self._table(name) for name in ("launch", "before", "prepare"))
        fallback = self.fallback()
        rules, narrowing = (
            tuple(self._rule(section, name, entry) for name, entry in self._table(section).items())
            for section in ("constraints", "search")
        )
        presets = self._presets(family)
        serves, serves_when = self.math(), self.when()
        said = (  # what decides which points there are and where a search starts, however it is written
            (family, serves, None if serves_when is None else serves_when.text),
            (list(self.parameters.items()), sorted(self.known.items())),
            sorted((name, expression.text) for name, expression in self.derived.items()),
            sorted((rule.name, rule.narrows, rule.expression.text) for rule in (*rules, *narrowing)),
            sorted((part, " ".join(str(entry).split())) for part, entry in launch.items()),
            list(presets.items()),
            *(sorted(entry.items()) for entry in before.values()),
            *(() if fallback is None else (fallback.family,)),
        )
        if "grid_z" not in launch:
            rules += (self._rule("constraints", "one_product", _ONE_PRODUCT),)
        return SpaceFile(
            path=self.path,
            family=family,
            summary=self._optional(self.content, "summary", "summary"),
            origin=self.origin,
            template=self._template(),
            model=self._model(),
            adapts=self._adapts(),
            parameters=self.parameters,
            known=self.known,
            absent=self.absent,
            meanings=self.meanings,
            words=self.words,
            codes=self.codes,
            derived=self.derived,
            rules=(*rules, *narrowing),
            launch=tuple(self._expression(launch, part, "launch") for part in LAUNCH),
            **{
                part: self._expression(launch, part, "launch") if part in launch else None
                for part in OPTIONAL
            },
            before=tuple(self._before("before", name, entry) for name, entry in before.items()),
            prepare=tuple(self._before("prepare", name, entry) for name, entry in prepare.items()),
            fallback=fallback,
            serves=serves,
            serves_when=serves_when,
            presets=presets,
            ladder=self._ladder(family),
            digest=digest_of(repr(said)),
            content_digest=content_digest,
        )

    def family(self) -> str:
        """Read the family's name."""
        return self._name(self._text(self.content, "family", "family"), "family")

    def uses(self) -> tuple[str, ...]:
        """Read the names of the parts."""
        names = self.content.get("uses", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self._refuse("uses must be a list of names of parts")
        return tuple(self._name(name, "uses") for name in names)

    def _template(self) -> Path | None:
        return Path(self._text(self.content, "template", "template")) if "template" in self.content else None

    def _model(self) -> str | None:
        return (
            self._name(self._text(self.content, "model", "model"), "model")
            if "model" in self.content
            else None
        )

    def _adapts(self) -> tuple[str, ...]:
        """Read which parameters adapt; where the file does not say, those with the usual names."""
        if "adapts" not in self.content:
            return tuple(name for name in _ADAPTS if name in self.parameters)
        stated = self.content["adapts"]
        if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
            self._refuse("adapts must be a list of parameters")
        unknown = [name for name in stated if name not in self.parameters]
        if unknown:
            self._refuse(
                f"adapts names {shown(unknown[0])}: give parameters, of {', '.join(self.parameters)}"
            )
        return tuple(stated)

    def math(self) -> str | None:
        """Read the arithmetic that the family serves."""
        table = self._table("serves")
        if not table:
            return None
        math = self._text(table, "math", "serves.math")
        if math not in MATHS:
            self._refuse(f"serves.math = {shown(math)}: give one of {', '.join(MATHS)}")
        return math

    def when(self) -> Expression | None:
        """Read the condition under which it does, over the problem and the device alone."""
        table = self._table("serves")
        if "when" not in table:
            return None
        expression = self._expression(table, "when", "serves")
        chosen = sorted(expression.names - {*FACTS, *LIMITS})
        if chosen:
            self._refuse(f"serves.when uses {chosen[0]!r}: only the problem and the device are known there")
        return expression

    def _parameter(self, name: str, entry: dict[str, Any]) -> None:
        self._require_free(name, "parameters")
        self.parameters[name] = self._values(name, entry, "values")
        known = self.known[name] = self._values(name, entry, "known" if "known" in entry else "values")
        if isinstance(known[0], str):
            self.words[name] = tuple(map(str, known))
        if "absent" in entry:
            self.absent[name] = entry["absent"]
            if why := check_choice({name: known}, {name: entry["absent"]}, self.where):
                self._refuse(f"parameters.{name}.absent: {why}")
        self.meanings[name] = self._optional(entry, "meaning", f"{name}.meaning")

    def _values(self, name: str, entry: dict[str, Any], key: str) -> tuple[Value, ...]:
        place = f"parameters.{name}.{key}"
        values = entry.get(key)
        if not isinstance(values, list) or not values:
            self._refuse(f"{place} must be a non-empty list")
        kinds = {type(value) for value in values}
        if kinds not in ({int}, {str}) or len(set(values)) < len(values):
            self._refuse(f"{place} must be distinct integers or distinct words")
        for value in values:
            if isinstance(value, str):
                self._name(value, place)
            elif abs(value) > _LARGEST_VALUE:
                self._refuse(f"{place}: {shown(value)} is beyond {_LARGEST_VALUE} (2^31 - 1)")
        return tuple(values)

    def _rule(self, section: str, name: str, entry: dict[str, Any]) -> Rule:
        place = f"{section}.{name}"
        reason = self._text(entry, "reason", f"{place}.reason")
        return Rule(name, self._expression(entry, "expr", place), reason, narrows=section == "search")

    def fallback(self) -> Fallback | None:
        """Return the table of that name; None without one."""
        table = self._table("fallback")
        if not table:
            return None
        named = (self._text(table, key, f"fallback.{key}") for key in FALLBACK)
        return Fallback(*(self._name(name, "fallback") for name in named))

    def _before(self, section: str, name: str, entry: dict[str, Any]) -> Before:
        place = f"{section}.{name}"
        arguments = tuple(self._text(entry, "arguments", f"{place}.arguments").split())
        unknown = [each for each in arguments if each not in get_args(Argument)]
        if unknown:
            known = ", ".join(get_args(Argument))
            self._refuse(f"{place}.arguments: {shown(unknown[0])} is none of {known}")
        launch = tuple(self._expression(entry, part, place) for part in LAUNCH)
        return Before(self._name(name, section), launch, cast(tuple[Argument, ...], arguments))

    def _presets(self, family: str) -> dict[str, dict[str, Value]]:
        """Read the presets; one with ``from``, a preset above it, states only how it differs from that."""
        presets: dict[str, dict[str, Value]] = {}
        for name, entry in self._table("presets").items():
            whole = entry
            if isinstance(entry, dict) and "from" in entry:
                origin = entry["from"]
                if not isinstance(origin, str) or origin not in presets:
                    have = ", ".join(presets) or "none"
                    self._refuse(
                        f"presets.{name}.from = {shown(origin)}: give a preset above it, of which are {have}"
                    )
                whole = {**presets[origin], **entry}
                del whole["from"]
            presets[name] = self._preset("presets", name, whole, family)
        return presets

    def _preset(self, section: str, name: str, entry: Any, family: str) -> dict[str, Value]:
        if not isinstance(entry, dict):
            self._refuse(f"{section}.{name} must be a table, not {shown(entry)}")
        whole = completed(self.known, self.absent, entry, family)
        if isinstance(whole, str):
            self._refuse(f"{section}.{name}: {whole}")
        return whole

    def _ladder(self, family: str) -> dict[str, dict[str, Value]]:
        """Read the steps; each states what it changes of the one before, the first every parameter."""
        steps: dict[str, dict[str, Value]] = {}
        before: dict[str, Value] = {}
        for name, entry in self._table("ladder").items():
            whole = {**before, **entry} if isinstance(entry, dict) else entry
            before = steps[name] = self._preset("ladder", name, whole, family)
        return steps

    def _expression(self, entry: dict[str, Any], key: str, place: str) -> Expression:
        text = self._text(entry, key, f"{place}.{key}")
        expression = Expression(text, f"{self.where}: {place}", self.codes, self.words)
        for name in sorted(expression.names):
            if not any(name in each for each in (self.parameters, self.derived, FACTS, LIMITS)):
                have = ", ".join(sorted((*self.parameters, *self.derived, *FACTS, *LIMITS)))
                self._refuse(f"{place} uses the unknown name {shown(name)}; known are {have}")
        return expression

    def _table(self, section: str) -> dict[str, Any]:
        table = self.content.get(section, {})
        if not isinstance(table, dict):
            self._refuse(f"[{section}] must be a table")
        if section == "launch":
            self._require_keys(table, (*LAUNCH, *OPTIONAL), section)
        if section == "serves":
            self._require_keys(table, SERVES, section)
        if section == "fallback":
            self._require_keys(table, FALLBACK, section)
        for name, entry in table.items() if section in _KEYS else ():
            if not isinstance(entry, dict):
                self._refuse(f"{section}.{name} must be a table, not {shown(entry)}")
            self._require_keys(entry, _KEYS[section], f"{section}.{name}")
        return table

    def _require_keys(self, entry: dict[str, Any], allowed: tuple[str, ...], place: str) -> None:
        for key in entry:
            if key not in allowed:
                self._refuse(f"{place}.{printable(key, 80)} is unknown; known are {', '.join(allowed)}")

    def _text(self, entry: dict[str, Any], key: str, place: str) -> str:
        value = entry.get(key)
        if not isinstance(value, str) or not value.strip():
            self._refuse(f"{place} must be a non-empty string")
        return value

    def _optional(self, entry: dict[str, Any], key: str, place: str) -> str:
        return " ".join(self._text(entry, key, place).split()) if entry.get(key, "") != "" else ""

    def _name(self, name: str, place: str) -> str:
        """Refuse what cannot stand in an expression, in CUDA and in a file name."""
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,99}", name) or keyword.iskeyword(name):
            self._refuse(f"{place}: {shown(name)} is not a name: use letters, digits and _, at most 100")
        return name

    def _require_free(self, name: str, section: str) -> None:
        self._name(name, section)
        taken = (self.parameters, self.derived, FACTS, LIMITS, TEMPLATE_NAMES, FUNCTIONS)
        if any(name in each for each in taken):
            self._refuse(f"{section}.{name} hides a name that is already there: rename it")

    def _refuse(self, why: str) -> NoReturn:
        raise SpaceError(printable(f"{self.where}: {why}", 600))
