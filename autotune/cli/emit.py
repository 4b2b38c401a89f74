"""``autotune emit``: the CUDA source of a record, preset or config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from autotune.cli.options import (
    cache_option,
    device_of,
    problem_options,
    space_option,
    spaces_of,
    target_options,
    tune_command,
)
from autotune.errors import UsageError
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Store
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
    from autotune.cli.configs import fitted, parsed_config, preset_named, stored_among, with_config
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
        told = ""
    elif preset is not None:
        space, found = preset_named(spaces, preset)
        config, told = fitted(space, {**found, **changed}, problem, device, f"preset {preset}", changed)
    else:
        space, record = stored_among(
            *(spaces, problem, device, store),
            estimated=estimated,
            command=tune_command(problem, space_name, _target(device) if estimated else ""),
            instead="give --preset or --config",
        )
        config = space.config({**record.config, **changed})
        fallen_back = record.evidence == "estimated" and not estimated
        which = "the estimated one" if config == record.config else "the estimated one, changed by --set"
        told = f"no measured record: this is {which}, whose speed nobody measured" * fallen_back
    source = render(space, config, problem, device)
    click.echo(source.text, nl=False)
    for line in filter(None, (note, told, device.shortage(problem))):
        click.echo(line, err=True)


def _target(device: Device) -> str:
    """Return the option that names a device of the table."""
    from autotune.values.device import known_devices

    return next((f" --target {key}" for key, each in known_devices().items() if each.slug == device.slug), "")


def _change(text: str) -> tuple[str, int | str]:
    """Read NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r}: write NAME=VALUE")
    return name, int(value) if _INTEGER.fullmatch(value) else value
