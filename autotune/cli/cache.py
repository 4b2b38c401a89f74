"""``autotune cache``: the stored records, listed, proved anew, pruned, handed on and taken in."""

from __future__ import annotations

import fnmatch
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import Wanted, cache_option, json_option, wanted_options
from autotune.cli.show import command as show
from autotune.errors import ConfigError, DeviceError, RecordError, RecordMissing, SpaceError
from autotune.outside import printable

if TYPE_CHECKING:
    from autotune.records import Entry, Record, Store
    from autotune.tuning.audit import Finding

# What `prune` can remove: option, patterns of names in a device's folder and its estimated/, what it is.
PRUNABLE = {
    "bad": ("*.bad", "records that were broken or failed, set aside"),
    "displaced": ("*.displaced*", "records that imported ones took the place of"),
    "old": ("*.old*.trials.jsonl", "trials of earlier code or devices"),
    "trials": ("*.trials.jsonl", "trials, from which a search resumes; not those of one that runs"),
    "tmp": (".*.tmp", "files of writers that died"),
    "estimated": ("estimated/*.json", "records that nobody measured"),
    "compiled": ("compiled/*", "machine code and sources, which can be compiled again"),
}
TMP_AGE_S = 600.0  # a younger temporary file may still have a writer


@click.group()
def command() -> None:
    """Look after the stored records: list, show, verify, prune, export, import, path."""


command.add_command(show, "show")


# --- path -------------------------------------------------------------------------------------------------


@command.command("path")
@cache_option
@json_option
def path_command(store: Store, as_json: bool) -> None:
    """Print the folder of records, and what else kernels are served from."""
    own, shipped, depot = store.root, store.shipped, store.depot
    if as_json:
        parts = {"records": own, "shipped": shipped, "compiled": depot.folder}
        click.echo(
            json.dumps({name: None if path is None else str(path) for name, path in parts.items()}, indent=2)
        )
        return
    click.echo(own)
    if shipped is not None:
        click.echo(f"beneath it lie the records that came with the package: {shipped}", err=True)
    size = sum(facts.st_size for _, facts in depot.entries())
    limit = f"{depot.limit_bytes >> 20} MiB"
    click.echo(f"compiled kernels: {depot.folder}, {_mebibytes(size)} of at most {limit}", err=True)


# --- list -------------------------------------------------------------------------------------------------


@command.command("list")
@cache_option
@json_option
def list_command(store: Store, as_json: bool) -> None:
    """List the records, those of the package too, and say which no longer describe their code."""
    from autotune.cli.tables import Table

    found = [(entry, _state(entry, store)) for entry in _entries(store)]
    if as_json:
        click.echo(json.dumps([_row(entry, state) for entry, state in found], indent=2))
        return
    if not found:
        click.echo(f"{store.root} holds no records: run 'autotune tune --m 4096 --n 4096 --k 4096'", err=True)
        return
    table = Table(
        ("device", "family", "problem", "ms", "TFLOP/s", "vs cuBLAS", "state", "created"),
        drop=("created", "TFLOP/s", "vs cuBLAS", "family", "device"),
        wrap=("state",),
        right=("ms", "TFLOP/s", "vs cuBLAS"),
    )
    for entry, state in found:
        record = entry.record
        table.add_row(
            record.device.name,
            record.family,
            str(record.problem),
            f"{record.timing.median_ms:.5g}" if record.timing else "-",
            f"{record.gflops / 1000:.2f}" if record.gflops else "-",
            f"{record.vs_cublas:.3f}" if record.vs_cublas else "-",
            state,
            record.created[:10],
        )
    table.echo()


def _state(entry: Entry, store: Store) -> str:
    """Return in a word or two whether a record can serve."""
    from autotune.tuning.audit import staleness

    words = ["shipped"] if entry.shipped else ["imported"] if entry.record.imported else []
    if entry.record.evidence == "estimated":
        words.append("estimated")
    try:
        words += ["stale"] if staleness(entry.record, store.depot) else []
    except SpaceError:
        words.append("of your own family")
    return ", ".join(words) or "serves"


def _row(entry: Entry, state: str) -> dict[str, Any]:
    record = entry.record
    return {
        "path": str(entry.path),
        "device": record.device.name,
        "family": record.family,
        "problem": vars(record.problem),
        "evidence": record.evidence,
        "median_ms": record.timing.median_ms if record.timing else None,
        "vs_cublas": record.vs_cublas,
        "state": state,
        "created": record.created,
    }


# --- verify -----------------------------------------------------------------------------------------------


