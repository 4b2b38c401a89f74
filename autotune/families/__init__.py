"""What is known of each kernel family beyond its space and template: one module each, named like the family.

A family that has a module here has a model of its time, by which candidates are ordered before any is timed;
any other family works without. A space says by `model` whose module is meant; where it says nothing, it is
that of its family's name. `autotune.families.estimate` asks them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol, cast

from autotune.errors import SpaceError
from autotune.space.space import Space
from autotune.values.device import Device
from autotune.values.problem import Problem


class Family(Protocol):
    """A module of this folder.

    Attributes:
        NAMES: What its model reads of a config: parameters and derived quantities that a space must have.
        RELIEF: Resource of its model to (what being limited by it means, the change that would relieve it),
            where that differs from what `autotune.report.explain` says of any kernel.
        FOLLOWS: Parameters that the problem and the rules of the space leave little choice of: no part of a
            tile that is fast elsewhere too. None where the whole space is listed within milliseconds.
    """

    NAMES: frozenset[str]
    RELIEF: Mapping[str, tuple[str, str]]
    FOLLOWS: frozenset[str] | None

    def parts(
        self, v: Mapping[str, Any], problem: Problem, device: Device, registers: Any, spill_bytes: Any
    ) -> dict[str, Any]:
        """Estimate one config, or columns of configs.

        Args:
            v: What `Space.values` or `Space.columns` returns.
            problem: What is computed.
            device: Where; its clock is known.
            registers: Per thread, as compiled; None predicts them and the spills.
            spill_bytes: As compiled.

        Returns:
            "ms", "blocks" (that an SM can hold), "registers", "spill_bytes", and the parts of an
            `autotune.families.estimate.Estimate`.
        """

    def reading_tile(self, v: Mapping[str, Any]) -> tuple[int, int]:
        """Return rows and columns of the outputs for which shared memory is read once."""


def family_of(space: Space) -> Family | None:
    """Return the module whose model is that of a space; None where there is none.

    Raises:
        SpaceError: The space names a model that does not exist, or that reads what the space does not have.
    """
    stated = space.model
    family = _module(stated or space.family)
    if stated is not None and family is None:
        raise SpaceError(f"{space.path.name}: model = {stated!r}: give one of {', '.join(_modelled())}")
    missing = [] if family is None else sorted(family.NAMES - space.names)
    if stated is not None and missing:
        raise SpaceError(
            f"{space.path.name}: the model of {stated} reads {', '.join(missing)}, "
            "which the space does not have: add them, or leave out model"
        )
    return None if missing else family


@cache
def _module(name: str) -> Family | None:
    if name not in _modelled():
        return None
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))


@cache
def _modelled() -> tuple[str, ...]:
    """Name the families that have a module here."""
    return tuple(
        sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "estimate")
    )
