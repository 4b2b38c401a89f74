"""`Store`: where records are looked up, the user's folder above the shipped one, and written."""

from __future__ import annotations

import fcntl
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.code.depot import Depot
from autotune.errors import RecordError, UsageError
from autotune.paths import NOWHERE, cache_dir, data_dir, write_file
from autotune.records.files import (
    Filed,
    content_of,
    decoded,
    filed,
    from_json,
    path_within,
    read,
    to_json,
    unwritable,
)
from autotune.records.schema import Record, RecordedDevice
from autotune.values import typed
from autotune.values.device import Device
from autotune.values.lazy import cached_property
from autotune.values.problem import Problem


@dataclass(frozen=True)
class Entry:
    """A record file that could be read.

    Attributes:
        path: Where it is.
        record: What it holds.
        shipped: It came with the package.
        shadowed: The user has a record of the same device, family and problem.
    """

    path: Path
    record: Record
    shipped: bool
    shadowed: bool


class Store:
    """The records of a folder of the user's, and beneath them those that came with the package.

    Only the user's folder is ever written.

    Args:
        root: The user's folder, in which ``~`` is their home; `autotune.paths.cache_dir` when not given.

    Raises:
        UsageError: The root is no path.

    Attributes:
        root: The user's folder.
        shipped: The folder that came with the package; None where that is the user's own.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = cache_dir() if root is None else _named(root)
        shipped = data_dir("cache")
        self.shipped = shipped if shipped.is_dir() and not _same(self.root, shipped) else None

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that are looked into, the user's own first if there can be one."""
        own = () if self.root == NOWHERE else (self.root,)
        return own if self.shipped is None else (*own, self.shipped)

    @cached_property
    def depot(self) -> Depot:
        """What was compiled and rendered for these records.

        Raises:
            UsageError: ``AUTOTUNE_COMPILED_MIB`` is no number.
        """
        return Depot(self.root)

    # --- look-up ---

    def path(
        self, device: Device | RecordedDevice, family: str, problem: Problem, *, estimated: bool = False
    ) -> Path:
        """Return the user's file of one device, family and problem, whether it exists or not."""
        return self.root / path_within(device, family, problem, estimated=estimated)

    def find(
        self, device: Device | RecordedDevice, family: str, problem: Problem, *, estimated: bool = False
    ) -> Record | None:
        """Return the record of exactly this device, family and problem, the user's own, else the shipped one.

        A broken file, or one whose content belongs elsewhere, counts as missing, with a warning.

        Raises:
            RecordError: The file is of a newer schema, or cannot be opened.
        """
        found = (
            self.find_in(folder, device, family, problem, estimated=estimated) for folder in self.folders
        )
        return next((record for record in found if record is not None), None)

    def find_in(
        self,
        folder: Path,
        device: Device | RecordedDevice,
        family: str,
        problem: Problem,
        *,
        estimated: bool = False,
    ) -> Record | None:
        """Return the record of one of the `folders` alone: see `find`."""

        def belongs(record: Record) -> Path:
            is_estimated = record.evidence == "estimated"
            return folder / path_within(device, record.family, record.problem, estimated=is_estimated)

        return _sound(folder / path_within(device, family, problem, estimated=estimated), belongs)

    def best(
        self,
        device: Device | RecordedDevice,
        families: Iterable[str],
        problem: Problem,
        *,
        estimated: bool = False,
    ) -> Record | None:
        """Return the fastest record of a problem among those of some families, or the newest estimated one.

        Raises:
            RecordError: As for `find`.
        """
        found = (self.find(device, family, problem, estimated=estimated) for family in families)
        records = [record for record in found if record is not None]
        if estimated:
            return max(records, key=lambda each: each.created, default=None)
        return min(records, key=lambda each: each.timing.median_ms if each.timing else math.inf, default=None)

    def filed(self, slug: str | None = None) -> list[Filed]:
        """List the measured records of one device, or of all, by their names, the user's own first."""
        slugs = [[slug] if slug is not None else _folders(folder) for folder in self.folders]
        return [
            file
            for folder, names in zip(self.folders, slugs, strict=True)
            for name in names
            for file in filed(folder / name)
        ]

    def look_at(self, file: Filed) -> Record | None:
        """Read a listed file; None when it is gone or broken, as for `find`.

        Raises:
            RecordError: The file is of a newer schema, or cannot be opened.
        """
        return _sound(
            file.path, lambda record: file.path.with_name(f"{record.family}_{record.problem.key}.json")
        )

    def entries(
        self, refused: Callable[[RecordError], None], *, name: str = "*.json", shadowed: bool = False
    ) -> Iterator[Entry]:
        """Read every record file, measured before estimated ones, the user's own before shipped ones.

        Args:
            refused: Told of each file that cannot be read, and why.
            name: Pattern of the file names to read.
            shadowed: Yield shipped records too in whose place the user has another.
        """
        own: set[Path] = set()
        for folder in self.folders:
            for path in [*sorted(folder.glob(f"*/{name}")), *sorted(folder.glob(f"*/estimated/{name}"))]:
                place, shipped = path.relative_to(folder), folder == self.shipped
                if place in own and not shadowed:
                    continue
                try:
                    record = read(path)
                except RecordError as error:
                    refused(error)
                    continue
                yield Entry(path, record, shipped, place in own)
                if not shipped:
                    own.add(place)

    # --- writing ---

    def write(self, record: Record) -> Path:
        """Store a record at its path; readers see the old file or the new one, never a part.

        Raises:
            RecordError: The record contradicts its own schema, or the folder cannot be written.
        """
        path, text = self._path_of(record), to_json(record)
        try:
            with _locked(path.parent):
                write_file(path, text)
        except OSError as error:
            raise unwritable(path, error) from None
        return path

    def offer(
        self,
        record: Record,
        *,
        over: Record | None = None,
        stale: Callable[[Record], bool] | None = None,
    ) -> Record:
        """Store a record unless a better one has been stored meanwhile; several processes may offer at once.

        Times of two sessions are compared only where there is no better way: ``over`` is what the caller
        found stored and measured again beside its own candidates, so the new record replaces it whatever it
        says. Another one, which the caller did not see, stays if it is measured on an equal device with the
        same state of L2, is not stale unless the new one is too, and is not slower.

        Args:
            record: To be stored.
            over: The record that was stored when the caller began, None for none.
            stale: Whether the config of a record no longer renders to its code; when not given, a record of
                other templates than ``record`` is stale.

        Returns:
            What is stored now: ``record`` as it reads back, or the one that stayed.

        Raises:
            RecordError: As for `write`, or a later version of this package wrote the stored record.
        """
        path, text = self._path_of(record), to_json(record)
        try:
            with _locked(path.parent):
                rival = _rival(path) or self.find(record.device, record.family, record.problem)
                stale = stale or _of_other_templates(record)
                if rival is not None and rival != over and _stays(rival, record, stale):
                    return rival
                write_file(path, text)
        except OSError as error:
            raise unwritable(path, error) from None
        return from_json(text, path)

    def set_aside(self, path: Path) -> Path:
        """Rename a record file of the user's to ``<name>.bad``, in place of one of that name.

        Returns:
            The new path.

        Raises:
            RecordError: It cannot be renamed.
        """
        bad = path.with_name(f"{path.name}.bad")
        try:
            with _locked(path.parent):
                os.replace(path, bad)
        except OSError as error:
            raise unwritable(path, error) from None
        return bad

    def check_writable(self) -> None:
        """Make sure that the folder can take records, before a long run starts; it is created if needed.

        Raises:
            RecordError: It cannot, with the remedy.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".writable-{os.getpid()}.tmp"
            write_file(probe, "")
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from None

    def _path_of(self, record: Record) -> Path:
        estimated = record.evidence == "estimated"
        return self.path(record.device, record.family, record.problem, estimated=estimated)


def _sound(path: Path, belongs: Callable[[Record], Path]) -> Record | None:
    """Read a file if it exists and holds a record that belongs where it lies, else warn."""
    content = content_of(path)
    if content is None:
        return None
    try:
        record = decoded(content, path)
        if belongs(record) != path:
            raise RecordError(f"{path}: its content belongs in {belongs(record)}")
    except typed.NewerSchemaError:
        raise
    except RecordError as error:
        warnings.warn(f"record ignored: {error}", stacklevel=4)
        return None
    return record


def _named(root: object) -> Path:
    """Return the folder that the user named."""
    try:
        path = os.path.expanduser(os.fsdecode(root))  # type: ignore[arg-type]  # that is what is found out
    except TypeError:
        path = ""
    if not path or "\0" in path:
        raise UsageError(
            f"root {root!r:.60} is not the path of a folder: give one, or None for the usual one"
        )
    return Path(path)


def _folders(root: Path) -> list[str]:
    with suppress(OSError):
        return sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return []


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder, created if needed, against every other process and thread that changes its records."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no locks: the last writer wins there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _rival(path: Path) -> Record | None:
    """Read what is stored, in a locked folder; a broken file is kept as ``<name>.bad``."""
    content = content_of(path)
    if content is None:
        return None
    try:
        return decoded(content, path)
    except typed.NewerSchemaError:
        raise
    except RecordError:
        os.replace(path, path.with_name(f"{path.name}.bad"))
        return None


def _of_other_templates(record: Record) -> Callable[[Record], bool]:
    return lambda each: each.template_digest != record.template_digest


def _stays(stored: Record, new: Record, stale: Callable[[Record], bool]) -> bool:
    if stored.timing is None or new.timing is None or stored.timing.l2 != new.timing.l2:
        return False
    if (stored.family, stored.problem, stored.device) != (new.family, new.problem, new.device):
        return False
    if stale(stored) != stale(new):
        return stale(new)
    return stored.timing.median_ms <= new.timing.median_ms


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
