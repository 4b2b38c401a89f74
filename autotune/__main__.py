"""``python -m autotune``: the command line without its script."""

from autotune.cli import main

main()
