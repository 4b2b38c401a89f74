"""Render a config and a problem as CUDA source."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.code.sandbox import limited
from autotune.code.templates import Template, template_of
from autotune.errors import SpaceError
from autotune.space.space import Config, Space
from autotune.space.statements import TEMPLATE_NAMES
from autotune.values.device import Device
from autotune.values.digest import digest_of
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
        entry: Name of the kernel that computes the product.
        launch: What is launched, and how.
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

    @classmethod
    def of_file(cls, path: Path, facts: Mapping[str, int], problem: Problem, launch: Launch) -> Source:
        """Return a kernel of our own that is no family's: a file behind the constants that it names."""
        constants = "".join(f"constexpr long long {name} = {value};\n" for name, value in facts.items())
        text = constants + path.read_text(encoding="utf-8")
        digest, entry = hashlib.sha256(text.encode()).hexdigest(), launch.kernels[-1].entry
        return cls(path.stem, Config({}), problem, text, entry, launch, *(digest,) * 3)


def render(
    space: Space, config: Config, problem: Problem, device: Device, gate: tuple[str, str] = ("", "")
) -> Source:
    """Render the space's template for one config; the same input always gives the same text.

    Args:
        space: The config's family.
        config: The choices.
        problem: What is computed.
        device: Where.
        gate: As the fallback of another kernel: `Space.gate`.

    Raises:
        ConfigError: The config breaks a constraint on this device.
        SpaceError: The space's template is missing or does not render.
    """
    space.require_legal(config, problem, device)
    template, digest = template_of(space), template_digest(space)
    names: dict[str, Any] = {**space.values(config, problem, device), "layout": problem.layout}
    names |= {"family": space.family, "config_id": config.id, "template_digest": digest[:16]}
    names["gate"], names["gate_parameters"] = gate
    fallback = space.fallback(problem, device)
    if fallback is not None:
        left = render(*fallback, gate=space.gate(config, problem, device))
        names["fallback"] = (
            f"namespace fallback {{\n{left.text}}}  // namespace fallback\n\nusing fallback::{left.entry};"
        )
    try:
        with limited():
            text = template.jinja.render(names)
    except Exception as error:  # whatever a template does wrong is its fault, and of this config alone
        raise SpaceError(f"{_place(error, template)}: does not render ({_message(error)})") from error
    return Source(
        family=space.family,
        config=config,
        problem=problem,
        text=text,
        entry=space.family,
        launch=space.launch(config, problem, device),
        code_digest=hashlib.sha256(code_of(text).encode()).hexdigest(),
        template_digest=digest,
        space_digest=space.digest,
    )


def require_template(space: Space, config: Config, problem: Problem, device: Device) -> None:
    """Refuse a template that does not parse, or names what no config gives it, in it or a file that it names.

    Raises:
        SpaceError: It is so; with the file and line.
    """
    template = template_of(space)
    known = {*space.values(config, problem, device), *TEMPLATE_NAMES}
    try:
        unknown = template.unknown_name(known)
    except Exception as error:
        raise SpaceError(f"{_place(error, template)}: does not parse ({_message(error)})") from error
    if unknown:
        place, line, name = unknown
        raise SpaceError(f"{place}: line {line}: {name!r} is no parameter, quantity or name of a template")


def template_digest(space: Space) -> str:
    """Hash the space's template and every file that it could load, and that of its fallback.

    Raises:
        SpaceError: There is no template, or a file of it cannot be read.
    """
    own, fallback = template_of(space).digest, space.fallback_space
    return own if fallback is None else digest_of(own, template_digest(fallback))


def _place(error: Exception, template: Template) -> str:
    """Name the template and line that an error comes from."""
    places = {str(place) for place, _ in template.files.values()}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename in places:
            return f"{frame.f_code.co_filename}: line {line}"
    file, line_stated = getattr(error, "filename", None), getattr(error, "lineno", None)
    place = file if file in places else template.files[template.name][0]
    return f"{place}: line {line_stated}" if line_stated else str(place)


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, RecursionError):
        return "its files, macros or expressions are nested too deeply"
    return " ".join(str(getattr(error, "message", None) or error or type(error).__name__).split())[:300]


def code_of(text: str) -> str:
    """Drop comments, trailing blanks and empty lines; what looks like a comment in a string stays."""
    bare = re.sub(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', r"\1", text, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())