@command.command("verify")
@wanted_options
@click.option("--device", "ordinal", type=int, help="CUDA ordinal of a GPU here.")
@click.option(
    "--tolerance", type=click.FloatRange(0, 1), help="Share by which a time may differ; default 0.05."
)
@click.option("--shipped", is_flag=True, help="Those of the package too; what changed is stored as your own.")
@click.option("--dry-run", is_flag=True, help="Change no file.")
@cache_option
@json_option
def verify_command(
    wanted: Wanted,
    ordinal: int | None,
    tolerance: float | None,
    shipped: bool,
    dry_run: bool,
    store: Store,
    as_json: bool,
) -> None:
    """Prove and time the records of this machine's GPU anew, without a search.

    A record whose code or time changed is written anew; one whose kernel fails is set aside as .bad, unless a
    finalist of its search can take its place. Records of other GPUs are only read and rendered. Exit code 1
    when something failed or could not be read.
    """
    from autotune.cli.watchers import meter
    from autotune.tuning.audit import TOLERANCE, OneWorker, audit, compile_ahead
    from autotune.values.device import current_device

    broken: list[str] = []
    entries = [
        entry
        for entry in _entries(store, broken)
        if entry.record.timing and entry.shipped <= shipped and wanted.takes(entry.record.problem)
    ]
    problem = wanted.problem
    if problem is not None and not entries and not broken:
        raise RecordMissing(
            f"{store.root} holds no record of {problem}: run 'autotune tune {problem.cli_flags()}'"
        )
    try:
        device = current_device(ordinal or 0)
    except DeviceError as error:
        if ordinal is not None:
            raise
        device = None
        click.echo(f"nothing is timed: {error}", err=True)
    rows, failures = [], len(broken)
    here = {
        entry.path: entry.record for entry in entries if device is not None and _is_of(entry.record, device)
    }
    if device is not None:
        with meter() as line:
            compile_ahead(here.values(), device, store.depot, line)
    with OneWorker(ordinal or 0) as workers:
        for entry in entries:
            state: str
            try:
                if entry.path in here:
                    finding = audit(
                        entry.record,
                        workers,
                        store.depot,
                        tolerance=TOLERANCE if tolerance is None else tolerance,
                    )
                    state, why = finding.state, finding.why
                    failures += state == "failed"
                    done = "" if dry_run else _act(entry, finding, store)
                    row = {"before_ms": finding.before_ms, "now_ms": finding.now_ms, "done": done}
                else:
                    state, why, done, row = *_read_only(entry, store), "", {}
            except SpaceError as error:
                state, why, done, row = "unknown", str(error), "", {}
            rows.append({"path": str(entry.path), "state": state, "why": why, **row})
            if not as_json:
                told = "; ".join(part for part in (why, done) if part)
                name = printable(f"{entry.path.parent.name}/{entry.path.name}")
                click.echo(f"{state:<8} {name}{f': {told}' if told else ''}")
    if as_json:
        rows += [{"path": None, "state": "broken", "why": why} for why in broken]
        click.echo(json.dumps(rows, indent=2))
    if failures:
        sys.exit(1)


def _read_only(entry: Entry, store: Store) -> tuple[str, str]:
    """Return what holds of a record whose GPU is not here."""
    from autotune.tuning.audit import staleness

    why = staleness(entry.record, store.depot)
    return ("stale", why) if why else ("read", f"not timed: made on {entry.record.device.name}")


def _act(entry: Entry, finding: Finding, store: Store) -> str:
    """Write what was found; return what was done, in words."""
    if finding.renewed is None:
        if entry.shipped:
            return f"run 'autotune tune {entry.record.problem.cli_flags()}'"
        return f"renamed to {store.set_aside(entry.path).name}"
    if finding.renewed is entry.record:
        return ""
    store.offer(finding.renewed, over=entry.record)
    return "stored as your own" if entry.shipped else "written anew"


def _is_of(record: Record, device: Any) -> bool:
    ours = (device.slug, device.compute_capability, device.sm_count)
    return ours == (record.device.slug, record.device.compute_capability, record.device.sm_count)


# --- prune ------------------------------------------------------------------------------------------------


def _prunable_options(function: Callable[..., None]) -> Callable[..., None]:
    for name, (_, meaning) in reversed(PRUNABLE.items()):
        function = click.option(f"--{name}", is_flag=True, help=f"{meaning[0].upper()}{meaning[1:]}.")(
            function
        )
    return function


@command.command("prune")
@_prunable_options
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@cache_option
@json_option
def prune_command(store: Store, dry_run: bool, as_json: bool, **chosen: bool) -> None:
    """Remove what the options name; without any, say what there is.

    Links are not followed, and logs of searches that still run are left alone. Exit code 1 when something
    could not be removed.
    """
    asked = [name for name in PRUNABLE if chosen[name]]
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name, (_, meaning) in PRUNABLE.items():
        if asked and name not in asked:
            continue
        files = _prunable(store, name)
        removing, count, size = name in asked and not dry_run, 0, 0
        for path, facts in files:
            why = _removed(path) if removing else None
            if why is not None:
                failed.append(why)
            else:
                count, size = count + 1, size + facts.st_size
        rows.append({"what": name, "meaning": meaning, "files": count, "bytes": size, "removed": removing})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            did = "removed" if row["removed"] else "would go" if asked else f"--{row['what']}"
            click.echo(f"{did:<12} {row['files']:6} files, {_mebibytes(row['bytes']):>11}: {row['meaning']}")
    for why in failed:
        click.echo(f"autotune: {why}", err=True)
    if failed:
        sys.exit(1)


