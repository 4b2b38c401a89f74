"""``autotune emit``: the CUDA source of a record, preset or config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import cache_option, device_of, problem_options, space_option, target_options
from autotune.errors import RecordMissing, UsageError
from autotune.problem import Problem

if TYPE_CHECKING:
    from autotune.device import Device
    from autotune.space import Space

_INTEGER = re.compile(r"-?[0-9]{1,18}")


@click.command()
@problem_options()
@space_option
@target_options
@click.option("--preset", help="A preset of the space.")
@click.option(
    "--config", "text", metavar="JSON|FILE", help="A config as JSON, or a file with one or a record."
)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a parameter; repeatable.")
@cache_option
def command(
    problem: Problem,
    space_name: str,
    ordinal: int | None,
    target: str | None,
    preset: str | None,
    text: str | None,
    changes: tuple[str, ...],
    root: Path | None,
) -> None:
    """Print the CUDA source of the stored winner, or of a preset or config."""
    from autotune.render import render
    from autotune.space import Space

    space = Space.load(space_name)
    if preset is not None and text is not None:
        raise UsageError("--preset and --config both name a config: give one of them")
    stated = _preset(space, preset) if preset is not None else _parsed(text) if text is not None else None
    changed = dict(map(_change, changes))
    if stated is not None:
        space.config(stated | changed)  # before the device is asked: its answer may take a while
    device, note = device_of(ordinal, target)
    values = stated if stated is not None else _stored(space, problem, device, root)
    source = render(space, space.config(values | changed), problem, device)
    click.echo(source.text, nl=False)
    if note:
        click.echo(note, err=True)


def _preset(space: Space, name: str) -> dict[str, Any]:
    if name not in space.presets:
        raise UsageError(
            f"preset {name!r} is unknown: {space.family} has {', '.join(space.presets) or 'none'}"
        )
    return dict(space.presets[name])


def _stored(space: Space, problem: Problem, device: Device, root: Path | None) -> dict[str, Any]:
    from autotune import records

    record = records.find(device, space.family, problem, root=root)
    if record is None:
        raise RecordMissing(
            f"no record of {problem} on {device.name}: run 'autotune tune {problem.cli_flags()}', "
            "or give --preset or --config"
        )
    return dict(record.config)


def _change(text: str) -> tuple[str, int | str]:
    """Read NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r}: write NAME=VALUE")
    return name, int(value) if _INTEGER.fullmatch(value) else value


def _parsed(text: str) -> dict[str, Any]:
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
