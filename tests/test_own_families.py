"""Families of the user's own, with their own names for tiles: tuned, explained, and told what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import SpaceError, TuningError
from autotune.measure.proof import miniatures
from autotune.paths import data_dir
from autotune.report.explain import explain
from autotune.space.space import Space
from autotune.tuning.budget import Budget
from autotune.tuning.request import Request
from autotune.tuning.tuner import run
from autotune.values.device import known_devices
from autotune.values.problem import Problem

H200 = known_devices()["h200"]
PROBLEM = Problem(384, 384, 288)

SPACE = """
family = "mine"
summary = "C = alpha A B, a square tile of TILE for a block"

[parameters]
TILE = { values = [48], meaning = "extent of the block's tile of C" }
STEP = { values = [24, 48], meaning = "depth of one step along k" }

[constraints]
whole_m = { expr = "m % TILE == 0", reason = "no guards" }
whole_n = { expr = "n % TILE == 0", reason = "no guards" }
whole_k = { expr = "k % STEP == 0", reason = "no guards" }
nn = { expr = "layout_a == 'n' and layout_b == 'n'", reason = "no other is written" }

[launch]
grid = "m // TILE * (n // TILE)"
block = "TILE * TILE // 9"
shared_bytes = "0"

[presets.one]
TILE = 48
STEP = 24
"""
TEMPLATE = """
extern "C" __global__ void {{ family }}(
    float alpha, const float* A, const float* B, float beta, float* C)
{
    constexpr int T = {{ TILE }}, S = {{ STEP }}, N = {{ n }}, K = {{ k }};
    __shared__ float As[T][S], Bs[S][T];
    const int row = blockIdx.x / (N / T) * T, col = blockIdx.x % (N / T) * T;
    const int x = threadIdx.x % (T / 3), y = threadIdx.x / (T / 3);
    float sum[3][3] = {};
    for (int step = 0; step < K; step += S) {
        for (int i = threadIdx.x; i < T * S; i += T * T / 9) {
            As[i / S][i % S] = A[(row + i / S) * K + step + i % S];
            Bs[i / T][i % T] = B[(step + i / T) * N + col + i % T];
        }
        __syncthreads();
        for (int k = 0; k < S; ++k)
            for (int i = 0; i < 3; ++i)
                for (int j = 0; j < 3; ++j) {
                    unsigned long long pair;
                    asm("mov.b64 %0, {%1, %2};" : "=l"(pair) : "f"(As[y * 3 + i][k]), "f"(Bs[k][x * 3 + j]));
                    sum[i][j] += __uint_as_float(pair) * __uint_as_float(pair >> 32);
                }
        __syncthreads();
    }
    for (int i = 0; i < 3; ++i)
        for (int j = 0; j < 3; ++j) {
            const int at = (row + y * 3 + i) * N + col + x * 3 + j;
            C[at] = alpha * sum[i][j]{{ " + beta * C[at]" if beta }};
        }
}
"""


def family(folder: Path, template: str = TEMPLATE) -> Space:
    (folder / "mine.toml").write_text(SPACE)
    (folder / "mine.cu.jinja").write_text(template)
    return Space.load(folder / "mine.toml")


def foresee(space: Space, root: Path):
    return run(PROBLEM, Request(budget=Budget.of("4"), target=H200, space=space, root=root, workers=1))


def test_a_family_with_names_of_its_own_is_proven_and_explained(tmp_path):
    space = family(tmp_path)
    config = space.config(space.presets["one"])
    (small, *_) = miniatures(space, config, PROBLEM, H200)
    assert (small.m, small.n, small.k) == (96, 96, 96)
    record = foresee(space, tmp_path / "records")
    assert "simulated at 96 x 96 x 96" in record.verification.inputs
    told = explain(space, space.config(record.config), PROBLEM, H200)
    assert (told.miniature.m, told.miniature.n, told.miniature.k) == (48, 48, 96)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{{ TILE }}", "{{ TILES }}", r"mine\.cu\.jinja: line 5: 'TILES' is no parameter"),
        ("{{ STEP }}", "{{ STEP }", r"mine\.cu\.jinja: line 5: does not parse"),
        ("if beta }}", "if beta and no_such }}", r"mine\.cu\.jinja: line 28: 'no_such' is no parameter"),
        ("{\n    constexpr", '{\n{% include "not_there.jinja" %}\n    constexpr', "not_there"),
    ],
)
def test_a_template_that_cannot_render_is_one_error_at_once(tmp_path, old, new, says):
    assert old in TEMPLATE
    with pytest.raises(SpaceError, match=says):
        foresee(family(tmp_path, TEMPLATE.replace(old, new)), tmp_path / "records")


def test_names_that_a_template_gives_itself_or_asks_for_are_no_error(tmp_path):
    more = (
        "{% set mine = 3 %}{% macro twice(x) %}{{ x * 2 }}{% endmacro %}{% for i in range(2) %}"
        "// {{ loop.index }} {{ mine }} {{ twice(i) }} {{ nothing | default(1) }}\n{% endfor %}"
        "{% if other is defined %}{{ other }}{% endif %}\n"
    )
    foresee(family(tmp_path, more + TEMPLATE), tmp_path / "records")


def test_when_every_proof_fails_what_was_rejected_is_listed(tmp_path):
    wrong = TEMPLATE.replace("        __syncthreads();\n        for (int k", "        for (int k")
    with pytest.raises(TuningError) as caught:
        foresee(family(tmp_path, wrong), tmp_path / "records")
    message = str(caught.value)
    assert message.startswith("none of the 2 best estimates proved right in the simulator: ")
    assert message.count("(correctness: simulated at ") == 2
    assert message.count("shared-race: ") == 2


def test_built_in_templates_name_only_what_exists():
    from autotune.code.render import require_template

    for path in data_dir("search_spaces").glob("*.toml"):
        space = Space.load(path.stem)
        for problem in (Problem(512, 512, 512), Problem(512, 512, 512, math="3xtf32"), Problem(16, 512, 512)):
            try:
                config = space.enumerate(problem, H200).config(0)
            except SpaceError:
                continue
            require_template(space, config, problem, H200)
            break
        else:
            pytest.fail(path.stem)
