"""Render each source once, and keep it on disk.

Rendering is pure, so its outcome is kept under the SHA-256 of everything it depends on: the text of the
template, of every file it could load and of the space file, the config, the problem, the device, and the code
of this package that renders. A process that finds its source needs no Jinja2, and no parsed space.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from autotune.code.depot import Depot, depot_key
from autotune.code.render import Source, render, template_digest
from autotune.space.space import Config, Space
from autotune.space.statements import Value
from autotune.values import typed
from autotune.values.device import Device
from autotune.values.measurement import Launch
from autotune.values.problem import Problem

_RENDERING = (
    *("code/render.py", "code/templates.py", "code/sandbox.py", "space/space.py", "space/file.py"),
    *("space/statements.py", "space/expression.py"),
    *("values/problem.py", "values/device.py", "values/measurement.py", "values/limits.py"),
    "values/digest.py",
)


def rendered(
    space: Space, values: Mapping[str, Value], problem: Problem, device: Device, *, depot: Depot
) -> Source:
    """Render as `autotune.code.render.render` does, or read what it returned before.

    Args:
        space: The family.
        values: Of a config of that space.
        problem: What is computed.
        device: Where.
        depot: Where it is kept.

    Raises:
        ConfigError: The values are no config of the space, or break a constraint on this device.
        SpaceError: The space's template is missing or does not render.
    """
    digest = template_digest(space)
    key = _key(space, values, problem, device, digest)
    content = depot.get(key)
    if content is not None:
        facts = json.loads(content)
        launch, config = facts.pop("launch"), facts.pop("config")
        return Source(
            **facts,
            config=Config(config),
            problem=problem,
            launch=typed.build(Launch, launch, key),
            template_digest=digest,
        )
    source = render(space, space.config(values), problem, device)
    names = ("family", "text", "entry", "code_digest", "space_digest")
    facts = {name: getattr(source, name) for name in names}
    facts |= {"config": dict(source.config), "launch": typed.plain(source.launch)}
    depot.put(key, json.dumps(facts).encode())
    return source


def _key(space: Space, values: Mapping[str, Value], problem: Problem, device: Device, digest: str) -> str:
    parts = (
        _code_digest(),
        digest,
        space.family,
        space.content_digest,
        repr(sorted(values.items())),
        repr(problem),
        repr(device),
    )
    return depot_key("source", parts)


@cache
def _code_digest() -> str:
    """Hash the code that renders: a development tree may change without a new version."""
    here = Path(__file__).parents[1]
    return hashlib.sha256(b"\0".join((here / name).read_bytes() for name in _RENDERING)).hexdigest()
