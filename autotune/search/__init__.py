"""Turns the legal list and the times told so far into the next config to measure, through an Optuna study.

The legal list is enumerated, so no proposal is illegal and none is repeated; the study, its trials and its
tools are Optuna's. A strategy is a class with one method (`Strategy`):

========== ============================================================================================
gp         A Gaussian process over the list; the default.
tpe        Optuna's tree-structured Parzen estimator, each proposal projected to the nearest unseen point.
neighbours Hill climbing with restarts.
random     Uniform, without repetition.
exhaustive The list in its order.
========== ============================================================================================

gp is within 2 % of the optimum of two full sweeps after medians of 28 and 48 evaluations, tpe after 28 and
86, a random order after 94 and thousands (40 seeds; `autotune replay`, EXPERIMENTS.md).

Milliseconds of one core for one proposal with 12 points under way, Optuna's own 0.3 included; median, and
95 % quantile, of 400 by gp and 200 by the others, 14 parameters:

============ ========= ========= ========== =========
legal points gp        tpe       neighbours random
============ ========= ========= ========== =========
3,000        2.5, 5    3.0, 4    0.5, 1     0.3, 0.4
18,000       3.3, 5    3.2, 4    0.5, 1     0.3, 0.5
100,000      3.4, 6    3.6, 6    0.6, 1     0.3, 0.4
1,000,000    3.3, 5    6.9, 8    1.1, 1     0.3, 0.4
============ ========= ========= ========== =========

A million points take 0.26 s to begin with. gp fits its length scales anew when a fifth more points have a
time, 8 to 32 of them: that proposal takes up to 50 ms. A proposal is made in the process that runs the
pipeline, where compilers and the GPU go on meanwhile. NumPy's threads do not pay for matrices of this size,
and where every core compiles they wait for each other: the command line sets OPENBLAS_NUM_THREADS=1 unless
it is set.
"""

from autotune.search.projection import MISMATCH_COST, Projection
from autotune.search.search import (
    DEFAULT,
    STRATEGIES,
    WAIT,
    Search,
    Strategy,
    distributions,
    require_seed,
    require_strategy,
    strategy_name,
)

__all__ = [
    "DEFAULT",
    "MISMATCH_COST",
    "STRATEGIES",
    "WAIT",
    "Projection",
    "Search",
    "Strategy",
    "distributions",
    "require_seed",
    "require_strategy",
    "strategy_name",
]
