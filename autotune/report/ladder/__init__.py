"""The ladder: from the naive kernel to the tuned one, one change per step: counted, timed, explained."""

from autotune.report.ladder.climber import climb, describe, measure
from autotune.report.ladder.reasons import per_ffma, why_slower
from autotune.report.ladder.rung import NOISE, Ladder, Rung
from autotune.report.ladder.step import WINNER, Step, configured_steps, fitted_step, step_config, steps

__all__ = [
    "NOISE",
    "WINNER",
    "Ladder",
    "Rung",
    "Step",
    "climb",
    "configured_steps",
    "describe",
    "fitted_step",
    "measure",
    "per_ffma",
    "step_config",
    "steps",
    "why_slower",
]
