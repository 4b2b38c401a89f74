"""Draws legal points of a space, each with a problem around its tiles, and picks few that cover all pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotune.space.expression import Expression
from autotune.space.space import Config
from autotune.space.statements import LIMITS, SpaceFile
from autotune.values.device import Device, named_device
from autotune.values.problem import LAYOUTS, Problem

# An extent is a multiple of the tile plus a rest. Seen modulo 4, the rests give rows of 0, 1, 2 and 3 floats
# too many; 5 and 9 tiles leave a last group of group_m rows that is not full.
EXTENTS = {
    "1": (0, 1), "T-1": (1, -1), "T": (1, 0), "T+1": (1, 1), "T+2": (1, 2), "2T+4": (2, 4), "5T": (5, 0),
    "9T": (9, 0),
}  # fmt: skip
DEPTHS = {
    "1": (0, 1), "2": (0, 2), "3": (0, 3), "T-1": (1, -1), "T": (1, 0), "T+1": (1, 1), "2T+2": (2, 2),
    "3T+4": (3, 4), "4T": (4, 0), "7T+3": (7, 3), "98T+5": (98, 5), "130T": (130, 0),
}  # fmt: skip
# Class of beta; alpha; beta; what C holds before: a kernel must not look at it where beta is zero or absent.
SCALARS = {
    "beta absent": (0, 0.75, float("nan"), "nan"),
    "beta zero": (1, -1.5, 0.0, "nan"),
    "beta": (1, 0.75, -0.5, "numbers"),
    "one": (1, 1.0, 1.0, "numbers"),
}
OPERANDS = ("random", "infinite")
TARGETS = ("h200", "rtx5080", "a100")  # sm_90; sm_120, whose PTX is another dialect; sm_80
CHOICES: dict[str, tuple[Any, ...]] = {
    "target": TARGETS, "layout": LAYOUTS, "scalars": tuple(SCALARS), "operands": OPERANDS,
    "rows": tuple(EXTENTS), "cols": tuple(EXTENTS), "depth": tuple(DEPTHS),
}  # fmt: skip
FEATURES = {  # what no parameter says alone, and templates treat apart
    "wide_a": "a_row // vec_a > num_threads",
    "wide_b": "b_row // vec_b > num_threads",
    "ragged_group": "tiles_m % group_m != 0",
    "first_step": "k % BK != 0",
    "odd_steps": "tiles_k % stages != 0",
}
LIMITS_OF_COST = (  # for FMAs, and for the length of the code; those whose names a space lacks do not count
    "m * n * k <= 600000",
    "tiles_m * BM * tiles_n * BN * tiles_k * BK <= 600000",
    "body_bytes <= 17000",
    "(a_pieces + b_pieces) // num_threads * stages <= 96",
)
TILES = {"m": ("rows", "BM", EXTENTS), "n": ("cols", "BN", EXTENTS), "k": ("depth", "BK", DEPTHS)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A config, a problem, the scalars and operands to run it with, and a device."""

    family: str
    config: Config
    problem: Problem
    target: str
    scalars: str
    operands: str

    @property
    def device(self) -> Device:
        return named_device(self.target)

    def __str__(self) -> str:
        p = self.problem
        return (
            f"{self.family}-{self.device.arch}-{p.m}x{p.n}x{p.k}-{p.layout}-{self.scalars.replace(' ', '_')}"
        )


class _Columns(dict[str, Any]):
    """Names to integer columns over the points; derived quantities and facts are made when asked for."""

    def __init__(
        self, file: SpaceFile, choices: Mapping[str, tuple[Any, ...]], ordinals: Mapping[str, Any]
    ) -> None:
        self.file, self.choices, self.ordinals = file, choices, ordinals

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]

    def _make(self, name: str) -> Any:
        file, ordinals = self.file, self.ordinals
        if name in file.derived:
            return file.derived[name](self)
        if name in file.parameters:
            values = [
                file.codes[value] if isinstance(value, str) else value for value in file.parameters[name]
            ]
            return np.array(values, np.int64)[ordinals[name]]
        if name in TILES:
            kind, tile, table = TILES[name]
            multiple, rest = np.array(list(table.values()), np.int64)[ordinals[kind]].T
            return multiple * (self[tile] if tile in file.parameters else 32) + rest
        if name in LIMITS:
            return np.array([getattr(named_device(key), name) for key in TARGETS], np.int64)[
                ordinals["target"]
            ]
        if name in ("layout_a", "layout_b"):
            codes = [file.codes[layout[name == "layout_b"]] for layout in LAYOUTS]
            return np.array(codes, np.int64)[ordinals["layout"]]
        if name == "math":
            return file.codes[file.serves or "ffma"]
        if name.startswith("align_"):
            return 4
        if name == "batch":
            return 1
        if name == "beta":
            return np.array([entry[0] for entry in SCALARS.values()], np.int64)[ordinals["scalars"]]
        if name == "lda":
            return np.where(self["layout_a"] == file.codes["n"], self["k"], self["m"])
        if name == "ldb":
            return np.where(self["layout_b"] == file.codes["n"], self["n"], self["k"])
        assert name == "ldc", name
        return self["n"]


