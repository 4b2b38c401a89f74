"""Render a config and a problem as CUDA source."""

from __future__ import annotations

import hashlib
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.code.templates import template_of
from autotune.errors import SpaceError
from autotune.space.space import Config, Space
from autotune.values.device import Device
from autotune.values.measurement import Launch
from autotune.values.problem import Problem


@dataclass(frozen=True)
class Source:
    """A rendered kernel, ready to compile.

    Attributes:
        family: The template's stem.
        config: The choices it was rendered from.
        problem: What it computes.
        text: CUDA C++.
        entry: Name of the kernel.
        launch: Grid, block and dynamic shared memory.
        code_digest: SHA-256 of the text without comments: it decides whether a record still fits this code.
        template_digest: SHA-256 of the template and every file that it could load.
        space_digest: `Space.digest`.
    """

    family: str
    config: Config
    problem: Problem
    text: str
    entry: str
    launch: Launch
    code_digest: str
    template_digest: str
    space_digest: str


def render(space: Space, config: Config, problem: Problem, device: Device) -> Source:
    """Render the space's template for one config; the same input always gives the same text.

    Raises:
        ConfigError: The config breaks a constraint on this device.
        SpaceError: The space's template is missing or does not render.
    """
    import jinja2

    space.require_legal(config, problem, device)
    template = template_of(space)
    names: dict[str, Any] = {**space.values(config, problem, device), "layout": problem.layout}
    names |= {"family": space.family, "config_id": config.id, "template_digest": template.digest[:16]}
    try:
        text = template.jinja.render(names)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        place = _place(error, template.files[template.name][0])
        raise SpaceError(f"{place}: does not render ({_message(error)})") from error
    grid, threads, shared_bytes, workspace_bytes = space.launch(config, problem, device)
    rows = space.block_y(config, problem, device)
    return Source(
        family=space.family,
        config=config,
        problem=problem,
        text=text,
        entry=space.family,
        launch=Launch((grid, 1, 1), (threads // rows, rows, 1), shared_bytes, workspace_bytes),
        code_digest=hashlib.sha256(code_of(text).encode()).hexdigest(),
        template_digest=template.digest,
        space_digest=space.digest,
    )


def template_digest(space: Space) -> str:
    """Hash the space's template and every file that it could load.

    Raises:
        SpaceError: There is no template, or a file of it cannot be read.
    """
    return template_of(space).digest


def _place(error: Exception, template: Path) -> str:
    """Name the template and line that an error comes from."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.endswith(".jinja"):
            return f"{frame.filename}: line {frame.lineno}"
    file, line = getattr(error, "filename", None), getattr(error, "lineno", None)
    return f"{file or template}: line {line}" if line else str(template)


def _message(error: Exception) -> str:
    return str(getattr(error, "message", None) or error)


def code_of(text: str) -> str:
    """Drop comments, trailing blanks and empty lines; what looks like a comment in a string stays."""
    bare = re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', r"\1", text, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())
