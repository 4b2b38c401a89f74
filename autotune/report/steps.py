"""The steps of the ladder, as `steps.toml` states them, and the config of each for a problem and a device.

The configs lie in the search spaces; the last step takes the stored record.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autotune import records
from autotune.code.render import render
from autotune.errors import ConfigError, RecordError
from autotune.kernel.choices import Choices
from autotune.records import Store
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


def fitted_step(step: Step, problem: Problem, device: Device, store: Store) -> tuple[Space, Config, str]:
    """Return a step's space and its config, fitted to the problem and the device, with a note on its origin.

    Raises:
        SpaceError: Nothing fits.
        UsageError: No family computes the problem in the step's math on the device.
    """
    if step.name == TENSOR_CORES:
        choice = next(Choices(problem, device, store).all())
        command = f"no record yet, run 'autotune tune {problem.cli_flags()}'"
        note = "" if choice.served == "exact" else f"{choice.place} stands in: {command}"
        return choice.space, choice.config, f"{choice.space.family}{note and '; '}{note}"
    if step.name == WINNER:
        space = Space.load(step.family)
        stored, note = _stored(space, problem, device, store)
        if stored is not None:
            return space, stored, note
        wanted = next(iter(space.presets.values()))
    else:
        (space, wanted), note = step_config(step.name), ""
    config = space.fitted(wanted, problem, device)
    adapted = adaptation(wanted, config)
    return space, config, "; ".join(filter(None, (note, adapted)))


def _stored(space: Space, problem: Problem, device: Device, store: Store) -> tuple[Config | None, str]:
    """Return the config of the record that serves, else None; and a note, such as which preset stands in."""
    instead = f"the preset {next(iter(space.presets))} stands in: "
    try:
        record = store.find(device, space.family, problem)
        if record is None:
            return None, f"{instead}no record yet, run 'autotune tune {problem.cli_flags()}'"
        config = space.config(record.config)
        why = records.serves(record, device, problem, render(space, config, problem, device))
    except (RecordError, ConfigError) as error:
        return None, f"{instead}{error}"
    return (config, "") if why is None else (None, f"{instead}{why}")
