"""``autotune explain``: why a kernel is as fast as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import (
    cache_option,
    device_of,
    json_option,
    problem_options,
    space_option,
    spaces_of,
    svg_option,
    target_options,
    tune_command,
)
from autotune.errors import RecordError, UsageError
from autotune.paths import write_file

if TYPE_CHECKING:
    from autotune.records import Store
    from autotune.report.explain import Account
    from autotune.space.space import Space
    from autotune.values.device import Device
    from autotune.values.problem import Problem


@click.command()
@click.argument("what", nargs=-1, metavar="[A [B]]")
@problem_options()
@space_option
@target_options
@cache_option
@click.option("--source", "source_view", is_flag=True, help="The kernel with what each line costs.")
@svg_option
@json_option
def command(
    problem: Problem,
    what: tuple[str, ...],
    space_name: str | None,
    ordinal: int | None,
    target: str | None,
    store: Store,
    source_view: bool,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Explain why a kernel is as fast as it is: A and B are presets, config files, "record" or "predicted".

    With two, they are put side by side; without any it is the record. Where none was measured that is the
    estimated one, where none is stored what is predicted to be fastest. Memory accesses are counted in the
    simulator on a miniature of the problem, so nothing of this needs a GPU; measured times come from records
    only.
    """
    if len(what) > 2:
        raise UsageError(f"explain takes one or two kernels, not {len(what)}")
    device, note = device_of(ordinal, target)
    spaces = spaces_of(space_name, problem, device)
    accounts = [_account(name, space_name, spaces, problem, device, store) for name in what or ("",)]
    if svg is not None:
        from autotune.report.roofline import draw_accounts

        named = [(account.title, account, None) for account in accounts]
        write_file(svg, draw_accounts(named, problem, device, f"{problem} on {device.name}"))
    if as_json:
        found = [account.plain() for account in accounts]
        click.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
    elif source_view:
        for account in accounts:
            click.echo(source_text(account))
    else:
        click.echo(text(accounts))
    if note:
        click.echo(note, err=True)


def _account(
    name: str,
    space_name: str | None,
    spaces: Sequence[Space],
    problem: Problem,
    device: Device,
    store: Store,
) -> Account:
    from autotune.cli.configs import (
        fitted,
        parsed_config,
        predicted_among,
        preset_named,
        stored_among,
        with_config,
    )
    from autotune.report.explain import explain

    predicted_ms = None
    if name in ("", "record", "predicted"):
        tune = tune_command(problem, space_name)
        if name == "predicted":
            kernel = predicted_among(spaces, problem, device, store, tune)
        else:
            presets = ", ".join(preset for space in spaces for preset in space.presets)
            kernel = stored_among(
                *(spaces, problem, device, store),
                predict=not name,
                command=tune,
                instead=f"name 'predicted' or a preset: {presets}",
            )
        space, config, predicted_ms = kernel.space, kernel.config, kernel.predicted_ms
        name = {"measured": "record", "estimated": "estimated record"}.get(kernel.evidence, kernel.evidence)
        if kernel.evidence == "predicted":
            click.echo(kernel.told, err=True)
    elif name.endswith(".json") or name.lstrip().startswith("{"):
        space, config = with_config(spaces, parsed_config(name))
    else:
        space, preset = preset_named(
            spaces, name, f"{name!r:.80} is no preset, config file, 'record' or 'predicted'"
        )
        config, _ = fitted(space, preset, problem, device, f"preset {name}")
    stored = None
    with suppress(RecordError):  # one that cannot be read gives no time
        stored = store.find(device, space.family, problem)
    same = stored is not None and dict(stored.config) == dict(config)
    record = stored if same else None
    return explain(
        *(space, config, problem, device),
        title=name,
        record=record,
        predicted_ms=predicted_ms,
        depot=store.depot,
    )


def text(accounts: list[Account]) -> str:
    """Return one account as text, or two side by side with what differs."""
    columns = [dict(_rows(account)) for account in accounts]
    first = accounts[0]
    lines = [f"{first.problem} on {first.device.name}: {' | '.join(account.title for account in accounts)}"]
    if len(accounts) == 2:
        from autotune.report.explain import differing

        lines.append(f"they differ in {'; '.join(differing(*accounts)) or 'nothing'}")
    width = 1 + max(map(len, columns[0].values()))
    for section, names in _SECTIONS.items():
        rows = [name for name in names if any(name in column for column in columns)]
        if rows:
            lines += ["", section]
        for name in rows:
            cells = [column.get(name, "-") for column in columns]
            if len(cells) == 2:
                mark = "  " if cells[0] == cells[1] else "* "
                lines.append(f"{mark}{name:<26} {cells[0]:<{width}} {cells[1]}")
            else:
                lines.append(f"  {name:<26} {cells[0]}")
    lines.append("")
    for account in accounts:
        lines.append(f"{account.title} is limited by {account.because}.")
        lines.append(f"  {account.relief[0].upper()}{account.relief[1:]}.")
    return "\n".join(lines)


