"""The problems on which the presets of `sgemm` have their history: their figures in the space file."""

from __future__ import annotations

from autotune.space.space import Space
from autotune.values.problem import Problem

_OTHERS = {
    "tiny_block": Problem(128, 128, 128),
    "light_block": Problem(1000, 1000, 1000),
    "nt_block": Problem(4096, 4096, 4096, "nt"),
    "split_block": Problem(1536, 1536, 4096, "tt"),
    "large_square": Problem(2176, 2048, 8192, "nt"),
    "turned_block": Problem(8192, 8192, 8192),
    "turned_across": Problem(4096, 4096, 4096, "nt"),
    "shallow_block": Problem(65536, 64, 64),
    "split_slim": Problem(1760, 128, 1760, beta=1),
    "turning_tiny": Problem(256, 256, 256),
    "turning_small": Problem(512, 512, 512),
    "cluster_slim": Problem(1760, 128, 1760, beta=1),
    "cluster_small": Problem(64, 512, 2048),
    "deep_block": Problem(64, 64, 64000, "nt"),
    "thin_kept": Problem(32, 18944, 3584, "nt"),
    "thin_mixed": Problem(32, 4096, 4096, "nt"),
    "thin_deep": Problem(32, 4096, 4096, "nt"),
    "thin_across": Problem(32, 4096, 4096),
    "thin_shared": Problem(32, 18944, 3584, "nt"),
    "odd_block": Problem(1760, 7133, 1760, "nt", 1),
    "odd_split": Problem(1021, 1021, 1021, "nt", 1),
    "shared_large": Problem(3728, 928, 7392, "nt"),
    "shared_square": Problem(3552, 736, 6320, "nt"),
    "shared_slim": Problem(592, 928, 4160, "nt"),
    "shared_thin": Problem(35, 8457, 2560, beta=1),
    "turning_block": Problem(1024, 1024, 1024),
    "turning_eight": Problem(512, 512, 512),
}
PROBLEMS = {name: _OTHERS.get(name, Problem(4096, 4096, 4096)) for name in Space.load("sgemm").presets}
