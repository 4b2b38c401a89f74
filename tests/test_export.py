"""Exported files: compiled as C, C++ and CUDA, the kernels and the self-check executed in the simulator."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from autotune.cli import export as command
from autotune.code.compiler import Binary, compile_text
from autotune.code.depot import Depot
from autotune.code.render import render
from autotune.errors import RecordMissing, UsageError
from autotune.kernel.choices import Choice
from autotune.records import Store
from autotune.report.export import Export, cubin_files, cuda_file, header_file, to_export
from autotune.simulator import run_ptx
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.measurement import KernelLaunch, Launch
from autotune.values.problem import LAYOUTS, Problem

H200 = named_device("h200")
SMALL = Problem(33, 17, 20)
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed: apt install gcc")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: install CUDA")


def preset(problem, name="tiny_block"):
    space = Space.load("sgemm")
    config = space.fitted(space.presets[name], problem, H200)
    return Export(Choice("default", space, config, None, render(space, config, problem, H200)), H200)


def with_launch(export, **changes):
    source = export.choice.source
    kernel = source.launch.kernels[0]
    facts = {"grid": kernel.grid, "block": kernel.block, "shared_bytes": kernel.shared_bytes, **changes}
    launch = Launch.of(kernel.entry, **facts)
    return replace(export, choice=replace(export.choice, source=replace(source, launch=launch)))


def run(*words, cwd):
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def operands(problem):
    random = np.random.default_rng(1)
    return [random.standard_normal(shape).astype(np.float32) for shape in problem.arrays]


def product(problem, a, b):
    op_a, op_b = (
        m if letter == "n" else m.swapaxes(-1, -2) for m, letter in zip((a, b), problem.layout, strict=True)
    )
    return op_a.astype(np.float64) @ op_b


# -- the CUDA file -------------------------------------------------------------------------------------------


def test_names_are_those_of_the_problem():
    assert preset(SMALL).name == "autotune_sgemm_nn_33_17_20"
    assert preset(replace(SMALL, layout="nt", beta=1)).name == "autotune_sgemm_nt_33_17_20_beta"
    assert preset(replace(SMALL, beta=1, batch=8)).name == "autotune_sgemm_nn_33_17_20_batch8_beta"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_in_the_file_is_the_kernel(layout):
    problem = replace(SMALL, layout=layout, beta=1)
    export = preset(problem)
    source = export.choice.source
    binary = compile_text(cuda_file(export), export.kernel("sgemm"), "sm_90")
    original = compile_text(source.text, source.entry, "sm_90")
    assert isinstance(binary, Binary), binary
    assert (binary.registers, binary.spill_bytes, binary.shared_bytes) == (
        *(original.registers, original.spill_bytes),
        original.shared_bytes,
    )
    a, b, c = operands(problem)
    expected = 1.5 * product(problem, a, b) - 0.5 * c
    arguments = np.float32(1.5), a, b, np.float32(-0.5), c
    launch = source.launch
    run_ptx(
        *(binary.ptx, export.kernel("sgemm"), launch.grid, launch.block, arguments),
        shared_bytes=launch.shared_bytes,
    ).raise_if_faulty()
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)


def test_only_what_a_launch_needs_is_in_its_function():
    plain = cuda_file(with_launch(preset(SMALL), shared_bytes=49152))
    assert "if (beta != 0.0f) return AUTOTUNE_BETA;" in plain
    assert "MaxDynamicSharedMemorySize" not in plain
    assert "return AUTOTUNE_WORKSPACE" not in plain
    assert "{&alpha, &A, &B, &beta, &C};" in plain
    needy = cuda_file(
        with_launch(preset(replace(SMALL, beta=1)), shared_bytes=49153, workspace_bytes=4096, grid=(7, 1, 1))
    )
    assert "return AUTOTUNE_BETA" not in needy
    assert "cudaFuncAttributeMaxDynamicSharedMemorySize, 49153)" in needy
    assert "if (workspace == nullptr) return AUTOTUNE_WORKSPACE;" in needy
    assert "{&alpha, &A, &B, &beta, &C, &workspace};" in needy
    assert "return 4096;" in needy
    assert "dim3(7, 1, 1)" in needy


@needs_nvcc
def test_two_files_compile_and_link_into_one_program(tmp_path):
    exports = [preset(SMALL), preset(replace(SMALL, layout="tt", beta=1))]
    (tmp_path / "all.h").write_text(header_file(exports, "all.h"))
    words = ["nvcc", "-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-include", "all.h"]
    for export in exports:
        (tmp_path / f"{export.name}.cu").write_text(cuda_file(export))
        words.append(f"{export.name}.cu")
    (tmp_path / "main.cu").write_text(
        'int main() { return autotune_sgemm("nn", 33, 17, 20, 1, 0, 0, 0, 0, 0, 0) != AUTOTUNE_NULL; }'
    )
    run(*words, "main.cu", "-o", "program", cwd=tmp_path)
    run(tmp_path / "program", cwd=tmp_path)


@needs_nvcc
@pytest.mark.parametrize(
    "problem",
    [Problem(1, 4096, 512, "tn"), Problem(4095, 4095, 4095), Problem(4096, 4096, 4096, math="3xtf32")],
    ids=str,
)
def test_a_file_compiles_as_it_says(problem, tmp_path):
    text = cuda_file(to_export(problem, H200, Store(), substitute=True))
    (tmp_path / "kernel.cu").write_text(text)
    command = re.search(r"// Compile: (nvcc .*) -c ", text)
    run(*command[1].split(), "-Werror", "all-warnings", "-c", "kernel.cu", cwd=tmp_path)


@needs_nvcc
@pytest.mark.parametrize(
    "problem",
    [replace(SMALL, layout="nt", beta=1), Problem(3, 5, 7, "tn"), Problem(9, 5, 7, "nt", batch=4)],
    ids=str,
)
def test_the_self_check_sees_what_is_right_and_what_is_wrong(problem, tmp_path):
    export = preset(problem)
    (tmp_path / "check.cu").write_text(cuda_file(export))
    flags = ["-std=c++17", "-arch=sm_90", "-DAUTOTUNE_SELF_CHECK"]
    run("nvcc", *flags, "-ptx", "check.cu", "-o", "check.ptx", cwd=tmp_path)
    ptx = (tmp_path / "check.ptx").read_text()
    names = re.findall(r"\.entry (\w+)", ptx)
    fill, compare = (next(name for name in names if part in name) for part in ("4fill", "7compare"))

    def launch(name, blocks, threads, *arguments, shared_bytes=0):
        run_ptx(ptx, name, blocks, (threads, 1, 1), arguments, shared_bytes=shared_bytes).raise_if_faulty()

    a, b, c = (np.full(m.shape, np.nan, np.float32) for m in operands(problem))
    for seed, matrix in enumerate((a, b, c), 1):
        if seed < 3 or problem.beta:
            launch(fill, 2, 256, matrix, np.int64(matrix.size), np.uint32(seed))
    assert -1 <= a.min() < -0.7 < 0.7 < a.max() <= 1
    scalars = np.float32(1.25), np.float32(-0.75 * problem.beta)
    source = export.choice.source
    shared = source.launch.shared_bytes
    launch(
        *(export.kernel("sgemm"), source.launch.grid, source.launch.block[0]),
        *(scalars[0], a, b, scalars[1], c),
        shared_bytes=shared,
    )
    groups = -(-c.size // 32)

    def worst():
        found = np.zeros(1, np.uint32)
        arguments = a, b, c, *scalars, np.uint32(3), np.int64(groups), found
        launch(compare, -(-groups // 8), 256, *arguments)
        return float(found.view(np.float32)[0])

    assert 0 < worst() < 0.5
    scaled = c.copy()
    launch(f"{export.name}_scale", 2, 256, np.float32(-0.5), scaled)
    np.testing.assert_array_equal(scaled, np.float32(-0.5) * c)
    launch(f"{export.name}_scale", 1, 256, np.float32(0), scaled)
    assert not scaled.any()
    for place in [(*[number] * (c.ndim - 2), *at) for number, at in enumerate(((0, 0), (-1, -1), (1, 2)))]:
        kept = c[place]
        c[place] = kept + np.float32(1e-3)
        assert worst() > 1
        c[place] = np.nan
        assert worst() == np.inf
        c[place] = kept


# -- the header ----------------------------------------------------------------------------------------------

PROGRAM = """
#include "all.h"
#include "all.h"
#include <stdio.h>