_SECTIONS = {
    "counted from the algorithm": (
        "global loads per output",
        "shared reads per output",
        "intensity",
        "floor",
    ),
    "compiled": (
        "registers",
        "shared memory",
        "main loop",
        "multiplying",
        "LDS for each of these",
        "other instructions",
        "register banks",
    ),
    "resident": ("blocks per SM", "occupancy", "waves"),
    "counted in the simulator": (
        "global loads",
        "async copies",
        "global stores",
        "shared reads",
        "shared stores",
        "shared side of copies",
        "on",
    ),
    "time": ("measured", "sustained", "predicted", "estimate", "its parts"),
}


def _rows(account: Account) -> list[tuple[str, str]]:
    held, loop, plain = account.occupancy, account.loop, account.plain()
    rows = [
        ("global loads per output", f"{account.global_loads:g} floats"),
        (
            "intensity",
            f"{account.tile_intensity:.3g} FLOP/B of the tile, "
            f"{account.problem_intensity:.3g} of the problem; ridge {account.ridge:.3g}",
        ),
        ("floor", f"{account.roofline_ms:.4g} ms on the roofline"),
        ("registers", f"{account.binary.registers}, {account.binary.spill_bytes} bytes spilled"),
        ("shared memory", f"{plain['shared_bytes']} bytes of a block of {plain['threads']} threads"),
        (
            "blocks per SM",
            f"{held.blocks} (" + ", ".join(f"{limit} by {name}" for name, limit in held.limits.items()) + ")",
        ),
        (
            "occupancy",
            f"{held.warps} of {held.max_warps} warps, {held.fraction:.1%}, "
            f"limited by {' and '.join(held.limited_by)}",
        ),
        (
            "waves",
            f"{plain['blocks']} blocks, {account.waves:.2f} waves, "
            f"a mean SM has {account.wave_efficiency:.1%} of the busiest one's work",
        ),
        ("on", f"{account.miniature}, the problem without most of its whole tiles"),
    ]
    if account.shared_reads is not None:
        rows.append(("shared reads per output", f"{account.shared_reads:g} floats"))
    if loop is not None:
        others = [f"{count} {name}" for name, count in loop.opcodes.items() if name != loop.multiply][:6]
        rows += [
            ("main loop", f"{loop.instructions} instructions, {loop.code_bytes / 1024:.1f} KiB"),
            ("multiplying", f"{loop.share(loop.multiply):.1%} are {loop.multiply}"),
            ("LDS for each of these", f"1 : {1 / loop.ratio('LDS'):.1f}" if loop.ratio("LDS") else "none"),
            ("other instructions", ", ".join(others)),
        ]
    if account.banks is not None:
        banks = account.banks
        rows.append(
            (
                "register banks",
                f"{banks.per_ffma:.2f} reads per FFMA, {banks.waiting_share:.1%} of FFMAs wait, "
                f"at most {banks.ffmas_per_clock:.3f} FFMAs per clock",
            )
        )
    names = {
        "global ld": ("global loads", "sectors"),
        "global copy": ("async copies", "sectors"),
        "global st": ("global stores", "sectors"),
        "shared ld": ("shared reads", "wavefronts"),
        "shared st": ("shared stores", "wavefronts"),
        "shared copy": ("shared side of copies", "wavefronts"),
    }
    for kind, (name, unit) in names.items():
        if kind in account.traffic:
            traffic = account.traffic[kind]
            conflicts = "" if unit == "sectors" else f", bank conflicts {traffic.conflict_factor:.2f}x"
            rows.append((name, f"{traffic.per_request:.3g} {unit} per request{conflicts}"))
    if account.median_ms is not None and account.gflops is not None:
        versus = "" if account.vs_cublas is None else f", {account.vs_cublas:.3f} x cuBLAS"
        rows.append(
            (
                "measured",
                f"{account.median_ms:.5g} ms, {account.gflops / 1000:.2f} TFLOP/s, "
                f"{account.roofline_ms / account.median_ms:.1%} of the roofline{versus}",
            )
        )
    if account.sustained is not None:
        rows.append(("sustained", account.sustained.words(account.problem.flops)))
    if account.predicted_ms is not None:
        ms = account.predicted_ms
        rows.append(
            (
                "predicted",
                f"{ms:.4g} ms, {account.problem.flops / ms / 1e9:.2f} TFLOP/s; expected, not measured",
            )
        )
    if account.estimate_ms is not None:
        parts = {name: ms for name, ms in account.estimate_parts.items() if name.endswith("_ms") and ms}
        note = "a static estimate with the compiled registers, not a measurement"
        rows.append(("estimate", f"{account.estimate_ms:.4g} ms; {note}"))
        rows.append(
            ("its parts", ", ".join(f"{name.removesuffix('_ms')} {ms:.4g}" for name, ms in parts.items()))
        )
    return rows


def source_text(account: Account) -> str:
    """Return the miniature's kernel with the cost of each line: executions, sectors, wavefronts."""
    head = (
        f"{account.title}: counted on {account.miniature}, {account.miniature_source.launch.grid[0]} blocks"
    )
    return "\n".join([head, *account.costed_source])
