"""What a search leaves: the winner as a JSON file that people read, and every trial beside it."""

from autotune.records.files import (
    Filed,
    differences,
    filed,
    from_json,
    now,
    path_within,
    read,
    serves,
    to_json,
)
from autotune.records.schema import (
    SCHEMA,
    Cublas,
    Record,
    RecordedDevice,
    Resources,
    RunnerUp,
    Searched,
    Toolchain,
    Verification,
)
from autotune.records.store import Entry, Store
from autotune.values.measurement import KernelLaunch, Launch, Sustained, Timing

__all__ = [
    "SCHEMA",
    "Cublas",
    "Entry",
    "Filed",
    "KernelLaunch",
    "Launch",
    "Record",
    "RecordedDevice",
    "Resources",
    "RunnerUp",
    "Searched",
    "Store",
    "Sustained",
    "Timing",
    "Toolchain",
    "Verification",
    "differences",
    "filed",
    "from_json",
    "now",
    "path_within",
    "read",
    "serves",
    "to_json",
]
