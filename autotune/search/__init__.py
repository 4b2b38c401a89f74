"""Search strategies: which legal config to measure next, given the times measured so far.

The legal configs are enumerated, so no proposal is illegal and none is repeated; the study, its trials and
its tools are Optuna's. A strategy is a class with one method (`Strategy`):

========== ============================================================================================
gp         A Gaussian process over the list; the default.
tpe        Optuna's tree-structured Parzen estimator, each proposal projected to the nearest unseen point.
neighbours Hill climbing with restarts.
random     Every point in a random order.
exhaustive Every point in the order of the list.
========== ============================================================================================

gp comes within 2 % of the optimum of two full sweeps after 28 and 48 evaluations (median of 40 seeds), tpe
after 28 and 86, a random order after 94 and thousands (`autotune replay`, EXPERIMENTS.md).

Milliseconds of CPU for one proposal, with 14 parameters and 12 points under way: median and 95 % quantile of
400 proposals of gp and 200 of each other strategy; 0.3 ms of each is Optuna's own.

============ ========= ========= ========== =========
legal points gp        tpe       neighbours random
============ ========= ========= ========== =========
3,000        2.5, 5    3.0, 4    0.5, 1     0.3, 0.4
18,000       3.3, 5    3.2, 4    0.5, 1     0.3, 0.5
100,000      3.4, 6    3.6, 6    0.6, 1     0.3, 0.4
1,000,000    3.3, 5    6.9, 8    1.1, 1     0.3, 0.4
============ ========= ========= ========== =========

Starting a search of a million points takes 0.26 s. gp fits its length scales again each time the number of
measured points has grown by a fifth, by 8 to 32 points: that proposal takes up to 50 ms. Proposals are made
in the process that runs the pipeline, while compilers and the GPU go on. NumPy's threads do not pay for
matrices of this size, and they wait for each other where every core compiles: the command line sets
OPENBLAS_NUM_THREADS=1 unless the user has set it.
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
