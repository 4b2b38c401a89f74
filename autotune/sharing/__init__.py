"""A search that several processes and hosts carry out together, through an Optuna study in a storage.

`open_search` returns a `SharedSearch`, which is asked and told like an `autotune.search.Search`::

    storage = Storage("postgresql://tuner@db/tuning")  # one for all families
    with open_search(storage, name, legal, header, seed=0, first=starts, say=print) as search:
        while (index := search.ask()) is not None:
            if index == WAIT:  # others measure all that is left
                time.sleep(0.25)
            else:
                search.tell(index, median_ms, "measured")

**No point twice.** A storage has no compare-and-set, but it adds a trial with its point in one step and
numbers trials in the order in which they become visible. A process adds a RUNNING trial for the point it
wants, then reads: of the trials that want the same point, the one with the lowest number gets it. All lower
numbers were visible before its own, so a process sees every trial it could lose to, and waits for none. The
others end their trials as FAIL with ``left`` = "duplicate", and ask for another point.

**No point lost.** Each process increments an attribute of the study; a process whose count stops for 30 s is
dead (`Pulse`). Its RUNNING trials end as FAIL with ``left`` = "abandoned", and their points are proposed
next. A process that was only suspended finds its trial ended when it resumes, and claims the point again or
drops its outcome: such a point may be measured twice, but is stored once.

**What a trial holds.** ``index`` (in the legal list) and ``process`` (host:pid:word); at its end its
parameters, ``outcome`` ("measured" or a rejection kind), ``why``, and as value median_ms. A FAIL trial with
``left`` is a duplicate or was abandoned. Optuna's own tools open the study by its name.

**When the storage is lost**, the search says so once and goes on alone, from what it knows; its outcomes
wait, and are stored when a beat succeeds again.

**Speed.** Every process keeps a study of its own in memory, from which its strategy learns; each change of
the shared study is read once. Milliseconds of CPU for one call, without the strategy's own, with 14
parameters, by the number of trials in the study; elapsed times were two to five times as long, on 2 cores
with a load of 6:

========== === ===== ====== ===========
ask        100 1,000 10,000 tell
========== === ===== ====== ===========
PostgreSQL 4.6 6.1   4.6    2.6 to 2.8
SQLite     4.5 4.0          1.6 to 1.7
journal    1.2 1.7   4.1    0.9 to 1.5
========== === ===== ====== ===========

Joining a study takes 0.4 ms for each of its trials.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autotune.records.trials import TrialHeader
from autotune.search import DEFAULT, WAIT, Search, distributions, require_seed
from autotune.sharing.backend import StorageLost, unusable
from autotune.sharing.identity import agree, identity_of, process_name, study_name
from autotune.sharing.pulse import BEAT_S, PATIENCE, Pulse
from autotune.sharing.shared import SharedSearch, Told
from autotune.sharing.study import Storage

if TYPE_CHECKING:
    from autotune.space.space import Legal

__all__ = ["WAIT", "SharedSearch", "Storage", "Told", "open_search"]


def open_search(
    storage: Storage,
    name: str | None,
    legal: Legal,
    header: TrialHeader,
    *,
    seed: int = 0,
    first: Sequence[int] = (),
    strategy: Any = DEFAULT,
    say: Callable[[str], None] = warnings.warn,
    beat_s: float = BEAT_S,
    patience: int = PATIENCE,
) -> SharedSearch:
    """Join the shared search of one family, problem and kind of GPU, or begin it.

    Args:
        storage: Where the study is.
        name: The study is named after this and the family; None: after its identity.
        legal: The points; the same list in every process.
        header: The identity of the trials, from `autotune.tuning.pipeline.trial_header`.
        seed: Seed of the process that begins the study. The others derive theirs from it and their names, so
            that they do not all want the same points.
        first: Indices to propose before the strategy is asked.
        strategy: As for `autotune.search.Search`.
        say: Called with one line when the storage is lost or back.
        beat_s: Seconds between two signs of life.
        patience: Own beats after which a process without a sign of life counts as dead.

    Raises:
        UsageError: The storage does not answer, or the study of that name is about something else.
    """
    require_seed(seed)
    what = identity_of(header, legal)
    study = storage.study(study_name(header, what, name), distributions(legal))
    try:
        agree(study, what)
        process = process_name()
        if not study.created:
            seed = int.from_bytes(hashlib.sha256(f"{seed} {process}".encode()).digest()[:4])
        local = Search(legal, seed=seed, first=first, strategy=strategy)
        return SharedSearch(study, legal, local, process, Pulse(study, process, beat_s, patience), say)
    except StorageLost as error:
        raise unusable(storage.url, str(error)) from None
