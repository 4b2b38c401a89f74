"""The legal points that a model expects to be fastest: the static estimate, corrected by what was measured.

Nothing is compiled and nothing measured. Listing a space can take longer than a caller of a kernel waits, so
where tiles are given only points with these tiles are looked at; split_k, edges, vector widths and the like
follow from the rules of the space. The order is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import ConfigError, DeviceError, RecordError, SpaceError
from autotune.families.estimate import estimate_parts
from autotune.model.correction import Correction
from autotune.space.space import Config, Space
from autotune.space.statements import Value
from autotune.values.device import Device
from autotune.values.problem import Problem

CORRECTED = 200  # points, the first by the estimate, that are corrected


@dataclass(frozen=True)
class Predicted:
    """A point and the time that is expected of it; never a measurement.

    Attributes:
        space: Its family.
        config: The point.
        ms: Expected time; where nothing was learned, the static estimate, good for order only.
        estimate_ms: The static estimate.
    """

    space: Space
    config: Config
    ms: float
    estimate_ms: float


def predicted(
    space: Space,
    problem: Problem,
    device: Device,
    *,
    correction: Correction | None = None,
    tiles: Sequence[Mapping[str, Value]] | None = None,
    most: int = 16,
) -> list[Predicted]:
    """List the points of a family that are expected to be fastest, the fastest first.

    Args:
        space: The family.
        problem: What is computed.
        device: Where.
        correction: Of the estimate; None for none.
        tiles: As for `Space.enumerate`; None looks at every legal point.
        most: Points to return, at most.

    Returns:
        Nothing where there is no model of the family, or no legal point.

    Raises:
        RecordError: The correction looks at something that is no feature.
    """
    try:
        legal = space.enumerate(problem, device, tiles=tiles)
        columns = space.columns(legal, problem, device)
        parts = estimate_parts(space, columns, problem, device)
    except (ConfigError, DeviceError, SpaceError):
        return []
    estimates = np.where(parts["blocks"] > 0, parts["ms"], np.inf)
    first = np.argsort(estimates, kind="stable")[:CORRECTED]
    first = first[np.isfinite(estimates[first])]
    times = estimates[first]
    if correction is not None:
        known = features(space, columns, parts, problem, device, first)
        if missing := set(correction.features) - known.keys():
            raise RecordError(f"what was learned of {space.family} asks for an unknown {min(missing)!r:.60}")
        times = times * correction.factors(known, len(first))
    order = np.argsort(times, kind="stable")[:most]
    return [
        Predicted(space, legal.config(int(first[i])), float(times[i]), float(estimates[first[i]]))
        for i in order
    ]


def features(
    space: Space,
    columns: Mapping[str, NDArray[Any]],
    parts: Mapping[str, Any],
    problem: Problem,
    device: Device,
    points: NDArray[np.int64],
) -> dict[str, Any]:
    """Return what a correction may look at: the choices, what the model makes of them, and the problem.

    Args:
        space: The family.
        columns: From `Space.columns`.
        parts: From `autotune.families.estimate.estimate_parts`.
        problem: What is computed.
        device: Where.
        points: `[count]`, the points that are asked for, by index.

    Returns:
        Names to columns `[count]`, or to one number that all points share.
    """
    found: dict[str, Any] = {}
    for name, column in columns.items():
        if column.dtype.kind in "US":
            found |= {f"{name} = {word}": column[points] == word for word in space.parameters[name]}
        else:
            found[name] = column[points]
    shape = next(iter(columns.values())).shape
    known = {name: np.broadcast_to(np.asarray(part, float), shape)[points] for name, part in parts.items()}
    for name, part in known.items():
        if name == "ms":
            found["log2_us"] = np.log2(part * 1e3)
        elif name.endswith("_ms"):
            found[f"{name.removesuffix('_ms')}_share"] = part / known["ms"]
        else:
            found[name] = part
    if {"tiles", "split_k", "tiles_k"} <= found.keys():
        blocks = columns["blocks"][points] if "blocks" in columns else found["tiles"] * found["split_k"]
        found["waves"] = problem.batch * blocks / device.sm_count
        found["steps"] = found["tiles"] * found["tiles_k"] / blocks
    if {"tiles", "BM", "BN"} <= found.keys():
        found["fill"] = problem.m * problem.n / (found["tiles"] * found["BM"] * found["BN"])
    for name, stride in (("lda", problem.lda), ("ldb", problem.ldb), ("ldc", problem.ldc)):
        found[f"{name}_divisor"] = math.gcd(stride, 16)
    for name in ("m", "n", "k", "batch"):
        found[f"log2_{name}"] = math.log2(getattr(problem, name))
    found["transposed_a"], found["transposed_b"] = (int(letter == "t") for letter in problem.layout)
    found["beta"] = problem.beta
    return found
