"""Files of measured configs, of this package and of other tuners: read as a `Sweep`, and written from one.

=============== ============================== ===========================================================
form            file                           holds
=============== ============================== ===========================================================
csv             x.csv, x.csv.gz                a column for each parameter, ``median_ms``; see `table`
trials          x.trials.jsonl                 the log of a search
t4              x.json, x.json.gz              T4 results, as Kernel Tuner and autotuning_methodology have it
kernel-tuner    x.json, x.json.gz              a cache file of Kernel Tuner, also one that was not closed
=============== ============================== ===========================================================
"""

from autotune.sweep.files import FORMS, form_of, left_out, read_sweep, write_sweep
from autotune.sweep.sweep import About, Point, Sweep

__all__ = ["FORMS", "About", "Point", "Sweep", "form_of", "left_out", "read_sweep", "write_sweep"]
