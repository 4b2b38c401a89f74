"""``autotune emit``: the CUDA source of a record, preset or config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import (
    cache_option,
    device_of,
    problem_options,
    space_option,
    spaces_of,
    target_options,
)
from autotune.errors import RecordMissing, SpaceError, UsageError
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Record, Store
    from autotune.space.space import Config, Space
    from autotune.values.device import Device

_INTEGER = re.compile(r"-?[0-9]{1,18}")


@click.command()
@problem_options()
@space_option
@target_options
@click.option("--preset", help="A preset of the space, or a step of the ladder.")
@click.option(
    "--config", "text", metavar="JSON|FILE", help="A config as JSON, or a file with one or a record."
)
@click.option("--estimated", is_flag=True, help="The estimated record, even where one is measured.")
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a parameter; repeatable.")
@cache_option
def command(
    problem: Problem,
    space_name: str | None,
    ordinal: int | None,
    target: str | None,
    preset: str | None,
    text: str | None,
    estimated: bool,
    changes: tuple[str, ...],
    store: Store,
) -> None:
    """Print the CUDA source of the stored winner, or of a preset or config.

    Where no winner was measured it is the estimated one, which a line on stderr says.
    """
    from autotune.code.render import render

    if preset is not None and text is not None:
        raise UsageError("--preset and --config both name a config: give one of them")
    if estimated and (preset is not None or text is not None):
        raise UsageError("--estimated names a record, --preset and --config a config: give one of them")
    stated = None if text is None else parsed_config(text)
    changed = dict(map(_change, changes))
    device, note = device_of(ordinal, target)
    spaces = spaces_of(space_name, problem, device)
    if stated is not None:
        space, config = with_config(spaces, stated | changed)
        values = dict(config)
    elif preset is None:
        space, values, fallback = _stored(spaces, problem, device, estimated, store)
        note = "\n".join(filter(None, (note, fallback)))
    else:
        space, values = preset_named(spaces, preset)
        space.config(values | changed)
        values, adapted = _fitted(space, values | changed, changed, problem, device)
        note = "\n".join(filter(None, (note, adapted)))
    source = render(space, space.config(values | changed), problem, device)
    click.echo(source.text, nl=False)
    for line in filter(None, (note, device.shortage(problem))):
        click.echo(line, err=True)


def space_with(spaces: Sequence[Space], name: str) -> Space | None:
    """Find the first space that has a preset, or a step of the ladder, of this name."""
    return next((space for space in spaces if name in space.presets or name in space.ladder), None)


def with_config(spaces: Sequence[Space], values: Mapping[str, Any]) -> tuple[Space, Config]:
    """Find the first space that a config is of.

    Raises:
        ConfigError: There is none; the message says why it is not of the first.
    """
    for space in spaces:
        if values.keys() == space.parameters.keys():
            return space, space.config(values)
    return spaces[0], spaces[0].config(values)


def preset_named(spaces: Sequence[Space], name: str) -> tuple[Space, dict[str, Any]]:
    """Find a preset of the spaces, or a step of the ladder, whose family may be another."""
    owner = space_with(spaces, name)
    if owner is not None:
        return owner, dict({**owner.presets, **owner.ladder}[name])
    have = "; ".join(f"{space.family} has {', '.join(space.presets) or 'none'}" for space in spaces)
    from autotune.report.steps import configured_steps, step_config

    steps = configured_steps()
    if spaces[0].family in {step.family for step in steps.values()}:
        if name in steps:
            other, config = step_config(name)
            return other, dict(config)
        have += f"; steps of the ladder are {', '.join(steps)}"
    raise UsageError(f"preset {name!r} is unknown: {have}")


def _fitted(
    space: Space, values: dict[str, Any], changed: dict[str, Any], problem: Problem, device: Device
) -> tuple[dict[str, Any], str]:
    """Fit a preset to the problem, but for what the user has changed, and say what was adapted."""
    from autotune.space.space import adaptation

    config = space.config(values)
    try:
        fitted = space.fitted(config, problem, device, keep=changed.keys())
    except SpaceError:
        return values, ""  # rendering says which constraints are broken
    return dict(fitted), adaptation(config, fitted)


def space_of(spaces: Sequence[Space], record: Record) -> Space:
    """Return the space of a record that was found among those of some spaces."""
    return next(space for space in spaces if space.family == record.family)


def _stored(
    spaces: Sequence[Space], problem: Problem, device: Device, estimated: bool, store: Store
) -> tuple[Space, dict[str, Any], str]:
    """Return a record's space and config, and a note where it is only an estimated one."""
    families = [space.family for space in spaces]
    found = None if estimated else store.best(device, families, problem)
    fallen_back = found is None and not estimated
    found = found or store.best(device, families, problem, estimated=True)
    if found is None:
        raise RecordMissing(
            f"no {'estimated ' if estimated else ''}record of {problem} on {device.name}: "
            f"run 'autotune tune {problem.cli_flags()}{_for(device) if estimated else ''}', "
            "or give --preset or --config"
        )
    note = "no measured record: this is the estimated one, whose speed nobody measured"
    return space_of(spaces, found), dict(found.config), note if fallen_back else ""


def _for(device: Device) -> str:
    from autotune.values.device import known_devices

    return next((f" --target {key}" for key, each in known_devices().items() if each.slug == device.slug), "")


def _change(text: str) -> tuple[str, int | str]:
    """Read NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r}: write NAME=VALUE")
    return name, int(value) if _INTEGER.fullmatch(value) else value


def parsed_config(text: str) -> dict[str, Any]:
    """Read a config from JSON text or a file; a record gives its config."""
    try:
        content = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {text}: cannot be read ({error.strerror}): give JSON or a file") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config: is not JSON ({error})") from None
    if isinstance(content, dict) and isinstance(content.get("config"), dict):
        content = content["config"]
    if not isinstance(content, dict):
        raise UsageError("--config: expected a JSON object of parameters")
    return content
