"""The simulator's counters against Nsight Compute's on an H200, for the very PTX that ran there."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import lzma
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FIGURES = Path(__file__).with_name("data") / "h200_counters.json"
SCRIPT = Path(__file__).with_name("gpu") / "measure_counters.py"
needs_figures = pytest.mark.skipif(
    not FIGURES.is_file(), reason=f"no {FIGURES.name}: tests/gpu/measure_counters.py measures it on an H200"
)

INSTRUCTIONS = "smsp__inst_executed.sum"
FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
SHARED_READS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
SHARED_WRITES = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"
GLOBAL = [
    f"l1tex__t_{count}_pipe_lsu_mem_global_op_{kind}.sum"
    for count in ("sectors", "requests")
    for kind in ("ld", "st")
]
EXACT = [FFMA, SHARED_WRITES, *GLOBAL]
# Shared reads meet others at work in the same unit: the hardware adds a few wavefronts of its own.
ADDED = 1.5e-3
# The compiler widens scalar reads of A along k, and 16-byte copies of short rows move more sectors.
UNLIKE = {"cp_async of 16 bytes": {SHARED_READS, "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"}}


@functools.cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_counters", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def document() -> dict[str, Any]:
    return json.loads(FIGURES.read_text())


@functools.cache
def kernel(name: str) -> dict[str, Any]:
    found = [kernel for kernel in document()["kernels"] if kernel["name"] == name]
    assert found, f"{FIGURES.name} lacks the kernel {name!r}: measure again by tests/gpu/measure_counters.py"
    return found[0]


@functools.cache
def simulated(name: str) -> dict[str, int]:
    return script().simulated(kernel(name))


NAMES = list(script().KERNELS)


@pytest.mark.parametrize("tool", script().PLANTED)
def test_a_kernel_with_a_mistake_for_the_sanitizer_compiles(tool: str) -> None:
    name, old, new = script().PLANTED[tool]
    assert script().built(name, "sm_90", old, new)["cubin"]


@needs_figures
def test_the_figures_are_measured_and_of_the_ptx_beside_them() -> None:
    assert document()["measured_on"].startswith("NVIDIA H200")
    assert document()["arch"] == "sm_90"
    assert {kernel["name"] for kernel in document()["kernels"]} == set(NAMES)
    for each in document()["kernels"]:
        text = lzma.decompress(base64.b64decode(each["ptx_xz"]))
        assert hashlib.sha256(text).hexdigest() == each["ptx_sha256"]
        assert set(EXACT) <= each["hardware"].keys()
    assert FIGURES.stat().st_size < 300_000


@needs_figures
@pytest.mark.parametrize("name", NAMES)
def test_traffic_and_ffmas_are_the_hardwares(name: str) -> None:
    hardware, ours = kernel(name)["hardware"], simulated(name)
    compared = [metric for metric in EXACT if metric not in UNLIKE.get(name, ())]
    assert {metric: ours.get(metric, 0) for metric in compared} == {
        metric: hardware[metric] for metric in compared
    }


@needs_figures
@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNLIKE])
def test_shared_reads_are_the_hardwares_but_for_what_it_adds(name: str) -> None:
    wavefronts, ours = kernel(name)["hardware"][SHARED_READS], simulated(name).get(SHARED_READS, 0)
    assert ours <= wavefronts <= (1 + ADDED) * ours


@needs_figures
def test_most_kernels_equal_the_hardware_in_every_number() -> None:
    compared = [*EXACT, SHARED_READS]
    equal = [
        name
        for name in NAMES
        if all(simulated(name).get(metric, 0) == kernel(name)["hardware"][metric] for metric in compared)
    ]
    assert len(equal) >= 11


@needs_figures
@pytest.mark.parametrize("name", NAMES)
def test_sass_has_about_as_many_instructions_as_ptx(name: str) -> None:
    ratio = kernel(name)["hardware"][INSTRUCTIONS] / simulated(name)[INSTRUCTIONS]
    assert 0.6 < ratio < 1.5


# -- the script that measures --------------------------------------------------------------------------------

LONG = """==PROF== Connected to process 77 (/usr/bin/python3.12)
==PROF== Profiling "sgemm" - 0: 0%....50%....100% - 7 passes
==PROF== Profiling "naive" - 1: 0%....50%....100% - 7 passes
==PROF== Disconnected from process 77
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","77","python3.12","127.0.0.1","sgemm","1","13","(256, 1, 1)","(4, 1, 1)","0","9.0","Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","8,192"
"0","77","python3.12","127.0.0.1","sgemm","1","13","(256, 1, 1)","(4, 1, 1)","0","9.0","Command line profiler metrics","smsp__inst_executed.sum","inst","164,512"
"1","77","python3.12","127.0.0.1","naive","1","13","(32, 32, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","0"
"1","77","python3.12","127.0.0.1","naive","1","13","(32, 32, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum","","n/a"
"1","77","python3.12","127.0.0.1","naive","1","13","(32, 32, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","smsp__inst_executed.sum","inst","12.50"
"""  # noqa: E501
RAW = """"ID","Process ID","Kernel Name","Block Size","smsp__inst_executed.sum","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
"","","","","inst","sector"
"0","77","sgemm","(256, 1, 1)","164512","8192"
"1","77","naive","(32, 32, 1)","12.5","0"
"""  # noqa: E501


@pytest.mark.parametrize("text", [LONG, RAW], ids=["rows", "columns"])
def test_the_profilers_output_is_read(text: str) -> None:
    sectors = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
    assert script().parse_ncu(text) == [
        {INSTRUCTIONS: 164512, sectors: 8192},
        {INSTRUCTIONS: 12.5, sectors: 0},
    ]


def profiler(tmp_path: Path, body: str) -> str:
    path = tmp_path / "ncu"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}")
    path.chmod(0o755)
    return str(path)


def test_metrics_that_the_profiler_does_not_know_are_left_out(tmp_path: Path) -> None:
    listing = "\\n".join(
        [
            "Device NVIDIA H200",
            "smsp__inst_executed            Counter  inst  # of warp instructions executed",
            "lts__t_sectors                 Counter  sector  ...",
            "smsp__inst_executed_op_ldgsts  Counter  inst  ...",
            "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ldgsts_new  Counter  ...",
            "l1tex__t_sectors_pipe_tex  Counter",
        ]
    )
    ncu = profiler(tmp_path, f'print("{listing}")')
    assert script().known_metrics(ncu, "sm_90") == [
        *script().SURE,
        "smsp__inst_executed_op_ldgsts.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ldgsts_new.sum",
    ]
    assert script().known_metrics(profiler(tmp_path, "sys.exit(1)"), "sm_90") == script().METRICS


def test_the_script_runs_the_profiler_on_itself(tmp_path: Path) -> None:
    ncu = profiler(
        tmp_path,
        "assert sys.argv[-1] == '--launch' and sys.argv[-3].endswith('measure_counters.py')\n"
        "metrics = sys.argv[sys.argv.index('--metrics') + 1].split(',')\n"
        "if 'b.sum' in metrics: print('==ERROR== Failed to find metric b.sum'); sys.exit(1)\n"
        "assert metrics == ['a.sum', 'bb.sum']\n"
        f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({LONG!r})\n",
    )
    metrics = ["a.sum", "b.sum", "bb.sum"]
    assert len(script().profile(ncu, metrics, tmp_path / "kernels.json", tmp_path)) == 2
    with pytest.raises(SystemExit, match="nothing was measured"):
        script().profile(profiler(tmp_path, "sys.exit(9)"), metrics, tmp_path / "k.json", tmp_path)


def test_without_a_gpu_the_script_simulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("one output per thread", "guarded cp_async of 8 bytes")
    monkeypatch.setattr(script(), "KERNELS", {name: script().KERNELS[name] for name in names})
    monkeypatch.setattr(sys, "argv", ["measure_counters.py", str(tmp_path / "out.json"), "--dry-run"])
    script().main()
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["measured_on"] is None
    assert [kernel["name"] for kernel in written["kernels"]] == list(names)
    for each in written["kernels"]:
        assert each["hardware"] == {}
        assert "cubin" not in each
        assert script().simulated(each) == each["simulated"]
    assert written["kernels"][0]["simulated"][FFMA] == 256 * 256 * 64
