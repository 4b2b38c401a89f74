"""Learning from measured trials: which tiles are worth a look, and how far the static estimate is off.

Trials come from the logs of searches, and from tables of trials that are kept beside the records. Only `fit`
needs LightGBM; what it finds is applied with NumPy.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.code.depot import Depot
from autotune.code.render import template_digest
from autotune.code.sources import rendered
from autotune.errors import ConfigError, ProblemError, RecordError, ToolchainError
from autotune.families import family_of
from autotune.families.estimate import estimate_parts
from autotune.model.correction import Correction
from autotune.outside import read_text
from autotune.paths import install_command, write_file
from autotune.records import RecordedDevice, Store, now
from autotune.records.files import LEARNED
from autotune.records.learned import (
    FittedOn,
    Learned,
    LearnedFamily,
    Probe,
    Regret,
    holds,
    read_learned,
)
from autotune.records.trials import read_trials
from autotune.search.prediction import features
from autotune.space.space import Config, Space
from autotune.values.device import Device
from autotune.values.problem import Problem

LOGS = "learning"  # folder of records that `autotune learn` searches in, inside the user's folder
TABLE = "measured.csv.gz"
TABLE_LIMIT = 64 << 20  # bytes, unpacked
COLUMNS = ("family", "m", "n", "k", "layout", "beta", "math", "batch", "median_ms", "config")
FEWEST = 12  # problems of a family: with fewer nothing is learned
FOLDS = 6
TREES = 400
FIT = {
    "objective": "huber", "alpha": 0.3, "learning_rate": 0.06, "num_leaves": 24, "max_depth": 6,
    "min_data_in_leaf": 30, "bagging_fraction": 0.7, "bagging_freq": 1, "feature_fraction": 0.5,
    "lambda_l2": 5.0, "seed": 0, "deterministic": True, "force_row_wise": True, "num_threads": 1,
    "verbose": -1,
}  # fmt: skip
DIGITS = 4  # of a leaf and a threshold, significant
GOOD = 1.05  # times the best time of a shape: tiles of such trials are worth a look elsewhere
PROBES = 8  # kernels by which to tell later whether the code is what it was
BEST = 8  # of them, of one shape and family
TWICE = 2  # shapes for which a tile must have been fast: one alone may be chance


@dataclass(frozen=True)
class Measured:
    """The trials of one problem and family.

    Attributes:
        problem: What was computed.
        configs: Distinct.
        times: `[configs]`, median ms.
    """

    problem: Problem
    configs: tuple[Config, ...]
    times: NDArray[np.float64]


def learn(
    device: Device,
    spaces: Sequence[Space],
    found: Mapping[str, Sequence[Measured]],
    depot: Depot,
    step: Callable[[], None] = lambda: None,
) -> Learned:
    """Fit what can be learned of a GPU from trials of it.

    Args:
        device: The GPU.
        spaces: The families.
        found: Their trials, from `trials`.
        depot: Where rendered sources are kept.
        step: Called when a family is done.

    Raises:
        RecordError: There are too few trials.
        ToolchainError: LightGBM is missing.
    """
    best: dict[Problem, float] = {}
    for each in (each for measured in found.values() for each in measured):
        best[each.problem] = min(best.get(each.problem, np.inf), float(each.times.min()))
    families = {}
    for space in spaces:
        measured = found.get(space.family, [])
        if len(measured) >= FEWEST:
            families[space.family] = _learned(space, device, measured, best, depot)
        step()
    if not families:
        most = max(map(len, found.values()), default=0)
        raise RecordError(
            f"there are trials of {most} problems on {device.name}, and {FEWEST} of one family are needed: "
            "give a longer budget"
        )
    return Learned(RecordedDevice.of(device), now(), families)


def trials(device: Device, spaces: Sequence[Space], store: Store) -> dict[str, list[Measured]]:
    """Read the trials of a GPU, of points that the families search now: by family, one for each problem."""
    digests = {space.family: {(space.digest, template_digest(space))} for space in spaces}
    found: dict[tuple[str, Problem], dict[Config, float]] = {}
    for earlier in store.beside(device, LEARNED):
        known = read_learned(earlier).families
        for space in spaces:
            if space.family in known and holds(known[space.family].fitted_on, space, device, store.depot):
                then = known[space.family].fitted_on
                digests[space.family].add((then.space_digest, then.template_digest))
    for table in reversed(store.beside(device, TABLE)):  # the user's own last: a later time replaces another
        for family, problem, config, ms in read_table(table, digests):
            found.setdefault((family, problem), {})[config] = ms
    for logs in (store, Store(store.root / LOGS)):
        for path in sorted(logs.home(device).glob("*.trials.jsonl")):
            try:
                header, lines = read_trials(path)
            except RecordError:
                continue
            if (header.space_digest, header.template_digest) not in digests.get(header.family, ()):
                continue
            for line in lines:
                usable = line.get("outcome") == "measured" and not line.get("noisy")
                if usable and line.get("event") != "final":
                    own = found.setdefault((header.family, header.problem), {})
                    own[Config(line["config"])] = float(line["median_ms"])
    by_family = {space.family: space for space in spaces}
    result: dict[str, list[Measured]] = {}
    for (family, problem), times in found.items():
        kept = {
            whole: ms
            for config, ms in times.items()
            if (whole := _searched(by_family[family], config)) is not None
        }
        if kept:
            measured = Measured(problem, tuple(kept), np.array(list(kept.values())))
            result.setdefault(family, []).append(measured)
    return result


def _searched(space: Space, config: Config) -> Config | None:
    """Return a config as the space, which may have been narrowed since, searches it; None if it does not."""
    with suppress(ConfigError):
        whole = space.config(config)
        if all(whole[name] in values for name, values in space.parameters.items()):
            return whole
    return None


def write_table(path: Path, found: Mapping[str, Sequence[Measured]], spaces: Sequence[Space]) -> None:
    """Write trials as a compressed table; the same trials give the same bytes.

    Raises:
        RecordError: It cannot be written.
    """
    text = io.StringIO()
    for space in spaces:
        text.write(f"# {space.family} {space.digest} {template_digest(space)}\n")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for family, measured in sorted(found.items()):
        for each in sorted(measured, key=lambda each: each.problem.key):
            p = each.problem
            for config, ms in zip(each.configs, each.times, strict=True):
                choice = " ".join(f"{name}={value}" for name, value in config.items())
                what = (p.m, p.n, p.k, p.layout, p.beta, p.math, p.batch)
                table.writerow((family, *what, f"{ms:.6g}", choice))
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as file:
        file.write(text.getvalue().encode())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, packed.getvalue())
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None


def read_table(
    path: Path, digests: Mapping[str, Collection[tuple[str, str]]]
) -> Iterator[tuple[str, Problem, Config, float]]:
    """Read the trials of a table whose family's space and template are as they were.

    Raises:
        RecordError: The file cannot be read, or is no table of trials.
    """
    try:
        lines = read_text(path, TABLE_LIMIT).splitlines()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
    heads = [line.split() for line in lines if line.startswith("#")]
    current = {head[1] for head in heads if len(head) == 4 and (head[2], head[3]) in digests.get(head[1], ())}
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    have = tuple(rows.fieldnames or ())
    if have not in (
        COLUMNS,
        tuple(name for name in COLUMNS if name != "batch"),
    ):  # older ones have no batches
        raise RecordError(f"{path}: its columns are not {', '.join(COLUMNS)}")
    for number, row in enumerate(rows, 1):
        if row["family"] in current:
            try:
                yield row["family"], *_trial(row)
            except (ProblemError, TypeError, ValueError) as error:
                raise RecordError(f"{path}: row {number}: {error}") from None


def _trial(row: Mapping[str, str]) -> tuple[Problem, Config, float]:
    m, n, k, beta = (int(row[name]) for name in ("m", "n", "k", "beta"))
    layout, math = row["layout"], row["math"]
    problem = Problem(m, n, k, layout, beta, math, int(row.get("batch", 1)))  # type: ignore[arg-type]
    pairs = (pair.split("=") for pair in row["config"].split(" "))
    config = Config({name: int(value) if value.isdigit() else value for name, value in pairs})
    ms = float(row["median_ms"])
    if not 0 < ms < np.inf:
        raise ValueError(f"median_ms = {ms} is no time")
    return problem, config, ms


def _learned(
    space: Space,
    device: Device,
    measured: Sequence[Measured],
    best: Mapping[Problem, float],
    depot: Depot,
) -> LearnedFamily:
    correction, estimate, corrected = fit(space, device, measured)
    family = family_of(space)
    follows = None if family is None else family.FOLLOWS
    names = [] if follows is None else [name for name in space.parameters if name not in follows]
    tiles: dict[tuple[Any, ...], dict[str, Any]] = {}
    wins: Counter[tuple[Any, ...]] = Counter()
    for each in measured if names else ():
        if len(each.configs) == 1:  # which says how long it takes, and not what is good
            continue
        good = {}
        for place in np.argsort(each.times, kind="stable")[:BEST]:
            if each.times[place] <= GOOD * best[each.problem]:
                tile = {name: each.configs[place][name] for name in names}
                good[tuple(tile.values())] = tile
        tiles |= good
        wins.update(good.keys())
    kept = tuple(tile for key, tile in tiles.items() if wins[key] >= TWICE)
    count = sum(len(each.configs) for each in measured)
    probes = []
    for each in measured[:: max(1, len(measured) // PROBES)][:PROBES]:
        config = each.configs[int(each.times.argmin())]
        source = rendered(space, config, each.problem, device, depot=depot)
        probes.append(Probe(each.problem, config, source.code_digest))
    digests = space.digest, template_digest(space)
    fitted_on = FittedOn(len(measured), count, *digests, tuple(probes), estimate, corrected)
    return LearnedFamily(fitted_on, kept, correction)


def fit(space: Space, device: Device, measured: Sequence[Measured]) -> tuple[Correction, Regret, Regret]:
    """Fit a correction of the estimate to measured trials.

    Returns:
        The correction; the regret of the estimate and of corrected ones, of problems that were held out.

    Raises:
        ToolchainError: LightGBM is missing.
    """
    tables, ratios, times, groups = [], [], [], []
    names: list[str] = []
    for number, each in enumerate(measured):
        points = space.points(each.configs)
        columns = space.columns(points, each.problem, device)
        with np.errstate(all="ignore"):  # a config that is not legal may have no tile, or no step along k
            parts = estimate_parts(space, columns, each.problem, device)
            known = features(space, columns, parts, each.problem, device, np.arange(len(points)))
            ratios.append(np.log(each.times / parts["ms"]))
        names = list(known)
        tables.append(np.stack([np.broadcast_to(known[name], len(points)) for name in names], axis=1))
        times.append(np.log(each.times))
        groups.append(np.full(len(points), number))
    table, ratio, time, group = map(np.concatenate, (tables, ratios, times, groups))
    usable = np.isfinite(table).all(axis=1) & np.isfinite(ratio)
    table, ratio, time, group = table[usable], ratio[usable], time[usable], group[usable]
    fold = np.random.default_rng(0).permutation(len(measured)) % FOLDS
    held_out = np.zeros(len(time))
    for number in range(FOLDS):
        inside = fold[group] != number
        learned = _boosted(table[inside], ratio[inside], group[inside], names)
        held_out[~inside] = np.log(
            learned.factors(dict(zip(names, table[~inside].T, strict=True)), (~inside).sum())
        )
    estimated = time - ratio
    return (
        _boosted(table, ratio, group, names),
        _regret(estimated, time, group),
        _regret(estimated + held_out, time, group),
    )


def fitter() -> Any:
    """Return LightGBM.

    Raises:
        ToolchainError: It is missing, or something that it needs.
    """
    try:
        import lightgbm
    except (ImportError, OSError) as error:
        why = f"learning needs LightGBM, which cannot be imported ({' '.join(str(error).split())})"
        raise ToolchainError(f"{why}: {install_command('learn')}") from None
    return lightgbm


def _boosted(table: Any, ratio: Any, group: Any, names: Sequence[str]) -> Correction:
    """Fit trees; every problem counts alike but for the square root of its trials."""
    lightgbm = fitter()
    counts = np.bincount(group)[group]
    data = lightgbm.Dataset(table, ratio, weight=1 / np.sqrt(counts))
    dumped = lightgbm.train(FIT, data, TREES).dump_model()["tree_info"]
    return Correction([_tree(each["tree_structure"], names) for each in dumped])


def _tree(node: Mapping[str, Any], names: Sequence[str]) -> Any:
    if "leaf_value" in node:
        return _rounded(node["leaf_value"])
    below, above = (_tree(node[side], names) for side in ("left_child", "right_child"))
    return [names[node["split_feature"]], _rounded(node["threshold"]), below, above]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _regret(scores: Any, times: Any, groups: Any) -> Regret:
    """Return the regret over the problems of which more than one trial is known."""
    regrets = [
        times[own][np.argmin(scores[own])] - times[own].min()
        for own in (groups == number for number in np.unique(groups))
        if np.count_nonzero(own) > 1
    ]
    return Regret(
        float(np.exp(np.mean(regrets))), float(np.exp(np.quantile(regrets, 0.9))), float(np.exp(max(regrets)))
    )
