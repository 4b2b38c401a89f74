"""What the user names - a preset, a step of the ladder, a config, a record - as a config of a space."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from autotune.errors import RecordMissing, SpaceError, UsageError
from autotune.outside import printable, shown
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Record, Store
    from autotune.space.space import Config, Space
    from autotune.values.device import Device

_SHOWN = 6  # presets that a message names
_MOST_BYTES = 1 << 20  # of a config file; a record has some kilobytes


def preset_named(spaces: Sequence[Space], name: str, unknown: str = "") -> tuple[Space, Config]:
    """Find a preset, or a step of the ladder, which may be of another family.

    Args:
        spaces: Where to look.
        name: Of the preset.
        unknown: What to say where there is none, before those there are.

    Raises:
        UsageError: There is none of this name; the message lists those there are.
    """
    for space in spaces:
        if name in space.presets or name in space.ladder:
            return space, {**space.presets, **space.ladder}[name]
    from autotune.report.steps import configured_steps, step_config

    have = "; ".join(f"{space.family} has {', '.join(space.presets) or 'none'}" for space in spaces)
    steps = configured_steps()
    if spaces[0].family in {step.family for step in steps.values()}:
        if name in steps:
            return step_config(name)
        have += f"; steps of the ladder are {', '.join(steps)}"
    raise UsageError(f"{unknown or f'preset {shown(name)} is unknown'}: {have}")


def fitted(
    space: Space,
    values: Mapping[str, Any],
    problem: Problem,
    device: Device,
    title: str,
    keep: Collection[str] = (),
) -> tuple[Config, str]:
    """Fit a config to a problem and a device; return it with a note on what was adapted.

    Args:
        space: Its family.
        values: The config.
        problem: What it computes.
        device: Where.
        title: What it is called in a message.
        keep: Parameters that the user chose, which stay.

    Raises:
        UsageError: It does not fit; the message names the nearest that does, and presets that do.
        ConfigError: It does not fit, and the user chose a parameter; the message names what it breaks.
        SpaceError: The family has no config for this problem.
    """
    from autotune.space.space import NothingLegal, adaptation

    config = space.config(values)
    space.require_math(problem)
    try:
        found = space.fitted(config, problem, device, keep)
    except NothingLegal as none:
        if keep:  # what the user chose is at fault, perhaps: say all that is
            space.require_legal(config, problem, device)
        legal = space.enumerate(problem, device)
        nearest = legal.nearest(config)
        assert nearest is not None, "an empty list is an error"
        near = legal.config(nearest)
        changes = " ".join(f"--set {name}={near[name]}" for name in near if near[name] != config[name])
        fits = [name for name, preset in space.presets.items() if _fits(space, preset, problem, device)]
        more = f" and {len(fits) - _SHOWN} more" if len(fits) > _SHOWN else ""
        others = f"; presets that fit: {', '.join(fits[:_SHOWN])}{more}" if fits else ""
        raise UsageError(
            f"{title} does not fit {problem} on {device.name} ({none.rule.reason}); "
            f"the nearest that fits: {changes}{others}"
        ) from None
    return found, adaptation(config, found)


def _fits(space: Space, preset: Config, problem: Problem, device: Device) -> bool:
    try:
        space.fitted(preset, problem, device)
    except SpaceError:
        return False
    return True


@dataclass(frozen=True)
class Found:
    """The kernel of a problem: that of a record, or the one that is predicted.

    Attributes:
        space: Its family.
        config: As stored or predicted.
        evidence: Of its time: "predicted" where there is no record.
        record: The record; None where it is predicted.
        predicted_ms: Time that a model expects of a predicted one; None where only the order is known.
        told: What the user should know, one line; "" for nothing.
    """

    space: Space
    config: Config
    evidence: Literal["measured", "estimated", "predicted"]
    record: Record | None = None
    predicted_ms: float | None = None
    told: str = ""


def stored_among(
    spaces: Sequence[Space],
    problem: Problem,
    device: Device,
    store: Store,
    *,
    estimated: bool = False,
    predict: bool = True,
    command: str,
    instead: str,
) -> Found:
    """Find the record of a problem among those of some families: the measured one, else the estimated one.

    Args:
        spaces: The families.
        problem: What it computes.
        device: For which GPU.
        store: Where records are looked up.
        estimated: Take the estimated one even where one is measured.
        predict: Without either take what is predicted to be fastest.
        command: What makes such a record.
        instead: What else there is to do.

    Raises:
        RecordMissing: There is none, and nothing is predicted.
    """
    families = [space.family for space in spaces]
    found = None if estimated else store.best(device, families, problem)
    found = found or store.best(device, families, problem, estimated=True)
    if found is not None:
        space = next(space for space in spaces if space.family == found.family)
        told = ""
        if found.evidence == "estimated" and not estimated:
            told = "no measured record: this is the estimated one, whose speed nobody measured"
        return Found(space, space.config(found.config), found.evidence, found, told=told)
    with suppress(RecordMissing):
        if predict:
            return predicted_among(spaces, problem, device, store, command)
    kind = "estimated record" if estimated else "record"
    raise RecordMissing(f"no {kind} of {problem} on {device.name}: run '{command}', or {instead}")


def predicted_among(
    spaces: Sequence[Space], problem: Problem, device: Device, store: Store, command: str
) -> Found:
    """Return what would serve a problem if it had no record; ``command`` makes one.

    Raises:
        UsageError: Nothing would: no family computes the problem on the device.
        RecordMissing: Nothing but a record would.
    """
    from autotune.kernel.choices import Choices
    from autotune.report.expected import expected

    found = expected(Choices(problem, device, store, spaces=spaces))
    first = found.first
    what = "predicted to be fastest" if first.point else "what would serve"
    told = f"this is {what} ({first.place}), nothing of it is measured: run '{command}'"
    if first.note:
        told += f"; {first.note}"
    return Found(first.space, first.config, "predicted", None, found.predicted_ms(first), told)


def with_config(spaces: Sequence[Space], values: Mapping[str, Any]) -> tuple[Space, Config]:
    """Find the first space that a config is of.

    Raises:
        ConfigError: There is none; the message says why it is not of the first.
    """
    for space in spaces:
        if values.keys() == space.parameters.keys():
            return space, space.config(values)
    return spaces[0], spaces[0].config(values)


def _unless_nobody_writes(path: str, flags: int) -> int:
    """Open a file without waiting for a writer of a pipe that has none: it is empty then."""
    file = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(file, True)
    return file


def parsed_config(text: str) -> dict[str, Any]:
    """Read a config from JSON text or a file; a record gives its config.

    Raises:
        UsageError: It cannot be read, or is no config.
    """
    if not text.lstrip().startswith("{"):
        try:
            with open(text, "rb", opener=_unless_nobody_writes) as file:  # a pipe will do
                read = file.read(_MOST_BYTES + 1)
            text = read.decode("utf-8-sig")
        except OSError as error:
            where = f"--config {printable(text, 300)}"
            raise UsageError(f"{where}: cannot be read ({error.strerror}): give JSON or a file") from None
        except ValueError as error:  # not UTF-8, or a path with a zero
            raise UsageError(f"--config: is not JSON ({printable(str(error), 200)})") from None
        if len(read) > _MOST_BYTES:
            raise UsageError(f"--config: is longer than {_MOST_BYTES} bytes: give one config or record")
    try:
        content = json.loads(text)
    except RecursionError:
        raise UsageError("--config: is not JSON (nested too deeply)") from None
    except ValueError as error:
        raise UsageError(f"--config: is not JSON ({printable(str(error), 200)})") from None
    if isinstance(content, dict) and isinstance(content.get("config"), dict):
        content = content["config"]
    if not isinstance(content, dict):
        raise UsageError("--config: expected a JSON object of parameters")
    return content
