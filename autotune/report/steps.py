"""The steps of the ladder, as `steps.toml` states them, and the config of each for a problem and a device.

The configs lie in the search spaces; the last step takes the stored record.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autotune.kernel.choices import Choices
from autotune.records import Record, Store
from autotune.space.space import Config, Space, adaptation
from autotune.values.device import Device
from autotune.values.problem import Math, Problem

WINNER = "winner"  # the step that takes the stored record
TENSOR_CORES = "tensor_cores"  # the step that takes what serves the problem in its math, of any family


@dataclass(frozen=True)
class Step:
    """One step, as `steps.toml` states it.

    Attributes:
        name: Of the step and of its config in the family's space.
        family: Template and space; "" for the one that serves best.
        changed: One sentence: what is different from the step before.
        math: What it computes; a ladder has the steps of "ffma", and those of its problem's math.
    """

    name: str
    family: str
    changed: str
    math: Math = "ffma"


@cache
def steps(math: Math = "ffma") -> tuple[Step, ...]:
    """Return the steps to a kernel of a math, in order."""
    content = tomllib.loads(Path(__file__).with_name("steps.toml").read_text("utf-8"))
    found = [Step(**entry) for entry in content["steps"]]
    return tuple(step for step in found if step.math in ("ffma", math))


def configured_steps() -> dict[str, Step]:
    """Return the steps that have a config of their own, by name."""
    return {step.name: step for step in steps() if step.name != WINNER}


def step_config(name: str) -> tuple[Space, Config]:
    """Find the space of one of the `configured_steps`, and its config there, whatever the problem."""
    space = Space.load(configured_steps()[name].family)
    return space, {**space.presets, **space.ladder}[name]


@dataclass(frozen=True)
class FittedStep:
    """A step for one problem on one device.

    Attributes:
        space: Its family.
        config: Its config, fitted to the problem and the device.
        note: Where the config comes from, or how it was adapted; "" if that goes without saying.
        record: The record of this very config, problem and device, if the step takes one.
    """

    space: Space
    config: Config
    note: str = ""
    record: Record | None = None


def fitted_step(step: Step, problem: Problem, device: Device, store: Store) -> FittedStep:
    """Fit a step to a problem and a device.

    Raises:
        SpaceError: Nothing fits.
        UsageError: No family computes the problem in the step's math on the device.
    """
    if step.name not in (WINNER, TENSOR_CORES):
        return _fitted(*step_config(step.name), problem, device)
    choices = Choices(problem, device, store, spaces=[Space.load(step.family)] if step.family else None)
    choice = next(choices.exact(), None)
    if choice is not None:
        record = choice.record if choice.is_winner else None
        return FittedStep(choice.space, choice.config, "" if step.family else choice.space.family, record)
    choice = next(choices.all())
    note = f"{choice.place} stands in: {choices.missing()}, run 'autotune tune {problem.cli_flags()}'"
    return FittedStep(choice.space, choice.config, note if step.family else f"{choice.space.family}; {note}")


def _fitted(space: Space, config: Config, problem: Problem, device: Device) -> FittedStep:
    fitted = space.fitted(config, problem, device)
    return FittedStep(space, fitted, adaptation(config, fitted))