def draw(
    file: SpaceFile, size: int, seed: int, costs: Sequence[str] = LIMITS_OF_COST
) -> tuple[dict[str, tuple[Any, ...]], Any]:
    """Draw about ``size`` points at random that no constraint forbids and no cost; search rules do not count.

    Returns:
        The choices of every factor, and ``[points, factors]``: where each point's choice stands among them.
    """
    random = np.random.default_rng(seed)
    choices = {**CHOICES, **file.parameters}
    known = {*file.parameters, *file.derived, "m", "n", "k"}
    rules = [rule.expression for rule in file.rules if not rule.narrows]
    for text in costs:
        rule = Expression(text, "cost", file.codes, file.words)
        if rule.names <= known:
            rules.append(rule)
    depths = _depths(file, choices)
    ordinals: dict[str, Any] = {}
    count = 1
    for depth, (name, values) in enumerate(choices.items()):
        ordinals = {key: np.repeat(column, len(values)) for key, column in ordinals.items()}
        ordinals[name] = np.tile(np.arange(len(values)), count)
        keep = np.ones(count * len(values), bool)
        columns = _Columns(file, choices, ordinals)
        for rule in rules:
            if max(depths[used] for used in rule.names) == depth:
                keep &= np.broadcast_to(np.asarray(rule(columns), bool), keep.shape)
        kept = np.flatnonzero(keep)
        if len(kept) > size:
            kept = np.sort(random.choice(kept, size, replace=False))
        ordinals = {key: column[kept] for key, column in ordinals.items()}
        count = len(kept)
    columns = _Columns(file, choices, ordinals)
    for name, text in FEATURES.items():
        feature = Expression(text, name, file.codes, file.words)
        if feature.names <= known:
            choices[name] = (False, True)
            ordinals[name] = np.asarray(feature(columns), np.int64)
    return choices, np.stack([ordinals[name] for name in choices], axis=1)


def _depths(file: SpaceFile, choices: Mapping[str, Any]) -> dict[str, int]:
    """Name to the position of the factor that decides it last."""
    depths = {name: number for number, name in enumerate(choices)}
    depths |= dict.fromkeys(LIMITS, depths["target"]) | {
        "layout_a": depths["layout"],
        "layout_b": depths["layout"],
    }
    depths |= dict.fromkeys(("math", "align_a", "align_b", "align_c", "batch"), 0) | {
        "beta": depths["scalars"]
    }
    depths |= {name: max(depths[kind], depths.get(tile, 0)) for name, (kind, tile, _) in TILES.items()}
    depths |= {"lda": max(depths["m"], depths["k"]), "ldb": max(depths["n"], depths["k"]), "ldc": depths["n"]}
    for name, expression in file.derived.items():
        depths[name] = max((depths[used] for used in expression.names), default=0)
    return depths


def all_pairs(points: Any, sizes: Sequence[int], seed: int, asked: Any = None) -> list[int]:
    """Choose points so that every pair of two factors' choices that some point has, a chosen point has.

    Greedy: the rarest pair that is still missing is taken from the point that brings most missing pairs.

    Args:
        points: ``[points, factors]``, ordinals.
        sizes: Number of choices of each factor.
        seed: Decides which points are looked at, 200 for each step.
        asked: ``[factors, factors]``, whether pairs of two factors must be there; all of them when not given.
            Every choice of each factor is there in any case.
    """
    random = np.random.default_rng(seed)
    ids = points + np.concatenate([[0], np.cumsum(sizes)[:-1]])
    has = np.zeros((len(points), sum(sizes)), np.float32)
    has[np.arange(len(points))[:, None], ids] = 1
    together = has.T @ has
    missing = together > 0
    if asked is not None:
        factors = np.repeat(np.arange(len(sizes)), sizes)
        missing &= (asked | asked.T | np.eye(len(sizes), dtype=bool))[np.ix_(factors, factors)]
    chosen = []
    while missing.any():
        one, other = np.unravel_index(np.where(missing, together, np.inf).argmin(), missing.shape)
        able = np.flatnonzero((has[:, one] > 0) & (has[:, other] > 0))
        able = able if len(able) <= 200 else able[random.integers(0, len(able), 200)]
        gain = missing[ids[able][:, :, None], ids[able][:, None, :]].sum(axis=(1, 2))
        best = int(able[gain.argmax()])
        chosen.append(best)
        missing[np.ix_(ids[best], ids[best])] = False
    return chosen


def cases(
    file: SpaceFile,
    size: int = 80000,
    seed: int = 0,
    groups: Sequence[str] | None = None,
    costs: Sequence[str] = LIMITS_OF_COST,
) -> list[Case]:
    """List cases that cover every choice, and every pair of choices of two factors of one group.

    Args:
        file: Of the space.
        size: Points to draw.
        seed: Of all that is random.
        groups: Each the names of factors that act on each other; when not given, a parameter acts on all.
        costs: As for `draw`.
    """
    choices, points = draw(file, size, seed, costs)
    sizes, names = [len(values) for values in choices.values()], list(choices)
    if groups is None:
        chooses = np.array([name not in CHOICES for name in names])
        asked = chooses[:, None] | chooses
    else:
        together = [np.isin(names, group.split()) for group in groups]
        asked = np.any([members[:, None] & members for members in together], axis=0)
    chosen = all_pairs(points, sizes, seed, asked)
    return [
        _case(file, {name: values[i] for (name, values), i in zip(choices.items(), row, strict=True)})
        for row in points[chosen]
    ]


def _case(file: SpaceFile, choice: Mapping[str, Any]) -> Case:
    def extent(name: str) -> int:
        kind, tile, table = TILES[name]
        multiple, rest = table[choice[kind]]
        return multiple * int(choice.get(tile, 32)) + rest

    beta, math = SCALARS[choice["scalars"]][0], file.serves or "ffma"
    problem = Problem(extent("m"), extent("n"), extent("k"), choice["layout"], beta, math)  # type: ignore[arg-type]
    config = Config({name: choice[name] for name in file.parameters})
    return Case(file.family, config, problem, choice["target"], choice["scalars"], choice["operands"])
