"""`Store`: where records are looked up, the user's folder above the shipped one, and written."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.code.depot import Depot
from autotune.errors import RecordError, UsageError
from autotune.outside import read_bytes
from autotune.paths import NOWHERE, cache_dir, data_dir, write_file
from autotune.records.files import (
    LEARNED,
    MOST_BYTES,
    Filed,
    content_of,
    decoded,
    filed,
    from_json,
    now,
    path_within,
    read,
    to_json,
    unwritable,
)
from autotune.records.locks import take
from autotune.records.schema import Record, RecordedDevice, identity_of
from autotune.records.trials import read_header
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
        depot_bytes: As for `Depot`; 0 for a look that leaves nothing behind.

    Raises:
        UsageError: The root is no path.

    Attributes:
        root: The user's folder.
        shipped: The folder that came with the package; None where that is the user's own.
    """

    def __init__(self, root: Path | str | None = None, *, depot_bytes: int | None = None) -> None:
        self.root = cache_dir() if root is None else _named(root)
        self._depot_bytes = depot_bytes
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
        return Depot(self.root, self._depot_bytes)

    # --- look-up ---

    def path(
        self, device: Device | RecordedDevice, family: str, problem: Problem, *, estimated: bool = False
    ) -> Path:
        """Return the user's file of one device, family and problem, whether it exists or not.

        It lies in a folder with the GPU's name. Where that is of a GPU of this name with another number of
        SMs, or another compute capability, it lies in one that has the number of SMs in its name too.
        """
        within = path_within(device, family, problem, estimated=estimated)
        return self.home(device) / within.relative_to(device.slug)

    def home(self, device: Device | RecordedDevice) -> Path:
        """Return the user's folder of one device, whether it exists or not."""
        plain, apart = (self.root / name for name in _homes(device))
        return apart if apart.is_dir() or not _is_home(plain, device) else plain

    def beside(self, device: Device | RecordedDevice, name: str) -> list[Path]:
        """List the files of a name that lie beside the records of one device, the user's own first."""
        paths = (folder / home / name for folder in self.folders for home in _homes(device))
        return [path for path in paths if os.path.isfile(path)]  # False in a closed folder

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
        within = path_within(device, family, problem, estimated=estimated).relative_to(device.slug)
        for home in _homes(device):
            record = _sound(folder / home / within)
            if record is not None and identity_of(record.device) == identity_of(device):
                return record
        return None

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

    def filed(self, device: Device | RecordedDevice | None = None) -> list[Filed]:
        """List the measured records of one device, or of all, by their names, the user's own first."""
        slugs = [_folders(folder) if device is None else _homes(device) for folder in self.folders]
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
        return _sound(file.path)

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
            for path in _files(folder, name, refused):
                if path.name == LEARNED:
                    continue
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
                write_file(path, text, own=True)
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
                write_file(path, text, own=True)
        except OSError as error:
            raise unwritable(path, error) from None
        return from_json(text, path)

    def take_in(
        self, record: Record, *, stale: Callable[[Record], bool] | None = None
    ) -> tuple[str, Path | None]:
        """Store a record that came from elsewhere, marked as such, if it is better than what is here.

        Args:
            record: As it was read.
            stale: As for `offer`.

        Returns:
            "taken", "same" or "kept ours"; and where the user's record is kept that it took the place of.

        Raises:
            RecordError: As for `offer`.
        """
        estimated = record.evidence == "estimated"
        ours = self.find(record.device, record.family, record.problem, estimated=estimated)
        if ours is not None and replace(ours, imported=record.imported) == record:
            return "same", None
        marked = replace(record, imported=now())
        if ours is not None and (estimated or _stays(ours, marked, stale or _of_other_templates(record))):
            return "kept ours", None
        path = self._path_of(record)
        kept = None
        if path.exists():
            names = (path.with_name(f"{path.name}.displaced{n if n > 1 else ''}") for n in itertools.count(1))
            kept = next(name for name in names if not name.exists())
        try:
            if kept is not None:
                write_file(kept, read_bytes(path, MOST_BYTES), own=True)
        except OSError as error:
            raise unwritable(path, error) from None
        if estimated:
            self.write(marked)
        return (
            ("taken", kept) if estimated or self.offer(marked, over=ours) == marked else ("kept ours", None)
        )

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
            write_file(probe, "", own=True)
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from None

    def _path_of(self, record: Record) -> Path:
        estimated = record.evidence == "estimated"
        return self.path(record.device, record.family, record.problem, estimated=estimated)


def _sound(path: Path) -> Record | None:
    """Return the record of a file if there is one and it belongs where it lies, else warn."""
    content = content_of(path)
    if content is None:
        return None
    try:
        record = decoded(content, path)
        estimated = record.evidence == "estimated"
        within = path_within(record.device, record.family, record.problem, estimated=estimated)
        places = [Path(home, within.relative_to(record.device.slug)) for home in _homes(record.device)]
        if not any(path.parts[-len(place.parts) :] == place.parts for place in places):
            raise RecordError(f"{path}: its content belongs in {places[0]}")
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
    if not path or "\0" in path or _too_long(path):
        raise UsageError(
            f"root {root!r:.60} is not the path of a folder: give one, or None for the usual one"
        )
    return Path(path)


def _too_long(path: str) -> bool:
    """Return whether a path, or a name in it, is longer than this machine's files can have."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False


def _homes(device: Device | RecordedDevice) -> tuple[str, str]:
    """Return the folders that may hold what is of a device: its name alone, and with its SM count."""
    return device.slug, f"{device.slug}_{device.sm_count}SM"


def _is_home(folder: Path, device: Device | RecordedDevice) -> bool:
    """Return whether a folder holds records or logs of this very device, or none at all."""
    for file in [*filed(folder), *filed(folder / "estimated")]:
        with suppress(RecordError):
            return identity_of(read(file.path).device) == identity_of(device)
    for log in sorted(folder.glob("**/*.trials.jsonl")):
        with suppress(RecordError):
            return identity_of(read_header(log).device) == identity_of(device)
    return True


def _folders(root: Path) -> list[str]:
    with suppress(OSError):
        return sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return []


def _files(root: Path, pattern: str, refused: Callable[[RecordError], None]) -> Iterator[Path]:
    """Yield the record files of a folder, measured ones first; what cannot be listed is refused."""

    def listed(folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            if (
                isinstance(error, NotADirectoryError) and folder != root
            ):  # a file beside the folders of devices
                return []
            if folder.parent not in closed:
                refused(RecordError(f"{folder} cannot be read: {error.strerror}"))
            closed.add(folder)
            return []

    closed: set[Path] = set()
    homes = [root / name for name in listed(root)]
    for folder in [*homes, *(home / "estimated" for home in homes)]:
        for name in fnmatch.filter(listed(folder), pattern):
            yield folder / name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder, created if needed, against every other process and thread that changes its records."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        take(descriptor, folder)
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
    if stored.imported and not new.imported:  # nobody here saw it
        return False
    if stale(stored) != stale(new):
        return stale(new)
    return stored.timing.median_ms <= new.timing.median_ms


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