def _prunable(store: Store, name: str) -> list[tuple[Path, os.stat_result]]:
    """List the files of one kind; without those that may still have a writer, and through no link."""
    from autotune.records import locks

    pattern, _ = PRUNABLE[name]
    homes = [path for path in _listed(store.root) if path.is_dir() and not path.is_symlink()]
    if name == "compiled":
        folders, pattern = [path for path in homes if path.name == "compiled"], "*"
    elif name == "estimated":
        folders, pattern = [path / "estimated" for path in homes], "*.json"
    else:
        folders = [*homes, *(path / "estimated" for path in homes)]
    found = []
    for path in (path for folder in folders if not folder.is_symlink() for path in _listed(folder)):
        try:
            facts = path.lstat()
        except OSError:
            continue
        busy = (name == "tmp" and time.time() - facts.st_mtime < TMP_AGE_S) or (
            name in ("old", "trials") and locks.lives(path)
        )
        if fnmatch.fnmatch(path.name, pattern) and not stat.S_ISDIR(facts.st_mode) and not busy:
            found.append((path, facts))
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RecordError(f"{folder} cannot be read: {error.strerror}") from None


def _removed(path: Path) -> str | None:
    """Remove a file; return why that failed, None if it did not."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        return f"{path} cannot be removed: {error.strerror}"
    return None


# --- export, import ---------------------------------------------------------------------------------------


@command.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@wanted_options
@click.option("--estimated", is_flag=True, help="Those that nobody measured too.")
@cache_option
@json_option
def export_command(file: Path, wanted: Wanted, estimated: bool, store: Store, as_json: bool) -> None:
    """Write the records into FILE, whose name ends in .tar.gz or .jsonl."""
    from autotune.records.archive import write_archive

    found = [
        entry.record
        for entry in _entries(store)
        if not entry.shadowed
        and wanted.takes(entry.record.problem)
        and (estimated or entry.record.evidence == "measured")
    ]
    if not found:
        raise RecordMissing(f"{store.root} holds no record{wanted} to export")
    count = write_archive(found, file)
    click.echo(json.dumps({"file": str(file), "records": count}) if as_json else f"{count} records in {file}")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@cache_option
@json_option
def import_command(file: Path, store: Store, as_json: bool) -> None:
    """Take the records of FILE in; of two for one problem and device the better one is kept.

    Each record is checked as if it were read; its kernel is not run: 'autotune cache verify' does that. One
    that is taken is marked as imported, and what it takes the place of is kept as .displaced. Exit code 1
    when one of them is broken, or its config is none of its family.
    """
    from autotune.records.archive import read_archive

    rows = []
    for found in read_archive(file):
        if isinstance(found, RecordError):
            rows.append({"state": "broken", "what": str(found)})
            click.echo(f"autotune: {found}", err=True)
            continue
        state, more = _taken_in(found, store)
        what = f"{found.device.name}, {found.family}, {found.problem}"
        rows.append({"state": state, "what": what, "why": more})
        if state == "refused":
            click.echo(f"autotune: {found.family}, {found.problem}: {more}", err=True)
        if not as_json:
            click.echo(f"{state:<8} {what}{more if state == 'taken' else ''}")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    if any(row["state"] in ("broken", "refused") for row in rows):
        sys.exit(1)


def _taken_in(record: Record, store: Store) -> tuple[str, str]:
    """Store an imported record if it is better than what is there; return what became of it, and more."""
    from autotune.space.space import Space
    from autotune.tuning.audit import staleness

    def stale(each: Record) -> bool:
        return staleness(each, store.depot) is not None

    own = False
    try:
        Space.load(record.family).config(record.config)
    except ConfigError as error:
        return "refused", str(error)
    except SpaceError:  # a family of the user's own
        own = True
    state, kept = store.take_in(record, stale=None if own else stale)
    return state, f", in place of {kept.name}" if kept is not None else ""


# --- all --------------------------------------------------------------------------------------------------


def _entries(store: Store, broken: list[str] | None = None) -> Iterator[Entry]:
    """Read every record file; one that cannot be read is told on stderr, by file and place."""

    def refused(error: RecordError) -> None:
        click.echo(f"autotune: {error}", err=True)
        if broken is not None:
            broken.append(str(error))

    return store.entries(refused, shadowed=True)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
