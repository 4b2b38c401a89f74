"""Spaces: the configs of a kernel family, and which of them are legal for a problem and a device."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from autotune.errors import ConfigError, SpaceError
from autotune.paths import data_dir
from autotune.space.file import Heading, read_heading, read_space_file
from autotune.space.statements import FACTS, LIMITS, Before, Rule, SpaceFile, Value, completed
from autotune.values.device import Device
from autotune.values.lazy import cached_property
from autotune.values.measurement import ARGUMENTS, Argument, KernelLaunch, Launch
from autotune.values.problem import MATHS, Math, Problem

_MOST_POINTS = 20_000_000  # about 1 GB while they are listed
_TABLE_ENTRIES = 1 << 13  # of parameters that are folded into one table
_ROUNDING = 1e-9  # sums of fractions in another order
_MOST_CHOICES = 1 << 15  # values of one parameter: an ordinal is an int16


class Config(Mapping[str, Value]):
    """One choice for every parameter of a space; immutable and hashable."""

    __slots__ = ("_items",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._items = tuple(values.items())

    def __getitem__(self, name: str) -> Value:
        for key, value in self._items:
            if key == name:
                return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __eq__(self, other: object) -> bool:
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return f"Config({self.id})"

    @property
    def id(self) -> str:
        """Readable name: each number behind its parameter, each word alone (BM128-BN256-...-cp_async)."""
        return "-".join(f"{name}{value}" if isinstance(value, int) else value for name, value in self._items)


class Removal(NamedTuple):
    """How many raw points one rule removed, of those the rules before it had left."""

    rule: Rule
    points: int


@dataclass(frozen=True, eq=False)
class Legal:
    """The points of a space that a search may visit, for one problem and device.

    Attributes:
        names: Parameter names in the order of the space file.
        choices: All values of each parameter, in order.
        ordinals: `[count, parameters]` int16, where each point's value stands among its parameter's choices.
        raw: Points of the full cross product.
        removals: What each rule removed; raw less all of them is the count.
        absent: Values of parameters that a config may leave out.
    """

    names: tuple[str, ...]
    choices: dict[str, tuple[Value, ...]]
    ordinals: NDArray[np.int16]
    raw: int
    removals: tuple[Removal, ...]
    absent: Mapping[str, Value] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ordinals)

    def config(self, index: int) -> Config:
        """Return the point at this index."""
        row = self.ordinals[index]
        return Config({name: self.choices[name][row[i]] for i, name in enumerate(self.names)})

    def index(self, config: Mapping[str, Value]) -> int | None:
        """Find a config in the list; None when it is not in it."""
        row = self._row(config)
        if None in row:
            return None
        hits = np.flatnonzero((self.ordinals == np.array(row, np.int16)).all(axis=1))
        return int(hits[0]) if len(hits) else None

    def nearest(self, config: Mapping[str, Value]) -> int | None:
        """Find the point that differs least from a config: in fewest parameters, then by fewest steps."""
        if not len(self):
            return None
        steps = self.steps(config)
        return int((steps <= steps.min() + _ROUNDING).argmax())  # the first of them

    def steps(self, config: Mapping[str, Value]) -> NDArray[np.float64]:
        """Return each point's distance from a config: for each parameter that differs 1 and up to 0.5.

        Returns:
            `[count]`; a value that the space does not have counts for nothing.
        """
        costs = []
        for ordinal, choices in zip(self._row(config), self.choices.values(), strict=True):
            away = np.zeros(len(choices)) if ordinal is None else np.abs(np.arange(len(choices)) - ordinal)
            costs.append((away > 0) + 0.5 * away / max(1, len(choices) - 1))
        varying = {column for columns, _ in self.folded for column in columns}
        steps = np.zeros(len(self))
        for column in set(range(len(costs))) - varying:
            steps += costs[column][self.ordinals[:1, column]]  # the same for all
        for table, codes in self.tables(costs):
            steps += table[codes]
        return steps

    def tables(self, costs: Sequence[NDArray[Any]]) -> Iterator[tuple[NDArray[Any], NDArray[np.intp]]]:
        """Yield for each group of `folded` the summed costs of its combinations, and each point's place.

        Args:
            costs: Of each parameter, in the order of `names`: one for each of its choices.
        """
        for columns, codes in self.folded:
            table = costs[columns[0]]
            for column in columns[1:]:
                table = np.add.outer(table, costs[column]).ravel()
            yield table, codes

    @cached_property
    def folded(self) -> list[tuple[list[int], NDArray[np.intp]]]:
        """Adjacent parameters that vary, folded into one code per point.

        So a sum over parameters takes a few look-ups per point: with 14 parameters in 3 tables, 0.7 ms for
        150,000 points and 3.3 ms for a million on one CPU core, where arithmetic on the ordinals takes 29 and
        149 ms.

        Returns:
            Columns of `ordinals` in ascending order, and `[count]` codes: places in the table of all
            combinations of their choices, the last column's the fastest.
        """
        groups: list[tuple[list[int], NDArray[np.intp]]] = []
        entries = _TABLE_ENTRIES
        for column, choices in enumerate(self.choices.values()):
            codes = self.ordinals[:, column].astype(np.intp)
            if not len(codes) or np.ptp(codes) == 0:
                continue  # the same for every point
            if entries * len(choices) <= _TABLE_ENTRIES:
                columns, folded = groups[-1]
                columns.append(column)
                folded *= len(choices)
                folded += codes
                entries *= len(choices)
            else:
                groups.append(([column], codes))
                entries = len(choices)
        return groups

    def _row(self, config: Mapping[str, Value]) -> list[int | None]:
        """Return where each value of a config stands among those of its parameter; None where it does not."""
        values = {**self.absent, **config}
        return [
            choices.index(values[name]) if values.get(name) in choices else None
            for name, choices in self.choices.items()
        ]


class NothingLegal(SpaceError):
    """No config of a space is legal.

    Attributes:
        rule: What removed the last of them.
    """

    def __init__(self, rule: Rule, message: str) -> None:
        self.rule = rule
        super().__init__(message)


class Fitted(NamedTuple):
    """A config of a space for a problem."""

    space: Space
    config: Config
    problem: Problem
    device: Device


class Space:
    """A family's parameters, derived quantities, rules, launch geometry and presets.

    Of a file whose heading was read, the other tables are parsed when something of them is first asked for.

    Attributes:
        family: Stem shared by the space file and its template.
        path: The file that was read.
        origin: The file at the end of the chain of those that it extends; itself if it extends none.
        template: The template, where the file says which.
    """

    def __init__(self, file: SpaceFile | Heading) -> None:
        self._heading = file
        self.family = file.family
        self.path = file.path
        self.origin = file.origin
        self.template = file.template
        self._last_fallback: tuple[Problem, Device, Fitted] | None = None
        # Rendering asks for one config's numbers four times; they take as long as the template.
        self._last: tuple[Config | None, Problem | None, Device | None, dict[str, Any]] = (
            None,
            None,
            None,
            {},
        )

    @cached_property
    def _file(self) -> SpaceFile:
        return self._heading.whole() if isinstance(self._heading, Heading) else self._heading

    @property
    def content_digest(self) -> str:
        """SHA-256 of the file's text, over those of the parts it uses and of any file it extends."""
        return self._heading.content_digest

    @property
    def summary(self) -> str:
        """One line."""
        return self._file.summary

    @property
    def model(self) -> str | None:
        """Family whose model estimates this one's time; None if the file does not say."""
        return self._file.model

    @property
    def adapts(self) -> tuple[str, ...]:
        """Parameters that may change when a config is fitted to a problem or a device."""
        return self._file.adapts

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters and derived quantities."""
        return frozenset((*self._file.parameters, *self._file.derived))

    @property
    def parameters(self) -> dict[str, tuple[Value, ...]]:
        """Name to its values, in order."""
        return self._file.parameters

    @property
    def meanings(self) -> dict[str, str]:
        """Name of a parameter or derived quantity to its one-line meaning."""
        return self._file.meanings

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Constraints, then search rules."""
        return self._file.rules

    @cached_property
    def presets(self) -> dict[str, Config]:
        """Name to config; a search starts from them."""
        return {name: Config(choice) for name, choice in self._file.presets.items()}

    @cached_property
    def ladder(self) -> dict[str, Config]:
        """Name to config of the ladder's steps; no search looks at them."""
        return {name: Config(choice) for name, choice in self._file.ladder.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of what the file says of a search, over any file it extends."""
        return self._file.digest

    @classmethod
    def load(cls, name_or_path: str | Path) -> Space:
        """Read a built-in space by family name, or a file by path.

        A file with ``extends = "sgemm"``, or another file beside it, states only what differs: new values for
        a parameter (``BM = [64, 128]``), further rules and presets, and ``name = false`` for one to drop.
        Values that only the extended file lists are not searched, but rules, presets and configs may still
        name them.

        Raises:
            SpaceError: The file is missing, malformed, or names what the space does not have.
        """
        if isinstance(name_or_path, str | Path):
            return cls(read_space_file(name_or_path))
        raise SpaceError(
            f"a space cannot be {name_or_path!r:.60}: give a Space, a family's name or the path of a .toml "
            "file"
        )

    @classmethod
    def of(cls, space: Space | str | Path) -> Space:
        """Return a space as it is, or load the one that a family's name or the path of a file stands for.

        Raises:
            SpaceError: It is none of these, or cannot be loaded.
        """
        return space if isinstance(space, Space) else cls.load(space)

    def enumerate(
        self, problem: Problem, device: Device, *, tiles: Sequence[Mapping[str, Value]] | None = None
    ) -> Legal:
        """List every point that all rules allow; each rule drops points as soon as its parameters are chosen.

        Args:
            problem: What is computed.
            device: Where.
            tiles: Combinations of the values of some parameters, the same ones in each: only points that
                have one of them are listed. One with a value that is not searched is left out.

        Raises:
            SpaceError: No point is legal, or too many would have to be looked at.
        """
        facts = _facts(self._file.codes, problem, device)
        raw = remaining = math.prod(map(len, self.parameters.values()))
        removed = dict.fromkeys(self.rules, 0)
        ordinals: dict[str, NDArray[np.int16]] = {}
        count = 1
        tree = None if tiles is None else _Tree(tiles, self.parameters)
        columns = _Columns(self._file, facts, ordinals)
        for depth, (name, values) in enumerate(self.parameters.items()):
            remaining //= len(values)
            if count * len(values) > _MOST_POINTS:
                raise SpaceError(
                    f"{self.path.name}: {count * len(values)} points are left when {name} is chosen; "
                    f"{_MOST_POINTS} can be listed: give fewer values, or a rule on earlier parameters"
                )
            if tree is not None and name in tree.names:
                parents, chosen = tree.grow()
            else:
                parents = np.repeat(np.arange(count), len(values))
                chosen = np.tile(np.arange(len(values), dtype=np.int16), count)
                if tree is not None:
                    tree.keep(parents)
            grown = _Ordinals(ordinals, parents, name, chosen)
            count = len(chosen)
            columns = columns.grown(grown)
            for rule in self._decided_at[depth]:
                keep = np.broadcast_to(np.asarray(rule.expression(columns), bool), (count,))
                left = int(np.count_nonzero(keep))
                if left < count:
                    removed[rule] = (count - left) * remaining
                    kept = np.flatnonzero(keep)  # an index takes a third of the time of a mask
                    grown = grown.kept(kept)
                    columns = columns.kept(kept, grown)
                    count = left
                    if tree is not None:
                        tree.keep(kept)
                if not count:
                    remedy = (
                        ""  # the reason names it
                        if ";" in rule.reason
                        else ": widen [parameters]"
                        if self._chosen(rule)
                        else ": no parameter decides it, name another family"
                    )
                    raise NothingLegal(
                        rule,
                        f"{self.path.name}: no config is legal for {problem} on {device.name}; the last were "
                        f"removed by {rule.name}, {rule.expression.text} ({rule.reason}){remedy}",
                    )
            ordinals = {key: grown[key] for key in (*ordinals, name)}
        return Legal(
            names=tuple(self.parameters),
            choices=dict(self.parameters),
            ordinals=np.stack([ordinals[name] for name in self.parameters]).T,  # columns are what is read
            raw=raw,
            removals=tuple(Removal(rule, points) for rule, points in removed.items()),
            absent=self._file.absent,
        )

    def points(self, configs: Sequence[Mapping[str, Value]]) -> Legal:
        """List configs as they are given, whether a rule allows them or not.

        Raises:
            ConfigError: One is no config of the space, or has a value that is not searched.
        """
        rows = []
        for config in configs:
            whole = self.config(config)
            try:
                rows.append([values.index(whole[name]) for name, values in self.parameters.items()])
            except ValueError:
                raise ConfigError(f"{whole.id} has a value that {self.family} does not search") from None
        ordinals = np.array(rows, np.int16).reshape(-1, len(self.parameters))
        return Legal(
            tuple(self.parameters), dict(self.parameters), ordinals, len(rows), (), self._file.absent
        )

    def starts(self, legal: Legal) -> list[int]:
        """Return where a search starts: for each preset the legal point nearest to it."""
        near = (legal.nearest(preset) for preset in self.presets.values())
        return list(dict.fromkeys(index for index in near if index is not None))

    def config(self, values: Mapping[str, Value]) -> Config:
        """Return a config of this space: all parameters named, in the space's order.

        What is not named has the value that the space's file says under `absent`, where it does.

        Raises:
            ConfigError: A parameter is missing or unknown, or has a value that the space does not know.
        """
        whole = completed(self._file.known, self._file.absent, values, self.family)
        if isinstance(whole, str):
            raise ConfigError(whole)
        return Config(whole)

    def violations(self, config: Config, problem: Problem, device: Device) -> list[str]:
        """Return which constraints a config breaks, each with its numbers; empty when it is legal."""
        numbers = self._numbers(config, problem, device)
        broken = []
        for rule in self.rules:
            if not rule.narrows and not rule.expression(numbers):
                values = self.values(config, problem, device)
                facts = ", ".join(f"{name} = {values[name]}" for name in sorted(rule.expression.names))
                broken.append(f"{rule.name}: needs {rule.expression.text} but {facts} ({rule.reason})")
        return broken

    def searches(self, config: Config, problem: Problem, device: Device) -> bool:
        """Return whether a search may visit a config: its values are searched, and every rule allows it."""
        numbers = self._numbers(config, problem, device)
        return all(config[name] in values for name, values in self.parameters.items()) and all(
            rule.expression(numbers) for rule in self.rules
        )

    def require_legal(self, config: Config, problem: Problem, device: Device) -> None:
        """Raise `ConfigError` naming every broken constraint, if any is."""
        broken = self.violations(config, problem, device)
        if broken:
            raise ConfigError(f"config {config.id} is not legal on {device.name}: " + "; ".join(broken))

    def fitted(self, config: Config, problem: Problem, device: Device, keep: Collection[str] = ()) -> Config:
        """Return the config itself if it is legal, else the nearest legal one that differs in `adapts` only.

        Args:
            config: Of this space.
            problem: What it computes.
            device: Where.
            keep: Parameters that may not change even so.

        Raises:
            SpaceError: No such config is legal.
        """
        if not self.violations(config, problem, device):
            return config
        free = {*self.adapts} - {*keep}
        choices = {name: self._file.known[name] if name in free else (config[name],) for name in config}
        constraints = tuple(rule for rule in self.rules if not rule.narrows)
        variants = Space(replace(self._file, parameters=choices, rules=constraints))
        try:
            legal = variants.enumerate(problem, device)
        except NothingLegal as none:
            rule = none.rule
            raise NothingLegal(
                rule,
                f"{self.family}: no variant of {config.id} is legal for {problem} on {device.name}: "
                f"{rule.name} needs {rule.expression.text} ({rule.reason})",
            ) from None
        nearest = legal.nearest(config)
        assert nearest is not None, "an empty list is an error"
        return legal.config(nearest)

    def values(self, config: Config, problem: Problem, device: Device) -> dict[str, Value]:
        """Return the value of every name that an expression or template may use."""
        words = list(self._file.codes)
        return {
            name: words[number] if name in self._file.words else int(number)
            for name, number in self._numbers(config, problem, device).items()
        }

    def columns(self, legal: Legal, problem: Problem, device: Device) -> dict[str, NDArray[Any]]:
        """Return what `values` does, for every point of the list at once.

        Args:
            legal: From `enumerate` for the same problem and device.
            problem: What is computed.
            device: Where.

        Returns:
            Each parameter and derived quantity to its column `[count]`: int64, or text where it is a word.
        """
        ordinals = {name: legal.ordinals[:, i] for i, name in enumerate(legal.names)}
        numbers = _Columns(self._file, _facts(self._file.codes, problem, device), ordinals)
        words = np.array(list(self._file.codes))
        columns: dict[str, NDArray[Any]] = {}
        for name in (*legal.names, *self._file.derived):
            column = np.broadcast_to(np.asarray(numbers[name], np.int64), (len(legal),))
            columns[name] = words[column] if name in self._file.words else column
        return columns

    def launch(self, config: Config, problem: Problem, device: Device) -> Launch:
        """Return what a config launches; the kernel of the product has the family's name."""
        numbers, file = self._numbers(config, problem, device), self._file
        blocks, threads, shared_bytes = (int(part(numbers)) for part in file.launch)
        grid_y, grid_z, block_y = (
            1 if part is None else int(part(numbers)) for part in (file.grid_y, file.grid_z, file.block_y)
        )
        workspace_bytes = 0 if file.workspace_bytes is None else int(file.workspace_bytes(numbers))
        block = (threads // block_y, block_y, 1)
        scratch_bytes = 0 if file.scratch_bytes is None else int(file.scratch_bytes(numbers))
        product = Launch.of(self.family, (blocks, grid_y, grid_z), block, shared_bytes, workspace_bytes)
        prepared_bytes = self._prepared_bytes(problem, numbers)
        fallback = self.fallback(problem, device)
        last = (() if fallback is None else fallback.space.launch(*fallback[1:]).kernels) + product.kernels
        if fallback is not None or prepared_bytes:
            arguments: tuple[Argument, ...] = (*ARGUMENTS, "prepared") if prepared_bytes else ARGUMENTS
            last = tuple(replace(each, arguments=arguments) for each in last)
        kernels = (*_launched(file.before, numbers), *last)
        return Launch(kernels, workspace_bytes, scratch_bytes, prepared_bytes, self._waits(numbers))

    def preparation(self, config: Config, problem: Problem, device: Device) -> Launch | None:
        """Return what prepares a B for any number of products; None where the family prepares none."""
        numbers = self._numbers(config, problem, device)
        size = self._prepared_bytes(problem, numbers)
        if not size:
            return None
        kernels = (*_launched(self._file.prepare, numbers),)
        return Launch(kernels, prepared_bytes=size, waits=self._waits(numbers))

    def _waits(self, numbers: Mapping[str, Any]) -> bool:
        return self._file.waits is not None and bool(self._file.waits(numbers))

    def _prepared_bytes(self, problem: Problem, numbers: Mapping[str, Any]) -> int:
        stated = self._file.prepared_bytes
        return int(stated(numbers)) if problem.prepared and stated is not None else 0

    @cached_property
    def fallback_space(self) -> Space | None:
        """The family whose kernel computes what this one's leaves, decided on the device; None for none."""
        stated = self._heading.fallback
        return None if stated is None else Space.load(stated.family)

    def fallback(self, problem: Problem, device: Device) -> Fitted | None:
        """Return a config of `fallback_space` for a problem, the first preset that fits; None without one.

        Raises:
            NothingLegal: None fits.
        """
        space = self.fallback_space
        if space is None:
            return None
        known = self._last_fallback  # read once: threads share a space
        if known is None or known[:2] != (problem, device):
            stored: dict[str, Any] = {"prepared": 0} if problem.prepared else {}
            left = replace(problem, math=space.math, **stored)
            config = next(
                filter(None, (space._fits(preset, left, device) for preset in space.presets.values())), None
            )
            if config is None:
                space.fitted(next(iter(space.presets.values())), left, device)  # which says why not
            assert config is not None
            known = self._last_fallback = (problem, device, Fitted(space, config, left, device))
        return known[2]

    def _fits(self, config: Config, problem: Problem, device: Device) -> Config | None:
        try:
            return self.fitted(config, problem, device)
        except NothingLegal:
            return None

    def gate(self, config: Config, problem: Problem, device: Device) -> tuple[str, str]:
        """Return what the kernel of `fallback_space` asks first, and the parameters that it has for that."""
        stated = self._heading.fallback
        if stated is None:
            return "", ""
        names = ["workspace", "prepared"][: 1 + problem.prepared]
        parameters = ", ".join(f"float* {name}" for name in names)
        if problem.batch > 1:  # each product has its part, of so many floats
            names[0] += f" + product * {self._numbers(config, problem, device)['workspace_floats']}"
        return f"{stated.unless}({', '.join(names)})", f",\n    {parameters}"

    @property
    def math(self) -> Math:
        """The arithmetic of its kernels: "ffma" where the file states none."""
        stated = self._heading.serves
        return MATHS[0] if stated is None else cast(Math, stated)

    @property
    def is_built_in(self) -> bool:
        """Whether the package has it; else it is a file of one's own."""
        return self.path.parent == data_dir("search_spaces")

    @property
    def flag(self) -> str:
        """The option that names this space on the command line, quoted where a shell needs it."""
        if self.is_built_in:
            return f"--space {self.family}"
        return f"--space {quoted(str(self.path))}"

    def require_math(self, problem: Problem) -> None:
        """Raise `SpaceError` if a problem asks for another arithmetic than that of the family's kernels."""
        if self.math != problem.math:
            flag = "leave out --math" if self.math == MATHS[0] else f"give --math {self.math}"
            raise SpaceError(
                f"{self.family} computes {self.math}, not {problem.math}: {flag}, or name another family"
            )

    def serves(self, problem: Problem, device: Device) -> bool:
        """Return whether a search for the problem looks at this family unless told otherwise."""
        if self._heading.serves != problem.math:
            return False
        when = self._heading.serves_when
        return when is None or bool(when(_facts(self._heading.codes, problem, device)))

    def refusal(self, problem: Problem, device: Device) -> str:
        """Return in a few words why nothing of this family serves a problem; "" where a preset would."""
        when = self._heading.serves_when
        if when is not None and not when(_facts(self._heading.codes, problem, device)):
            return f"{self.family} needs {when.text}"
        why = ""
        for preset in self.presets.values():
            try:
                self.fitted(preset, problem, device)
            except NothingLegal as none:
                why = f"{self.family} cannot: {none.rule.reason}"
            else:
                return ""
        return why

    def _numbers(self, config: Config, problem: Problem, device: Device) -> dict[str, Any]:
        """Return the integer of every name, words as their codes; the same for one config is kept."""
        *asked, known = self._last
        if asked[0] is config and asked[1] is problem and asked[2] is device:
            return known
        codes = self._file.codes
        numbers: dict[str, Any] = {
            **{name: codes[value] if isinstance(value, str) else value for name, value in config.items()},
            **_facts(codes, problem, device),
        }
        for name, expression in self._file.derived.items():
            numbers[name] = expression(numbers)
        self._last = (config, problem, device, numbers)
        return numbers

    @cached_property
    def _depth(self) -> dict[str, int]:
        """Name to the position of the parameter that decides it last; 0 for problem and device."""
        depth = dict.fromkeys([*FACTS, *LIMITS], 0)
        depth |= {name: i for i, name in enumerate(self.parameters)}
        for name, expression in self._file.derived.items():
            depth[name] = max((depth[used] for used in expression.names), default=0)
        return depth

    def _chosen(self, rule: Rule) -> bool:
        """Return whether a rule depends on a parameter, and not on the problem and the device alone."""
        names, left = set(), [*rule.expression.names]
        while left:
            name = left.pop()
            names.add(name)
            left += self._file.derived[name].names - names if name in self._file.derived else ()
        return not names.isdisjoint(self._file.parameters)

    @cached_property
    def _decided_at(self) -> list[list[Rule]]:
        """The rules that each parameter decides, in the order of both."""
        decided: list[list[Rule]] = [[] for _ in self.parameters]
        for rule in self.rules:
            decided[max((self._depth[name] for name in rule.expression.names), default=0)].append(rule)
        return decided


def _facts(codes: Mapping[str, int], problem: Problem, device: Device) -> dict[str, int]:
    """Return the integer of every fact of a problem and limit of a device; words as their codes."""
    words = {"math": problem.math, "layout_a": problem.layout[0], "layout_b": problem.layout[1]}
    numbers = {name: int(getattr(problem, name)) for name in FACTS if name not in words}
    limits = {name: int(getattr(device, name)) for name in LIMITS}
    return {**numbers, **{name: codes[word] for name, word in words.items()}, **limits}


def _launched(kernels: Sequence[Before], numbers: Mapping[str, Any]) -> Iterator[KernelLaunch]:
    """Yield those kernels that have blocks."""
    for each in kernels:
        blocks, threads, shared_bytes = (int(part(numbers)) for part in each.launch)
        if blocks:
            yield KernelLaunch(each.entry, (blocks, 1, 1), (threads, 1, 1), shared_bytes, each.arguments)


class _Tree:
    """The combinations that `Space.enumerate` is limited to, followed down parameter by parameter.

    Attributes:
        names: Parameters that the combinations choose, in the space's order.
    """

    def __init__(
        self, tiles: Sequence[Mapping[str, Value]], parameters: Mapping[str, tuple[Value, ...]]
    ) -> None:
        places = {name: {value: i for i, value in enumerate(values)} for name, values in parameters.items()}
        self.names = tuple(name for name in parameters if tiles and name in tiles[0])
        known = {
            tuple(places[name][tile[name]] for name in self.names)
            for tile in tiles
            if all(tile[name] in places[name] for name in self.names)
        }
        self._rows = np.array(sorted(known), np.int16).reshape(-1, len(self.names))
        self._depth = 0
        self._node_of_row = np.zeros(len(self._rows), np.int64)
        self._node_of_point = np.zeros(1, np.int64)

    def grow(self) -> tuple[NDArray[np.int64], NDArray[np.int16]]:
        """Go one parameter down: for every new point the point that it extends, and its value's ordinal."""
        keys = self._node_of_row * _MOST_CHOICES + self._rows[:, self._depth]
        children, self._node_of_row = np.unique(keys, return_inverse=True)
        above = children // _MOST_CHOICES  # sorted, because the keys are
        begins, ends = (np.searchsorted(above, self._node_of_point, side) for side in ("left", "right"))
        counts = ends - begins
        parents = np.repeat(np.arange(len(counts)), counts)
        nodes = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + begins[parents]
        self._node_of_point = nodes
        self._depth += 1
        return parents, (children[nodes] % _MOST_CHOICES).astype(np.int16)

    def keep(self, points: NDArray[Any]) -> None:
        """Follow the points that stay, by index."""
        self._node_of_point = self._node_of_point[points]


class _Ordinals(dict[str, NDArray[np.int16]]):
    """Columns of ordinals of points that extend others by one parameter, made when they are asked for.

    Args:
        before: Those of the others.
        parents: For each point the one that it extends.
        name: The parameter.
        chosen: Its ordinals.
    """

    def __init__(
        self,
        before: Mapping[str, NDArray[np.int16]],
        parents: NDArray[np.int64],
        name: str,
        chosen: NDArray[np.int16],
    ) -> None:
        super().__init__({name: chosen})
        self._before, self._parents, self._name = before, parents, name

    def kept(self, points: NDArray[np.int64]) -> _Ordinals:
        """Return those of some of the points, by index."""
        return _Ordinals(self._before, self._parents[points], self._name, self[self._name][points])

    def __missing__(self, name: str) -> NDArray[np.int16]:
        self[name] = self._before[name][self._parents]
        return self[name]


class _Columns(dict[str, Any]):
    """Names to columns of integers, made when an expression asks for them."""

    def __init__(
        self,
        file: SpaceFile,
        facts: Mapping[str, Any],
        ordinals: Mapping[str, NDArray[np.int16]],
        before: tuple[_Columns, NDArray[np.int64]] | None = None,
    ) -> None:
        super().__init__(facts)
        self._file = file
        self._ordinals = ordinals
        self._before = before  # columns of more points, and which of them these are

    def grown(self, ordinals: Mapping[str, NDArray[np.int16]]) -> _Columns:
        """Return those of points with one more parameter: numbers stay, columns are made again."""
        return _Columns(self._file, self._numbers(), ordinals)

    def kept(self, points: NDArray[np.int64], ordinals: Mapping[str, NDArray[np.int16]]) -> _Columns:
        """Return those of some of the points, by index."""
        return _Columns(self._file, self._numbers(), ordinals, (self, points))

    def _numbers(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if not isinstance(value, np.ndarray)}

    def _made(self, name: str) -> bool:
        return name in self or (self._before is not None and self._before[0]._made(name))

    def __missing__(self, name: str) -> Any:
        if self._before is not None and self._before[0]._made(name):
            columns, points = self._before
            self[name] = columns[name][points]
        elif name in self._file.derived:
            self[name] = self._file.derived[name](self)
        else:
            values = self._file.parameters[name]
            codes = [self._file.codes[value] if isinstance(value, str) else value for value in values]
            self[name] = np.array(codes, np.int64)[self._ordinals[name]]
        return self[name]


def built_in() -> list[Space]:
    """Load the built-in spaces, in the order of their names."""
    return [_built_in(path) for path in sorted(data_dir("search_spaces").glob("*.toml"))]


def families(problem: Problem, device: Device) -> list[Space]:
    """Load the built-in spaces that serve a problem on a device, in the order of their names."""
    return [space for space in built_in() if space.serves(problem, device)]


def unserved(problem: Problem, device: Device, spaces: Sequence[Space] = ()) -> str:
    """Return in one line that no family computes a problem, and why: those given, else all to be searched."""
    asked = spaces or [space for space in built_in() if space._heading.serves == problem.math]
    whys = "; ".join(filter(None, (space.refusal(problem, device) for space in asked)))
    return f"no kernel family computes {problem} on {device.name}: {whys or 'name one by --space'}"


@cache
def _built_in(path: Path) -> Space:
    return Space(read_heading(path))


def quoted(word: str) -> str:
    """Quote a word of a command line for a shell, in double quotes, so that it may stand in single ones."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    return '"' + "".join(f"\\{letter}" if letter in '"\\$`' else letter for letter in word) + '"'


def adaptation(wanted: Config, fitted: Config) -> str:
    """Return which parameters `Space.fitted` changed, as text; "" for none."""
    changes = [f"{name} = {fitted[name]}" for name in fitted if fitted[name] != wanted[name]]
    return f"adapted to the problem: {', '.join(changes)}" if changes else ""
