"""The command line with the stub in the GPU's place: ``python stub_cli.py tune ...``."""

from __future__ import annotations

from functools import partial

from autotune.cli import main
from autotune.cli import tune as tune_command
from autotune.measure.worker import GpuWorker

if __name__ == "__main__":
    tune_command._absent = lambda ordinal, gpus, target: (None, [0], "")

    def patched():
        from autotune.tuning import tuner

        tuner.GpuWorker = partial(GpuWorker, service="stub_gpu:serve_hashed")

    patched()
    main()
