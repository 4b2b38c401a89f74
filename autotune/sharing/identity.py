"""The name of a shared study, and the identity that all its processes must agree on."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.errors import UsageError
from autotune.outside import printable
from autotune.records.trials import TrialHeader
from autotune.sharing.study import SharedStudy
from autotune.values import typed

if TYPE_CHECKING:
    from autotune.space.space import Legal

IDENTITY = "autotune"  # attribute of the study
WAIT_S = 5.0  # longest wait for the process that created a study to write its identity


def identity_of(header: TrialHeader, legal: Legal) -> dict[str, Any]:
    """Return what must be the same in all processes of a study, as plain JSON values.

    The driver is left out: hosts of one cluster may have different drivers, and their times do not differ.
    """
    head = [list(legal.names), [list(legal.choices[name]) for name in legal.names]]
    points = hashlib.sha256(json.dumps(head).encode() + legal.ordinals.tobytes()).hexdigest()
    plain = json.loads(json.dumps(typed.plain(replace(header, driver=None))))
    del plain["schema"], plain["driver"]
    return {**plain, "points": points}


def study_name(header: TrialHeader, what: dict[str, Any], name: str | None) -> str:
    """Return the name of a study: the user's name and the family, or one made from its identity."""
    if name is not None:
        return f"{name}_{header.family}"
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    return f"{header.family}_{header.problem.key}_{header.device.slug}_{digest}"


def process_name() -> str:
    """Return the name of this process: host, process id and a random word."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def agree(study: SharedStudy, what: dict[str, Any]) -> None:
    """Write the identity of a study that this process created; otherwise check that it is the same.

    Raises:
        UsageError: It differs.
        StorageLost: The storage does not answer.
    """
    if study.created:
        study.set_attribute(IDENTITY, what)
        return
    deadline = time.monotonic() + WAIT_S
    while (found := study.attributes().get(IDENTITY)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if found is None:  # the process that created it died at once, or it is not of autotune
        if study.changes():
            raise UsageError(
                f"study {study.name!r} in {study.url} was not made by autotune: give another --study"
            )
        study.set_attribute(IDENTITY, what)
    elif found != what:
        raise UsageError(
            f"study {study.name!r} in {study.url} is about something else: {_difference(found, what)}; "
            "give another --study, or none"
        )


def _difference(there: Any, here: Any) -> str:
    """Return the first difference between two identities."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return f"is {printable(str(there), 80)} there and {printable(str(here), 80)} here"
    key = next(key for key in {**here, **there} if there.get(key) != here.get(key))
    return f"{printable(key, 80)} {_difference(there.get(key), here.get(key))}"
