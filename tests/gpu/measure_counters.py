"""Measures hardware counters of rendered kernels with Nsight Compute, for tests/test_counters_h200.py.

Run it from the root of the project on a machine with the GPU, CuPy, NVRTC and ``ncu``::

    PYTHONPATH=. python tests/gpu/measure_counters.py tests/data/h200_counters.json

The file holds each kernel's PTX as NVRTC made it there, so that the test simulates the code that ran. With
``--dry-run`` nothing is launched and the file has no hardware figures.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autotune.code.compiler import Binary, compile_text, nvrtc_version
from autotune.code.render import render
from autotune.simulator import run_ptx
from autotune.space.space import Space
from autotune.values.device import current_device, named_device
from autotune.values.measurement import Launch
from autotune.values.problem import Problem

ALPHA, BETA = 0.75, -0.5
EXACT, GUARDED, ODD = (256, 256, 64), (250, 250, 60), (253, 251, 61)
NARROW = {"edge": "guarded", "vec_a": 1, "vec_b": 1, "vec_c": 1}
FIRST = {
    **{name: values[0] for name, values in Space.load("sgemm").parameters.items()},
    "BM": 16, "TM": 1, "LM": 4, "BN": 16, "TN": 1, "VM": 1, "VN": 1, "BK": 16, "loader": "reg", "stages": 1,
    "transpose_a": 0, "vec_a": 1, "vec_b": 1, "vec_c": 1, "smem_pad": 0, "edge": "exact",
    "fragment_pipeline": 0, "unroll_stages": 0, "ffma_order": "row", "group_m": 1, "min_blocks": 1,
}  # fmt: skip
# name: problem, family, preset (None: FIRST), changes; loops stay rolled, to keep the PTX short
KERNELS: dict[str, tuple[Problem, str, str | None, dict[str, int | str]]] = {
    "one output per thread": (Problem(*EXACT), "sgemm", None, {}),
    "a column per thread": (
        Problem(*EXACT), "sgemm", None, {"BM": 64, "TM": 8, "LM": 1, "BN": 64, "VM": 4, "BK": 8}
    ),
    "cp_async of 4 and 16 bytes": (Problem(*EXACT), "sgemm", "square_block", {}),
    "three stages, unrolled": (Problem(*EXACT), "sgemm", "slim_block", {"unroll_stages": 1}),
    "cp_async without padding": (Problem(*EXACT), "sgemm", "middle_block", {"smem_pad": 0, "BK": 8}),
    "cp_async of 16 bytes": (
        Problem(*EXACT), "sgemm", "small_block", {"transpose_a": 0, "vec_a": 4, "fragment_pipeline": 0}
    ),
    "through registers": (Problem(*EXACT), "sgemm", "register_staged", {"BK": 8}),
    "through registers without padding": (
        Problem(*EXACT), "sgemm", "register_staged", {"BK": 8, "smem_pad": 0, "fragment_pipeline": 0}
    ),
    "contiguous outputs": (Problem(*EXACT), "sgemm", "register_staged", {"BK": 8, "VM": 8, "VN": 8}),
    "lanes in a row": (
        Problem(*EXACT), "sgemm", "tiny_block", {"BM": 16, "TM": 4, "LM": 1, "BN": 128, "BK": 16, "vec_c": 2}
    ),
    "transposed B": (Problem(*EXACT, "nt"), "sgemm", "square_block", {"vec_b": 1}),
    "transposed A": (Problem(*EXACT, "tn"), "sgemm", "square_block", {"vec_a": 4, "smem_pad": 0}),
    "both transposed, through registers": (Problem(*EXACT, "tt"), "sgemm", "register_staged", {"BK": 8}),
    "beta": (Problem(*EXACT, beta=1), "sgemm", "tiny_block", {"BK": 16}),
    "guarded cp_async of 8 bytes": (
        Problem(*GUARDED), "sgemm", "square_block", {"edge": "guarded", "vec_b": 2, "vec_c": 2}
    ),
    "guarded, through registers, beta": (
        Problem(*GUARDED, beta=1), "sgemm", "register_staged",
        {"BK": 8, "edge": "guarded", "vec_b": 2, "vec_c": 2, "fragment_pipeline": 0},
    ),
    "odd sizes, cp_async": (Problem(*ODD, "nt", 1), "sgemm", "small_block", {**NARROW, "BK": 8}),
    "ladder: naive": (Problem(*EXACT), "naive", "naive", {}),
    "ladder: coalesced": (Problem(*GUARDED), "coalesced", "coalesced", {}),
    "ladder: shared_tile": (Problem(*GUARDED, "tt"), "shared_tile", "shared_tile", {}),
}  # fmt: skip

PLANTED = {  # tool of the sanitizer: a kernel, its text, and the mistake in its place that the tool must find
    "memcheck": ("guarded cp_async of 8 bytes", "row * ld + col, inside);", "row * ld + col + m * ld);"),
    "racecheck": ("one output per thread", "__syncthreads();  // nobody reads the tile any more", ""),
}

SURE = [  # every version of ncu has them
    "smsp__inst_executed.sum",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    *(f"smsp__inst_executed_op_shared_{kind}.sum" for kind in ("ld", "st")),
    *(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{kind}.sum" for kind in ("ld", "st")),
    *(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{kind}.sum" for kind in ("ld", "st")),
    *(f"l1tex__t_sectors_pipe_lsu_mem_global_op_{kind}.sum" for kind in ("ld", "st")),
    *(f"l1tex__t_requests_pipe_lsu_mem_global_op_{kind}.sum" for kind in ("ld", "st")),
]
METRICS = [  # the others are left out where ncu does not list them
    *SURE,
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts.sum",
    *(
        f"{stem}{part}.sum"
        for stem in (
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts",
            "l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts",
            "smsp__inst_executed_op_ldgsts",
        )
        for part in ("", "_cache_access", "_cache_bypass")
    ),
]
# What else ncu has on cp.async: counts of instructions, requests, sectors, wavefronts and conflicts.
LDGSTS = re.compile(
    r"(?:l1tex__|smsp__inst_executed|smsp__sass_)\w*(?:inst_executed|requests|sectors|wavefronts|conflicts)\w*ldgsts\w*"
)
_MOST_METRICS = 60


def built(name: str, arch: str, old: str = "", new: str = "") -> dict[str, Any]:
    """Render and compile a kernel, with ``old`` text replaced; "cubin" holds its machine code."""
    problem, family, preset, changes = KERNELS[name]
    space, device = Space.load(family), named_device("h200")
    start = FIRST if preset is None else space.presets[preset]
    rolled = {} if family != "sgemm" else {"unroll_stages": 0}
    config = space.config({**start, **rolled, **changes})
    source = render(space, config, problem, device)
    assert old in source.text
    binary = compile_text(source.text.replace(old, new) if old else source.text, source.entry, arch)
    assert isinstance(binary, Binary), f"{name}: {binary}"
    return {
        "name": name,
        "config": config.id,
        "problem": {
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "layout": problem.layout,
            "beta": problem.beta,
        },
        "entry": source.entry,
        "grid": source.launch.grid,
        "block": source.launch.block,
        "shared_bytes": source.launch.shared_bytes,
        "registers": binary.registers,
        "spill_bytes": binary.spill_bytes,
        "code_digest": source.code_digest,
        "ptx_sha256": hashlib.sha256(binary.ptx.encode()).hexdigest(),
        "ptx_xz": base64.b64encode(lzma.compress(binary.ptx.encode(), preset=9)).decode(),
        "cubin": base64.b64encode(binary.cubin).decode(),
    }


def operands(kernel: Mapping[str, Any]) -> tuple[Problem, list[np.ndarray]]:
    """The problem, and A, B and C."""
    problem = Problem(**kernel["problem"])
    random = np.random.default_rng(0)
    shapes = (problem.a_shape, problem.b_shape, problem.c_shape)
    return problem, [random.standard_normal(shape, np.float32) for shape in shapes]


def simulated(kernel: Mapping[str, Any]) -> dict[str, int]:
    """Simulate a kernel; return its counters that are not zero."""
    problem, (a, b, c) = operands(kernel)
    args = [np.float32(ALPHA), a, b, np.float32(BETA * problem.beta), c]
    grid, block = (tuple(kernel[name]) for name in ("grid", "block"))
    report = run_ptx(
        lzma.decompress(base64.b64decode(kernel["ptx_xz"])).decode(),
        kernel["entry"], grid, block, args, shared_bytes=kernel["shared_bytes"], counters=True,
    ).raise_if_faulty()  # fmt: skip
    assert report.counters is not None
    return {name: count for name, count in report.counters.metrics.items() if count}


def launch_all(path: Path) -> None:
    """Launch every kernel of a file once, and nothing else; refuse a wrong result. This runs under ncu."""
    from autotune.measure.cuda import Gpu, Multiplication

    gpu = Gpu(0)
    for kernel in json.loads(path.read_text())["kernels"]:
        problem, arrays = operands(kernel)
        memory = [gpu.allocate(array.nbytes) for array in arrays]
        for place, array in zip(memory, arrays, strict=True):
            gpu.upload(place.ptr, array)
        shape = tuple(kernel["grid"]), tuple(kernel["block"])
        launch = Launch.of(kernel["entry"], *shape, kernel["shared_bytes"])
        multiply = Multiplication(gpu, base64.b64decode(kernel["cubin"]), launch)
        a, b, c = arrays
        beta = BETA * problem.beta
        multiply(ALPHA, memory[0].ptr, memory[1].ptr, beta, memory[2].ptr)
        found = gpu.download(memory[2].ptr, c.size, np.float32).reshape(c.shape)
        op_a, op_b = (a if problem.layout[0] == "n" else a.T), (b if problem.layout[1] == "n" else b.T)
        wanted = ALPHA * (op_a.astype(np.float64) @ op_b.astype(np.float64)) + beta * c
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        if not error < 1e-5:
            raise SystemExit(f"{kernel['name']}: wrong result, relative error {error:.2g}")


def known_metrics(ncu: str, arch: str) -> list[str]:
    """Ask ncu which metrics it has: of `METRICS`, and more on cp.async; without an answer, `METRICS`."""
    chip = {"sm_80": "ga100", "sm_90": "gh100", "sm_100": "gb100", "sm_120": "gb202"}.get(arch)
    command = [ncu, "--query-metrics", *(["--chips", chip] if chip else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    bases = set(re.findall(r"^(\w+__\w+)", done.stdout, re.MULTILINE))
    if not bases:
        print(f"{' '.join(command)} lists nothing ({done.stderr.strip()[-200:]})", file=sys.stderr)
        return METRICS
    found = [metric for metric in METRICS if metric in SURE or metric.removesuffix(".sum") in bases]
    more = (f"{base}.sum" for base in sorted(bases) if LDGSTS.fullmatch(base))
    return list(dict.fromkeys([*found, *more]))[:_MOST_METRICS]


def profile(ncu: str, metrics: list[str], path: Path, folder: Path) -> list[dict[str, int | float]]:
    """Launch every kernel of a file under ncu; return each launch's metrics, in order.

    Metrics that ncu complains about are left out of a second attempt.
    """
    for attempt in range(2):
        log = folder / f"ncu_{attempt}.csv"
        command = [
            ncu, "--clock-control", "none", "--csv", "--page", "details", "--print-units", "base",
            "--target-processes", "all", "--log-file", str(log), "--metrics", ",".join(metrics),
            sys.executable, str(Path(__file__).resolve()), str(path), "--launch",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        text = log.read_text() if log.is_file() else ""
        launches = parse_ncu(text)
        if launches and not done.returncode:
            return launches
        said = "\n".join((done.stdout[-3000:], done.stderr[-3000:], text[-3000:]))
        print(f"ncu ended with {done.returncode}:\n{said}", file=sys.stderr)
        unknown = {metric for metric in metrics if re.search(rf"{re.escape(metric)}(?![\w.])", said)}
        metrics = [metric for metric in metrics if metric not in unknown]
        if not unknown or not metrics:
            break
    raise SystemExit("nothing was measured")


def parse_ncu(text: str) -> list[dict[str, int | float]]:
    """Read ``ncu --csv``, a row or a column per metric; return each launch's metrics, in order."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[int, dict[str, int | float]] = {}
    for row in csv.DictReader(lines):
        if not row["ID"].isdigit():  # the row of units
            continue
        found = launches.setdefault(int(row["ID"]), {})
        if "Metric Name" in row:
            row = {row["Metric Name"]: row["Metric Value"]}
        for name, value in row.items():
            number = (value or "").replace(",", "")
            if "__" in name and re.fullmatch(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", number):
                found[name] = int(float(number)) if float(number).is_integer() else float(number)
    return [launches[number] for number in sorted(launches)]


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document, without machine code."""
    bare = [
        {name: value for name, value in kernel.items() if name != "cubin"} for kernel in document["kernels"]
    ]
    path.write_text(json.dumps({**document, "kernels": bare}, indent=1) + "\n")
    print(f"{path}: {len(bare)} kernels, {path.stat().st_size} bytes")


def table(document: Mapping[str, Any]) -> str:
    """Compare the two sides: one line per metric, with the kernels on which they agree."""
    lines = []
    for metric in document["metrics"]:
        pairs = [
            (kernel["simulated"].get(metric, 0), kernel["hardware"][metric])
            for kernel in document["kernels"]
            if metric in kernel["hardware"]
        ]
        agree = sum(ours == theirs for ours, theirs in pairs)
        other = next((f"; first difference {pair}" for pair in pairs if pair[0] != pair[1]), "")
        lines.append(f"{metric}: {agree} of {len(pairs)} agree{other} (simulator, hardware)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="the JSON file to write (with --launch: to read)")
    parser.add_argument("--dry-run", action="store_true", help="launch nothing, fill in no hardware figures")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ncu", default="ncu", help="the profiler")
    chosen = parser.parse_args()
    if chosen.launch:
        launch_all(chosen.path)
        return
    device = named_device("h200") if chosen.dry_run else current_device(0)
    document: dict[str, Any] = {
        "measured_on": None if chosen.dry_run else device.name,
        "arch": device.arch,
        "nvrtc": nvrtc_version(),
        "ncu": None,
        "metrics": METRICS,
        "kernels": [built(name, device.arch) for name in KERNELS],
    }
    for kernel in document["kernels"]:
        kernel |= {"simulated": simulated(kernel), "hardware": {}}
    if not chosen.dry_run:
        version = subprocess.run([chosen.ncu, "--version"], capture_output=True, text=True, check=True).stdout
        document["ncu"] = (re.findall(r"\d+\.\d+\.\d+[.\d]*", version) or [version.strip()])[0]
        document["metrics"] = known_metrics(chosen.ncu, device.arch)
        with tempfile.TemporaryDirectory() as folder:
            bundle = Path(folder) / "kernels.json"
            bundle.write_text(json.dumps(document))
            launches = profile(chosen.ncu, document["metrics"], bundle, Path(folder))
        assert len(launches) == len(document["kernels"]), f"ncu saw {len(launches)} launches"
        for kernel, hardware in zip(document["kernels"], launches, strict=True):
            kernel["hardware"] = hardware
        print(table(document))
    write(chosen.path, document)


if __name__ == "__main__":
    main()
