"""Turns a config and a problem into CUDA source."""

from __future__ import annotations

import hashlib
import re
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import SpaceError
from autotune.paths import data_dir
from autotune.space.space import Config, Space
from autotune.values.device import Device
from autotune.values.measurement import Launch
from autotune.values.problem import Problem

if TYPE_CHECKING:
    import jinja2


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
        template_digest: SHA-256 of the template with its parts.
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
    folder = template_folder(space)
    name = f"{space.family}.cu.jinja"
    digest = template_digest(space)
    names: dict[str, Any] = {**space.values(config, problem, device), "layout": problem.layout}
    names |= {"family": space.family, "config_id": config.id, "template_digest": digest[:16]}
    try:
        text = environment(folder, data_dir("templates")).get_template(name).render(names)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise SpaceError(f"{_place(error, folder / name)}: does not render ({_message(error)})") from error
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
        template_digest=digest,
        space_digest=space.digest,
    )


def template_digest(space: Space) -> str:
    """Hash the space's template and every part it could include: those beside it and the built-in ones."""
    folder = template_folder(space)
    parts = {
        file.name: file
        for base in (data_dir("templates"), folder)
        for file in (base / "parts").glob("*.jinja")
    }
    files = (folder / f"{space.family}.cu.jinja", *(parts[name] for name in sorted(parts)))
    return _digest_of(files, tuple(file.stat().st_mtime_ns for file in files))


@cache
def _digest_of(files: tuple[Path, ...], _modified: tuple[int, ...]) -> str:
    return hashlib.sha256(
        b"\0".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)
    ).hexdigest()


def template_folder(space: Space) -> Path:
    """Find the family's template: beside its space file, in a ``templates`` folder next to that, or built in.

    Raises:
        SpaceError: There is none.
    """
    beside = space.path.resolve().parent
    folders = (beside, beside.parent / "templates", data_dir("templates"))
    for folder in folders:
        if (folder / f"{space.family}.cu.jinja").is_file():
            return folder
    raise SpaceError(
        f"{space.path.name}: no template {space.family}.cu.jinja in {', '.join(map(str, folders))}"
    )


@cache
def environment(*folders: Path) -> jinja2.Environment:
    """Return what renders templates of these folders, the first before the next."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="//%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


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
