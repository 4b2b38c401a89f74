"""``autotune export``: stored winners as files for C, C++ and whatever loads machine code."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import cache_option, device_of, target_options
from autotune.cli.shapes import shape_options, shapes_of
from autotune.errors import UsageError
from autotune.paths import write_file
from autotune.values.problem import Math, Problem

if TYPE_CHECKING:
    from autotune.records import Store

HEADER = "autotune_kernels.h"


@click.command()
@shape_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["cuda", "cubin", "header"]),
    default="cuda",
    show_default=True,
    help="cuda: a .cu per shape and a header; cubin: machine code, its launch as JSON; header: it alone.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder to write into; default: here.",
)
@click.option(
    "--any",
    "substitute",
    is_flag=True,
    help="Where a shape has no record, take what is predicted to be fastest.",
)
@target_options
@cache_option
def command(
    problem: Problem | None,
    suite: str | None,
    only: tuple[str, ...],
    maths: tuple[Math, ...],
    form: str,
    out: Path,
    substitute: bool,
    ordinal: int | None,
    target: str | None,
    store: Store,
) -> None:
    """Write stored winners as CUDA with a C launch function and a self-check, a C header, or machine code.

    The header declares every launch function and one that finds the kernel for a problem. The names of the
    files are printed. Needs no GPU with --target.
    """
    if len(maths) > 1:
        raise UsageError(f"a file holds kernels of one math: give --math {' or '.join(maths)}")
    problems = dict.fromkeys(shape.problem for shape in shapes_of(problem, suite, only, maths))
    from autotune.report.export import cubin_files, cuda_file, header_file, to_export

    device, note = device_of(ordinal, target)
    exports = [to_export(each, device, store, substitute=substitute) for each in problems]
    with _written_to(out):  # before anything is compiled
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    files: dict[str, bytes] = {}
    for each in exports:
        if form == "cuda":
            files[f"{each.name}.cu"] = cuda_file(each).encode()
        elif form == "cubin":
            code, launch = cubin_files(each, store.depot)
            files |= {f"{each.name}.cubin": code, f"{each.name}.json": launch.encode()}
    if form != "cubin":
        name = HEADER if suite is not None or len(exports) > 1 else f"{exports[0].name}.h"
        files[name] = header_file(exports, name).encode()
    for name, content in files.items():
        with _written_to(out):
            write_file(out / name, content)
        click.echo(str(out / name))
    for line in dict.fromkeys(filter(None, (note, *(each.choice.note for each in exports)))):
        click.echo(line, err=True)


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" {error.filename}" if error.filename not in (None, str(folder)) else ""
        raise UsageError(
            f"--out {folder} cannot be written ({error.strerror or error}{where}): give another folder"
        ) from None
