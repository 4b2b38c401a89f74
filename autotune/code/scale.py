"""The kernel that scales C and reads neither A nor B."""

from __future__ import annotations

import hashlib
from pathlib import Path

from autotune.code.render import Source
from autotune.space.space import Config
from autotune.values.measurement import KernelLaunch, Launch
from autotune.values.problem import Problem

THREADS = 256  # as in scale.cu
MOST_BLOCKS = 1056  # eight for each of 132 SMs


def scaling(problem: Problem) -> Source:
    """Return the kernel that computes C = beta C, on beta and C alone.

    Args:
        problem: Of its facts only those of C count.
    """
    facts = {name: getattr(problem, name) for name in ("batch", "m", "n", "ldc", "stride_c")}
    text = Path(__file__).with_name("scale.cu").read_text(encoding="utf-8")
    text = "".join(f"constexpr long long {name} = {value};\n" for name, value in facts.items()) + text
    digest = hashlib.sha256(text.encode()).hexdigest()
    blocks = min(-(-problem.batch * problem.m * problem.n // THREADS), MOST_BLOCKS)
    return Source(
        family="scale",
        config=Config({}),
        problem=problem,
        text=text,
        entry="scale",
        launch=Launch((KernelLaunch("scale", (blocks, 1, 1), (THREADS, 1, 1), 0, ("beta", "c")),)),
        code_digest=digest,
        template_digest=digest,
        space_digest=digest,
    )
