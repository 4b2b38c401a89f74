"""The page of one problem: its search, finalists, roofline, parameters, space, cycles, source and record."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune import records
from autotune.code.depot import Depot
from autotune.errors import REJECTION_KINDS, AutotuneError, RecordError
from autotune.records import Record
from autotune.records.files import path_within
from autotune.records.trials import read_trials, trials_path
from autotune.report.chart import Axis, Chart, Lane, Series
from autotune.report.explain import Account, differing, explain
from autotune.report.ladder import Ladder
from autotune.report.page import Figure, page
from autotune.report.roofline import placed, roofline
from autotune.report.steps import WINNER
from autotune.space.space import Space, built_in
from autotune.tuning.trial import Trial
from autotune.values.device import Device
from autotune.values.measurement import POWER_CAP, TIE_MEDIAN

MOST_DOTS, MOST_CROSSES = 1200, 250  # measured candidates, and rejected ones of a kind, that are drawn
MOST_PARAMETERS = 8  # in the picture; the table has all
MUCH = 0.1  # share of the points that a rule must remove to be in the picture
NO_LOG = "No trial log lies beside this record, as none comes with the package: "


@dataclass(frozen=True)
class Candidate:
    """A line of the logs: which candidate it was, seconds of searching until its outcome, and the trial."""

    number: int
    seconds: float
    trial: Trial


def problem_page(
    record: Record,
    folder: Path,
    device: Device | None,
    depot: Depot,
    summary: Sequence[str],
    ladder: Ladder | None = None,
) -> str:
    """Return the page of a record.

    Args:
        record: Measured or estimated.
        folder: Where it lies, its trial logs beside it.
        device: That of the record, all of it; None where nobody knows it.
        depot: Where compiled kernels are kept.
        summary: The record in a few lines.
        ladder: Its steps are drawn on the roofline.
    """
    candidates = searched(record, folder)
    accounts, why = _accounts(record, device, depot)
    figures = [
        search_figure(record, candidates),
        finalists_figure(record),
        roofline_figure(record, device, accounts, why, ladder, candidates),
        parameters_figure(record, candidates),
        funnel_figure(record, device),
        cycles_figure(accounts, why),
        source_figure(accounts, why),
        Figure("The record", "The file as it is stored.", lines=records.to_json(record).splitlines()),
    ]
    return page(f"{record.problem} on {record.device.name}", summary, figures)


def searched(record: Record, folder: Path) -> list[Candidate]:
    """Return the candidates of the logs beside a record, of all families, in the order of their outcomes.

    The seconds of one run follow those of the run before. A log of another device, or of another space or
    template than the record's, is none of its.
    """
    lines: dict[str, tuple[str, str, float, Trial]] = {}
    for family in dict.fromkeys([record.family, *(space.family for space in built_in())]):
        name = path_within(record.device, family, record.problem).name
        try:
            header, found = read_trials(trials_path(folder / name))
        except RecordError:
            continue
        digests = (header.space_digest, header.template_digest)
        own = family != record.family or digests == (record.space_digest, record.template_digest)
        if not own or (header.problem, header.device) != (record.problem, record.device):
            continue
        for line in found:
            trial = Trial.read(line, family, header.l2)
            if trial is not None:
                second = line.get("s")
                since = float(second) if isinstance(second, int | float) else 0.0
                lines.pop(trial.id, None)  # its last line counts
                lines[trial.id] = str(line.get("at", "")), str(line.get("run", "")), since, trial
    begins: dict[str, float] = {}  # of each run, on the clock of all
    latest, candidates = 0.0, []
    for number, (_, run, since, trial) in enumerate(sorted(lines.values(), key=lambda line: line[0]), 1):
        seconds = begins.setdefault(run, latest) + since
        latest = max(latest, seconds)
        candidates.append(Candidate(number, seconds, trial))
    return candidates


def search_figure(record: Record, candidates: Sequence[Candidate]) -> Figure:
    """Return the best so far against seconds and candidates, with cuBLAS and what was rejected."""
    title = "The search"
    measured = [each for each in candidates if each.trial.median_ms is not None]
    if not measured:
        what = "how the best time fell is not known." if not candidates else "nothing was measured."
        return Figure(title, (NO_LOG if not candidates else "The log has estimates alone: ") + what)
    rates = {each.number: _tflops(record, each.trial.median_ms or math.inf) for each in measured}
    better: list[Candidate] = []
    for each in measured:
        if not better or rates[each.number] > rates[better[-1].number]:
            better.append(each)
    best, end = better[-1], candidates[-1]
    says = (
        f"The best of {len(measured):,} measured candidates came after {best.seconds:.1f} s of "
        f"{end.seconds:.1f} s, as number {best.number:,} of {end.number:,}; "
        "each dot is a candidate, timed alone and briefly"
    )
    cublas = None if record.cublas is None else _tflops(record, record.cublas.median_ms)
    if cublas is not None:
        passed = next((each for each in better if rates[each.number] > cublas), None)
        says += (
            "; none of them passed cuBLAS"
            if passed is None
            else f"; number {passed.number:,} was the first to pass cuBLAS, after {passed.seconds:.1f} s"
        )
    rejected = {
        kind: found
        for kind in REJECTION_KINDS
        if (found := [each for each in candidates if each.trial.kind == kind])
    }
    shown = _thinned(measured, MOST_DOTS)
    crosses = {kind: _thinned(found, MOST_CROSSES) for kind, found in rejected.items()}
    drawn = len(shown) + sum(map(len, crosses.values()))
    notes = [] if drawn == end.number else [f"drawn: {drawn:,} of {end.number:,} candidates"]
    y = Axis.around("TFLOP/s", [*rates.values(), *([] if cublas is None else [cublas])], zero=True)

    def against(label: str, place: Mapping[int, float]) -> Chart:
        x = Axis(label, 0.0, max(place.values()) or 1.0)
        steps: list[tuple[float, float]] = []
        for each in better:
            if steps:
                steps.append((place[each.number], steps[-1][1]))
            steps.append((place[each.number], rates[each.number]))
        steps.append((x.high, steps[-1][1]))
        series = [Series("other", "dot", [(place[each.number], rates[each.number]) for each in shown])]
        if cublas is not None:
            series.append(
                Series("them", "line", [(0.0, cublas), (x.high, cublas)], "cuBLAS", f"{cublas:.2f}")
            )
        series.append(Series("ours", "line", steps, "best so far", f"{steps[-1][1]:.2f}"))
        lanes = [
            Lane(
                kind,
                [Series("bad", "cross", [(place[each.number],) for each in crosses[kind]])],
                f"{len(found):,} rejected",
            )
            for kind, found in rejected.items()
        ]
        return Chart(x, y, series, lanes=lanes, notes=notes)

    charts = [
        against("seconds since the command began", {each.number: each.seconds for each in candidates}),
        against("candidates", {each.number: float(each.number) for each in candidates}),
    ]
    rows = [
        [
            *(
                f"{each.number}",
                f"{each.seconds:.2f}",
                f"{each.trial.median_ms:.6g}",
                f"{rates[each.number]:.2f}",
            ),
            *(each.trial.family, each.trial.config.id),
        ]
        for each in better
    ]
    columns = ("candidate", "seconds", "ms", "TFLOP/s", "family", "config that was the best so far")
    return Figure(title, f"{says}.", charts, columns, rows)


def finalists_figure(record: Record) -> Figure:
    """Return the finalists with their intervals beside cuBLAS."""
    title, timing = "The finalists", record.timing
    if timing is None:
        return Figure(title, "Nothing was measured: the record is an estimate.")
    found = [("winner", record.config, timing.median_ms, timing.quantiles_ms, "")]
    found += [
        (str(number), each.config, each.median_ms, each.quantiles_ms, "tied" if each.tied else "")
        for number, each in enumerate(record.runners_up, 2)
    ]
    best = min(median for _, _, median, _, _ in found)
    lanes = [
        Lane(
            name,
            [
                Series("ours", "span", [(low, high)]),
                Series("ours", "disc" if name == "winner" else "ring", [(median,)]),
            ],
            f"{_tflops(record, median):.2f} TFLOP/s{f', {tied}' if tied else ''}",
        )
        for name, _, median, (low, _, high), tied in found
    ]
    names = [name for name in record.config if len({config.get(name) for _, config, *_ in found}) > 1]
    rows = [
        [
            *(name, f"{median:.6g}", f"{low:.6g}", f"{high:.6g}", f"{_tflops(record, median):.2f}", tied),
            *(str(config.get(each, "-")) for each in names),
        ]
        for name, config, median, (low, _, high), tied in found
    ]
    across = [Series("ours", "band", [(best, best * TIE_MEDIAN)])]
    values = [best, best * TIE_MEDIAN, *(each for *_, quantiles, _ in found for each in quantiles)]
    tied = sum(bool(each[-1]) for each in found)
    says = (
        f"{tied} of {len(found) - 1} other finalists cannot be told from the winner; the band is "
        f"{TIE_MEDIAN - 1:.0%} above the fastest median, spans are 10 to 90 % of the samples, timed in turns"
    )
    if record.cublas is not None:
        ms = record.cublas.median_ms
        across.append(Series("them", "rule", [(ms,)], "cuBLAS"))
        values.append(ms)
        rows.append(
            ["cuBLAS", f"{ms:.6g}", "-", "-", f"{_tflops(record, ms):.2f}", "", *("-" for _ in names)]
        )
        says += f"; cuBLAS takes {record.vs_cublas:.3f} times the winner's time"
    chart = Chart(Axis.around("ms", values), across=across, lanes=lanes)
    return Figure(
        title, f"{says}.", [chart], ("finalist", "ms", "10 %", "90 %", "TFLOP/s", "mark", *names), rows
    )


def roofline_figure(
    record: Record,
    device: Device | None,
    accounts: Sequence[Account],
    why: str,
    ladder: Ladder | None,
    candidates: Sequence[Candidate] = (),
) -> Figure:
    """Return the winner, the runner-up and the steps of a ladder below the roofline.

    A step has the time of a climb, else that of a candidate of the log with its config, else an estimate.
    """
    title = "The roofline"
    if device is None or not accounts:
        return Figure(title, why)
    medians = [None if record.timing is None else record.timing.median_ms]
    medians += [each.median_ms for each in record.runners_up]
    named: list[tuple[str, Account | None, float | None]] = [
        (each.title, each, None if ms is None else record.problem.flops / ms / 1e6)
        for each, ms in zip(accounts, medians, strict=False)
    ]
    if ladder is not None:
        tried = {
            f"{each.trial.family} {each.trial.config.id}": record.problem.flops / each.trial.median_ms / 1e6
            for each in candidates
            if each.trial.median_ms is not None
        }
        for rung in ladder.rungs:
            account, rate = None if rung.rejected else rung.account, ladder.gflops(rung)
            if account is not None and rate is None:
                rate = tried.get(f"{account.source.family} {account.source.config.id}")
            named += [] if rung.step.name == WINNER else [(rung.step.name, account, rate)]
    points, missing = placed(named, record.problem, device)
    ceilings = (
        [] if record.cublas is None else [("cuBLAS", record.problem.flops / record.cublas.median_ms / 1e6)]
    )
    first = accounts[0]
    says = f"The floor is {first.roofline_ms:.4g} ms"
    if record.timing is not None and record.gflops is not None:
        says += f", of which the winner reaches {first.roofline_ms / record.timing.median_ms:.1%}"
        clocks = record.timing.clocks or {}
        watts, throttle, gflops = clocks.get("watts"), clocks.get("throttle"), record.gflops
        if record.sustained is not None:
            watts, throttle = record.sustained.watts, record.sustained.throttle
            gflops = record.sustained.gflops(record.problem.flops)
            says += f"; for long it holds {record.sustained.words(record.problem.flops)}"
        capped = isinstance(throttle, tuple) and POWER_CAP in throttle
        if isinstance(watts, int | float) and capped and record.sustained is not None:
            ceilings.append((f"power cap, {watts:.0f} W", gflops))
        if isinstance(watts, int | float) and record.sustained is None:
            told = ", and met its power cap at times" if capped else ", below its power cap"
            says += f"; the GPU drew {watts:.0f} W when it was looked at{told}"
    rows = [
        [
            point.name,
            f"{point.intensity:.3g}",
            f"{point.gflops / 1000:.2f}",
            "measured" if point.measured else "estimated",
        ]
        for point in points
    ]
    rows += [[name, "-", f"{gflops / 1000:.2f}", "level"] for name, gflops in ceilings]
    chart = roofline(device, points, record.problem.math, missing, ceilings)
    columns = ("kernel", "FLOP/B of the tile", "TFLOP/s", "evidence")
    return Figure(title, f"{says}. The winner is limited by {first.because}.", [chart], columns, rows)


def parameters_figure(record: Record, candidates: Sequence[Candidate]) -> Figure:
    """Return the best time by the value of each parameter, the parameters that matter most first."""
    title = "The parameters"
    times = [
        (each.trial.config, each.trial.median_ms)
        for each in candidates
        if each.trial.family == record.family and each.trial.median_ms is not None
    ]
    if len(times) < 2:
        why = "Fewer than two candidates of the family were measured: " if candidates else NO_LOG
        return Figure(title, f"{why}what each parameter is worth is not known.")
    found = sorted(
        ((importance([(config.get(name), ms) for config, ms in times]), name) for name in record.config),
        key=lambda pair: -pair[0],
    )
    lanes, rows, best_of = [], [], []
    for place, (share, name) in enumerate(found):
        groups: defaultdict[int | str, list[float]] = defaultdict(list)
        for config, ms in times:
            if name in config:
                groups[config[name]].append(ms)
        for number, (value, group) in enumerate(
            sorted(groups.items(), key=lambda pair: (str(type(pair[0])), pair[0]))
        ):
            best, chosen = min(group), value == record.config[name]
            rate = _tflops(record, best)
            mark = "the winner's" if chosen else ""
            rows.append(
                [name, f"{share:.1%}", str(value), f"{best:.6g}", f"{rate:.2f}", str(len(group)), mark]
            )
            if place < MOST_PARAMETERS and len(groups) > 1:
                series = [Series("ours" if chosen else "other", "disc" if chosen else "ring", [(rate,)])]
                lanes.append(Lane(f"{name} {value}", series, "" if number else f"importance {share:.1%}"))
                best_of.append(rate)
    says = (
        f"The best rate that any candidate reached with each value, the winner's values filled; "
        f"{found[0][1]} matters most. Importance is the share of the variance of log time, over the "
        f"{len(times):,} measured candidates of the family, that the parameter's value alone accounts for "
        "(the correlation ratio): the search chose those candidates, so shares need not add up."
    )
    chart = [Chart(Axis.around("TFLOP/s", best_of), lanes=lanes)] if lanes else []
    columns = ("parameter", "importance", "value", "best ms", "TFLOP/s", "candidates", "chosen")
    return Figure(title, says, chart, columns, rows)


def importance(times: Sequence[tuple[int | str | None, float]]) -> float:
    """Return the correlation ratio of log time by value: the variance between groups over that of all."""
    groups: defaultdict[int | str | None, list[float]] = defaultdict(list)
    for value, ms in times:
        groups[value].append(math.log(ms))
    mean = math.fsum(each for group in groups.values() for each in group) / len(times)
    total = math.fsum((each - mean) ** 2 for group in groups.values() for each in group)
    between = math.fsum(len(group) * (math.fsum(group) / len(group) - mean) ** 2 for group in groups.values())
    return between / total if total else 0.0


def funnel_figure(record: Record, device: Device | None) -> Figure:
    """Return how many points of the space are left by each rule, and what became of those that were tried."""
    search, counts = record.search, record.search.outcomes
    rules: list[tuple[str, int, str]] = []
    much = []  # the rules that are pictured
    try:
        if device is None:
            raise RecordError(_unknown(record))
        space = Space.load(record.family)
        legal = space.enumerate(record.problem, device)
        left = legal.raw
        rules.append(("points", left, f"all of {record.family}"))
        for rule, removed in legal.removals:
            if removed:
                rules.append((rule.name, left - removed, rule.reason))
                much += [rules[-1]] if removed > MUCH * left else []
            left -= removed
        much.insert(0, rules[0])
        says = f"Of {legal.raw:,} points of {record.family} the rules leave {len(legal):,}"
        if space.digest != record.space_digest:
            says += " (as the space is today; the search had another)"
        says += "; "
    except AutotuneError as error:
        says = f"What the rules remove is not known: {error}. "
    early = ("constraint", "compile", "compile_timeout")
    compiled = search.seen - sum(counts.get(kind, 0) for kind in early)
    stages = [
        ("legal", search.legal, "of all families, when it was searched"),
        ("tried", search.seen, "have an outcome"),
        ("compiled", compiled, "became machine code"),
        *((kind, counts[kind], "rejected") for kind in REJECTION_KINDS if counts.get(kind)),
        *((kind, counts[kind], "right") for kind in ("estimated", "measured") if counts.get(kind)),
    ]
    most = max(count for _, count, _ in [*rules, *stages])
    x = Axis("candidates", 0.5, 2.0 * max(1, most), log=True)
    lanes = [
        Lane(
            name,
            [Series("bad" if what == "rejected" else "ours", "bar", [(x.low, max(count, x.low))])],
            f"{count:,}{' rejected' if what == 'rejected' else ''}",
        )
        for name, count, what in [*much, *stages]
    ]
    few = f"; the picture has the rules that remove over {MUCH:.0%} of what is left" if rules else ""
    tried = f"{search.seen:,} of {search.legal:,} legal candidates were tried"
    rows = [[name, f"{count:,}", what] for name, count, what in [*rules, *stages]]
    return Figure(
        "The space", f"{says}{tried}{few}.", [Chart(x, lanes=lanes)], ("after", "left", "what"), rows
    )


def cycles_figure(accounts: Sequence[Account], why: str) -> Figure:
    """Return the parts of the estimate of the winner and the runner-up."""
    title = "Where the cycles go"
    if not accounts:
        return Figure(title, why)
    names = {
        name for each in accounts for name, ms in each.estimate_parts.items() if name.endswith("_ms") and ms
    }
    names_by_size = sorted(names, key=lambda name: -accounts[0].estimate_parts.get(name, 0.0))
    first = accounts[0]
    says = f"The winner is limited by {first.because}; {first.relief}."
    if len(accounts) > 1:
        says += (
            f" The runner-up differs in {'; '.join(differing(*accounts)) or 'nothing'} (winner | runner-up)."
        )
    columns = ("part", *(each.title for each in accounts))
    facts = [
        ["registers", *(str(each.binary.registers) for each in accounts)],
        ["resident blocks of an SM", *(str(each.occupancy.blocks) for each in accounts)],
        ["occupancy", *(f"{each.occupancy.fraction:.1%}" for each in accounts)],
        ["multiplying share of the main loop", *(_multiplying(each) for each in accounts)],
    ]
    if not names:
        return Figure(title, f"{says} No model splits the time of this family.", (), columns, facts)
    says += " The parts are a static estimate, what each unit would take by itself, and no measurement."
    lanes = [
        Lane(
            name.removesuffix("_ms") if not number else "",
            [Series("other" if number else "ours", "bar", [(0.0, ms)])],
            f"{ms:.4g} ms, {each.title}",
        )
        for name in names_by_size
        for number, each in enumerate(accounts)
        for ms in [each.estimate_parts.get(name, 0.0)]
    ]
    most = max(each.estimate_parts.get(name, 0.0) for each in accounts for name in names)
    chart = Chart(Axis("ms, estimated", 0.0, 1.05 * most), lanes=lanes)
    rows = [
        [
            f"{name.removesuffix('_ms')}, ms",
            *(f"{each.estimate_parts.get(name, 0.0):.4g}" for each in accounts),
        ]
        for name in names_by_size
    ]
    return Figure(title, says, [chart], columns, [*rows, *facts])


def source_figure(accounts: Sequence[Account], why: str) -> Figure:
    """Return the kernel with the costs of each line in its margin."""
    if not accounts:
        return Figure("The source", why)
    says = (
        f"What each line costs, counted in the simulator on {accounts[0].miniature}: the kernel is that of "
        "the record, with the constants of the small problem."
    )
    return Figure("The source", says, lines=accounts[0].costed_source)


def _accounts(record: Record, device: Device | None, depot: Depot) -> tuple[list[Account], str]:
    """Return the accounts of the winner and the runner-up; or none, and why."""
    if device is None:
        return [], f"{_unknown(record)}."
    configs = [record.config, *(each.config for each in record.runners_up[:1])]
    found = []
    try:
        space = Space.load(record.family)
        for title, config in zip(("winner", "runner-up"), configs, strict=False):
            chosen = space.config(dict(config)), record.problem, device
            found.append(explain(space, *chosen, title=title, depot=depot))
    except AutotuneError as error:
        if not found:
            return [], f"The kernel cannot be rendered and counted today: {error}."
    return found, ""


def _thinned(found: Sequence[Candidate], most: int) -> Sequence[Candidate]:
    return found[:: -(-len(found) // most)]


def _unknown(record: Record) -> str:
    return f"{record.device.name} is neither here nor in the built-in table, so its limits are not known"


def _tflops(record: Record, ms: float) -> float:
    return record.problem.flops / ms / 1e9


def _multiplying(account: Account) -> str:
    loop = account.loop
    return "-" if loop is None else f"{loop.share(loop.multiply):.1%} {loop.multiply}"
