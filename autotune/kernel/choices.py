"""The configs that could compute a problem on a device, the most trusted first: records, then predictions.

The order: a record of this problem on this device, and the finalists of its search; the points that the model
expects to be fastest; the presets. Only measured records count, and the user's own come before those of the
package. It takes neither GPU nor compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune import records
from autotune.code.render import Source
from autotune.code.sources import rendered
from autotune.errors import ConfigError, RecordError, SpaceError, UsageError
from autotune.families.estimate import estimate_columns
from autotune.records import Record, Store
from autotune.space.space import Config, Space, families, unserved
from autotune.values.device import Device
from autotune.values.lazy import cached_property
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.search.prediction import Predicted
    from autotune.tuning.prediction import Prediction

Served = Literal["exact", "predicted"]


@dataclass(frozen=True)
class Choice:
    """One config that computes the problem on the device.

    Attributes:
        served: "exact" if it was measured for this very problem and device, else "predicted".
        space: Its family.
        config: Legal for the problem on the device.
        record: The record it comes from; None where the config is of none.
        source: Rendered for the problem.
        point: What the model expects of it; None where it is not the model's choice.
        note: What there is to know of a prediction, one line; "" for nothing.
    """

    served: Served
    space: Space
    config: Config
    record: Record | None
    source: Source
    point: Predicted | None = None
    note: str = ""

    @property
    def is_winner(self) -> bool:
        """Whether its config is the record's, which may be older than a parameter, and no finalist's."""
        return self.record is not None and self.config == self.space.config(self.record.config)

    @property
    def place(self) -> str:
        """Where its config comes from, in words."""
        if self.record is None:
            preset = self.config in self.space.presets.values()
            return f"a preset of {self.space.family}" if preset else f"a prediction of {self.space.family}"
        what = "the record" if self.is_winner else "a finalist of the record"
        return f"{what} of {self.record.problem} on {self.record.device.name}"


class Choices:
    """The configs that could compute a problem on a device.

    Args:
        problem: The multiplication to compute.
        device: The GPU to compute it on.
        spaces: Families to look at; all built-in ones that serve the problem when not given.
        store: Where records are looked up.
        begin: Called before anything is predicted anew: whatever else takes its time may begin then.

    Attributes:
        problem: As given.
        device: As given.
        store: As given.
        spaces: The families.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        store: Store,
        *,
        spaces: Sequence[Space] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.problem = problem
        self.device = device
        self.spaces = families(problem, device) if spaces is None else list(spaces)
        for space in self.spaces:
            space.require_math(problem)
        self.store = store
        self._asked = spaces
        self._begin = begin
        self._winners, self._refused = self._looked_up()

    def exact(self) -> Iterator[Choice]:
        """Yield what was measured for this problem on this device: winners, then finalists, fastest first.

        The records of the user's folder go first, all of them.
        """
        for winners in self._winners:
            yield from winners
            for winner in winners:
                assert winner.record is not None
                for each in winner.record.runners_up:
                    choice = self._fitted("exact", winner.space, each.config, winner.record, adapt=False)
                    if choice is not None and choice.source.code_digest == each.code_digest:
                        yield choice

    def missing(self) -> str:
        """Return in one line why there is nothing exact."""
        told = "; ".join(self._refused) or f"no record of {self.problem} on {self.device.name}"
        names = [space.family for space in self.spaces]
        with suppress(RecordError):
            if self.store.best(self.device, names, self.problem, estimated=True) is not None:
                told += " (there is an estimated one, which is never served)"
        return told

    @property
    def command(self) -> str:
        """The command that searches for what is missing."""
        only = self._asked[0] if self._asked and len(self._asked) == 1 else None
        return f"autotune tune {self.problem.cli_flags()}{'' if only is None else f' {only.flag}'}"

    def all(self) -> Iterator[Choice]:
        """Yield every choice, the most trusted first, no config twice.

        Raises:
            UsageError: No family computes the problem on the device, or one has no preset to begin with.
        """
        seen: set[tuple[str, Config]] = set()
        for part in (self.exact, self._unproven, self.substitutes):
            for choice in part():
                key = (choice.space.family, choice.config)
                if key not in seen:
                    seen.add(key)
                    yield choice
        bare = [space.family for space in self.spaces if not space.presets]
        if not seen and bare:
            raise UsageError(f"{self.missing()}, and {', '.join(bare)} has no preset: run '{self.command}'")
        if not seen:
            raise UsageError(unserved(self.problem, self.device, self.spaces))

    def substitutes(self) -> Iterator[Choice]:
        """Yield what serves where no record does, the most promising first."""
        yield from self._predicted()
        yield from self._presets()

    def first_ms(self, exact: bool) -> float:
        """Return the time of what goes first, as recorded or as predicted; infinite where there is none."""
        if exact:
            return next((_recorded_ms(choice) for choice in self.exact()), math.inf)
        return next((point.ms for point, _ in self.prediction.points), math.inf)

    @cached_property
    def prediction(self) -> Prediction:
        """What the model expects to be fastest."""
        from autotune.tuning.prediction import prediction  # 10 ms, which an exact record does not need

        return prediction(self.problem, self.device, self.spaces, self.store, self._begin)

    def _looked_up(self) -> tuple[list[list[Choice]], list[str]]:
        """The records of each folder that serve the problem exactly, fastest first; and why others do not."""
        winners: list[list[Choice]] = []
        refused: list[str] = []
        for folder in self.store.folders:
            served = [each for space in self.spaces if (each := self._winner(folder, space, refused))]
            winners.append(sorted(served, key=_recorded_ms))
        return winners, refused

    def _winner(self, folder: Path, space: Space, refused: list[str]) -> Choice | None:
        """Return the record of one folder and family if it serves; else note why not."""
        whose = f"{self.problem} on {self.device.name}"
        try:
            record = self.store.find_in(folder, self.device, space.family, self.problem)
            if record is None:
                return None
            source = rendered(space, record.config, self.problem, self.device, depot=self.store.depot)
        except RecordError as error:  # of a newer schema, or unreadable: another family may still serve
            refused.append(str(error))
            return None
        except ConfigError as error:
            refused.append(f"the {space.family} record of {whose} is stale: {error}")
            return None
        why = records.serves(record, self.device, self.problem, source)
        if why is not None:
            refused.append(f"{space.family}, {whose}: {why}")
            return None
        return Choice("exact", space, source.config, record, source)

    def _unproven(self) -> Iterator[Choice]:
        """Yield the runners-up of exact records that do not say what code was measured."""
        for winners in self._winners:
            for winner in winners:
                assert winner.record is not None
                for each in winner.record.runners_up:
                    choice = self._fitted("predicted", winner.space, each.config, winner.record)
                    if choice is not None:
                        yield choice

    def _predicted(self) -> Iterator[Choice]:
        note = self.prediction.note
        for point, record in self.prediction.points:
            choice = self._fitted("predicted", point.space, point.config, record, adapt=False)
            if choice is not None:
                yield replace(choice, point=point, note=note)

    def _presets(self) -> Iterator[Choice]:
        """Yield the presets that fit, by their estimated time where the model knows the family.

        Raises:
            SpaceError: Nothing is legal in a space that is not built in, whose presets may lie outside of it.
        """
        found: list[tuple[float, int, Choice]] = []
        for space in self.spaces:
            fitting = [self._fitted("predicted", space, preset, None) for preset in space.presets.values()]
            presets = [choice for choice in fitting if choice is not None]
            searched = (space.searches(choice.config, self.problem, self.device) for choice in presets)
            if not (space.is_built_in or any(searched)):
                space.enumerate(self.problem, self.device)
            for choice in presets:
                found.append((self._estimated(choice), len(found), choice))
        for _, _, choice in sorted(found, key=lambda entry: entry[:2]):
            yield choice

    def _fitted(
        self,
        served: Served,
        space: Space,
        values: Mapping[str, int | str],
        record: Record | None,
        adapt: bool = True,
    ) -> Choice | None:
        try:
            if adapt:
                values = space.fitted(space.config(values), self.problem, self.device)
            source = rendered(space, values, self.problem, self.device, depot=self.store.depot)
        except (ConfigError, SpaceError):
            return None
        return Choice(served, space, source.config, record, source)

    def _estimated(self, choice: Choice) -> float:
        values: dict[str, Any] = choice.space.values(choice.config, self.problem, self.device)
        try:
            return float(estimate_columns(choice.space, values, self.problem, self.device))
        except ConfigError:  # the model does not know this family
            return math.inf


def _recorded_ms(choice: Choice) -> float:
    assert choice.record is not None, "it is of a record"
    assert choice.record.timing is not None, "only measured records serve"
    return choice.record.timing.median_ms