typedef struct CUstream_st* Stream;
static float alpha_seen, beta_seen;
#define STUB(name, bytes) \\
    int name(float alpha, const float* A, const float* B, float beta, float* C, void* w, Stream s) \\
    { \\
        (void)A; (void)B; (void)C; (void)w; (void)s; \\
        alpha_seen = alpha; beta_seen = beta; \\
        return bytes + 1; \\
    } \\
    size_t name##_workspace_bytes(void) { return bytes; }
#ifdef __cplusplus
extern "C" {
#endif
STUB(autotune_sgemm_nn_33_17_20, 0)
STUB(autotune_sgemm_nn_33_17_20_beta, 64)
STUB(autotune_sgemm_tt_33_17_20_beta, 128)
STUB(autotune_sgemm_nn_33_17_20_batch6, 192)
#ifdef __cplusplus
}
#endif

int main(void)
{
    float one = 1;
    printf("%d ", autotune_sgemm("nn", 33, 17, 20, 2, &one, &one, 0, &one, NULL, NULL));
    printf("%d ", autotune_sgemm("nn", 33, 17, 20, 2, &one, &one, 3, &one, NULL, NULL));
    printf("%g %g ", alpha_seen, beta_seen);
    printf("%d ", autotune_sgemm("tt", 33, 17, 20, 2, &one, &one, 0, &one, NULL, NULL));
    printf("%d ", autotune_sgemm("nt", 33, 17, 20, 2, &one, &one, 0, &one, NULL, NULL));
    printf("%d ", autotune_sgemm("nn", 33, 17, 21, 2, &one, &one, 0, &one, NULL, NULL));
    printf("%d ", autotune_sgemm_batch("nn", 6, 33, 17, 20, 2, &one, &one, 0, &one, NULL, NULL));
    printf("%d ", autotune_sgemm_batch("nn", 5, 33, 17, 20, 2, &one, &one, 0, &one, NULL, NULL));
    printf("%d ", autotune_sgemm_batch("nn", 0, 33, 17, 20, 2, NULL, NULL, 0, NULL, NULL, NULL));
    printf("%d ", (int)autotune_sgemm_batch_workspace_bytes("nn", 6, 33, 17, 20, 0));
    printf("%d ", autotune_sgemm("nt", 33, 17, 0, 2, NULL, NULL, 3, &one, NULL, NULL));
    printf("%g %g ", alpha_seen, beta_seen);
    printf("%d ", autotune_sgemm("nn", 33, 18, 0, 2, NULL, NULL, 3, &one, NULL, NULL));
    printf("%d ", autotune_sgemm("nn", 0, 17, 20, 2, NULL, NULL, 3, NULL, NULL, NULL));
    printf("%d %d\\n", (int)autotune_sgemm_workspace_bytes("nn", 33, 17, 20, 1),
           (int)autotune_sgemm_workspace_bytes("nn", 1, 1, 1, 1));
    return 0;
}
"""


@needs_nvcc
def test_a_sequence_of_kernels_is_launched_in_order(tmp_path):
    export = with_launch(preset(SMALL), workspace_bytes=16)
    source = export.choice.source
    scan = KernelLaunch("scan", (3, 1, 1), (64, 1, 1), 0, ("b", "workspace"))
    launch = Launch((scan, *source.launch.kernels), 16)
    text = source.text + 'extern "C" __global__ void scan(const float* B, float* w) { w[0] = B[0]; }\n'
    text = text.replace("float* __restrict__ C)", "float* __restrict__ C, float* workspace)")
    source = replace(source, launch=launch, text=text)
    written = cuda_file(replace(export, choice=replace(export.choice, source=source)))
    names = [f"{export.name}_scan", f"{export.name}_kernel"]
    places = [written.index(f"_parts::{name};") for name in names]
    assert places == sorted(places)
    assert "{&B, &workspace};" in written
    (tmp_path / "both.cu").write_text(written)
    run("nvcc", "-std=c++17", "-arch=sm_90", "-ptx", "both.cu", "-o", "both.ptx", cwd=tmp_path)
    assert {*names} <= {*re.findall(r"\.entry (\w+)", (tmp_path / "both.ptx").read_text())}


@needs_gcc
@pytest.mark.parametrize(
    "compiler", [["gcc", "-std=c99"], ["gcc", "-std=c17"], ["g++", "-std=c++17", "-xc++"]]
)
def test_the_header_dispatches_in_c_and_in_cpp(compiler, tmp_path):
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not installed")
    exports = [
        preset(SMALL),
        with_launch(preset(replace(SMALL, beta=1)), workspace_bytes=64),
        with_launch(preset(replace(SMALL, layout="tt", beta=1)), workspace_bytes=128),
        with_launch(preset(replace(SMALL, batch=6)), workspace_bytes=192),
    ]
    (tmp_path / "all.h").write_text(header_file(exports, "all.h"))
    (tmp_path / "one.h").write_text(header_file(exports[:1], "one.h"))
    (tmp_path / "main.c").write_text('#include "one.h"\n' + PROGRAM)
    run(*compiler, "-Wall", "-Wextra", "-Werror", "-pedantic", "main.c", "-o", "main", cwd=tmp_path)
    assert run(tmp_path / "main", cwd=tmp_path).split() == [
        *("1", "65", "2", "3", "129", "-5", "-5"),
        *("193", "-5", "0", "192"),
        *("1", "0", "3", "-5", "0"),
        *("64", "0"),
    ]


def test_one_kernel_needs_no_dispatcher():
    header = header_file([preset(SMALL)], "one-kernel.h")
    assert "#ifndef ONE_KERNEL_H" in header
    assert "int autotune_sgemm_nn_33_17_20(" in header
    assert "autotune_sgemm_find" not in header


# -- machine code, choices, the command ----------------------------------------------------------------------


def test_machine_code_comes_with_its_launch(tmp_path):
    export = preset(SMALL)
    code, launch = cubin_files(export, Depot(tmp_path))
    facts = json.loads(launch)
    assert code.startswith(b"\x7fELF")
    (kernel,) = facts["kernels"]
    assert kernel["entry"] == "sgemm"
    assert kernel["entry"].encode() in code
    assert (facts["arch"], facts["alignment"]) == ("sm_90", 16)
    assert kernel["grid"] == list(export.choice.source.launch.grid)
    assert kernel["arguments"] == [
        *("float alpha", "const float* A", "const float* B", "float beta", "float* C")
    ]
    assert facts["problem"]["m"] == 33


def test_without_a_record_nothing_is_exported_unless_asked(tmp_path):
    with pytest.raises(RecordMissing, match="autotune tune --m 33 --n 17 --k 20', or add --any"):
        to_export(SMALL, H200, Store(tmp_path))
    export = to_export(SMALL, H200, Store(tmp_path), substitute=True)
    assert export.choice.served != "exact"
    assert "not measured" in export.origin


def test_the_command_writes_the_files_it_names(tmp_path):
    out = tmp_path / "new" / "folder"
    words = ["--m", "33", "--n", "17", "--k", "20", "--target", "h200", "--any", "--out", str(out)]
    done = CliRunner().invoke(command.command, words)
    assert done.exit_code == 0, done.output
    stem = "autotune_sgemm_nn_33_17_20"
    assert done.stdout.splitlines() == [str(out / f"{stem}.cu"), str(out / f"{stem}.h")]
    assert {path.name for path in out.iterdir()} == {f"{stem}.cu", f"{stem}.h"}
    done = CliRunner().invoke(command.command, [*words, "--format", "cubin"])
    assert {path.suffix for path in out.iterdir()} == {".cu", ".h", ".cubin", ".json"}


def test_a_suite_gives_one_header(tmp_path):
    suite = tmp_path / "mine.toml"
    suite.write_text("".join(f'[[shape]]\nid = "{m}"\nm = {m}\nn = 17\nk = 20\n' for m in (33, 34)))
    words = ["--suite", str(suite), "--format", "header", "--target", "h200", "--any", "--out", str(tmp_path)]
    done = CliRunner().invoke(command.command, words)
    assert done.stdout.split() == [str(tmp_path / "autotune_kernels.h")]
    header = (tmp_path / "autotune_kernels.h").read_text()
    assert '{"nn", 1, 34, 17, 20, 0,' in header


@pytest.mark.parametrize("form", ["cuda", "cubin", "header"])
@pytest.mark.parametrize("obstacle", ["file", "no rights", "full"])
def test_a_folder_that_cannot_be_written_is_one_line(form, obstacle, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if obstacle == "file":
        (tmp_path / "out").write_text("")
        out = tmp_path / "out" / "below"
    elif obstacle == "no rights":
        monkeypatch.setattr("autotune.report.export.cubins.load_or_compile", None)  # nothing is compiled
        refused = PermissionError(13, "Permission denied", str(out))
        monkeypatch.setattr(Path, "mkdir", lambda *words, **named: (_ for _ in ()).throw(refused))
    else:
        full = OSError(28, "No space left on device")
        monkeypatch.setattr("autotune.cli.export.write_file", lambda *words: (_ for _ in ()).throw(full))
    words = ["--m", "33", "--n", "17", "--k", "20", "--target", "h200", "--any", "--out", str(out)]
    done = CliRunner().invoke(command.command, [*words, "--format", form])
    assert isinstance(done.exception, UsageError)
    said = str(done.exception)
    assert said.startswith(f"--out {out} cannot be written (")
    assert said.endswith("): give another folder")
    assert "\n" not in said
