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
@click.option("--predicted", is_flag=True, help="What would serve without a record, even where there is one.")
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
    predicted: bool,
    changes: tuple[str, ...],
    store: Store,
) -> None:
    """Print the CUDA source of the stored winner, or of a preset or config.

    Where no winner was measured it is the estimated one, where none is stored what is predicted to be
    fastest; a line on stderr says so.
    """
    from autotune.cli.configs import (
        fitted,
        parsed_config,
        predicted_among,
        preset_named,
        stored_among,
        with_config,
    )
    from autotune.code.render import render

    naming = {"--preset": preset, "--config": text, "--estimated": estimated, "--predicted": predicted}
    given = [option for option, value in naming.items() if value not in (None, False)]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} each name a kernel: give one of them")
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
        tune = tune_command(problem, space_name, _target(device) if estimated else "")
        if predicted:
            kernel = predicted_among(spaces, problem, device, store, tune)
        else:
            kernel = stored_among(
                *(spaces, problem, device, store),
                estimated=estimated,
                predict=not estimated,
                command=tune,
                instead="give --preset or --config",
            )
        space, told = kernel.space, kernel.told
        config = space.config({**kernel.config, **changed})
        if told and config != kernel.config:
            told += "; --set has changed it"
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
