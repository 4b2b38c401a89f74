"""Optuna studies in PostgreSQL or SQLite, their trials read and written in few statements.

Optuna's own calls store each of 14 parameters in a transaction of its own, and read running trials again each
time with all they hold: asking and telling then takes four to ten times as long, and two to
four processes together get through fewer candidates a second than one GPU measures (EXPERIMENTS.md). Here a
trial is created with its attributes alone, gets its parameters in the transaction that ends it, and is read
when it is new and when it has ended, without its parameters. The tables are those of Optuna, which checks
their version when a database is opened.

A trial is created under a row lock on its study, which is held from before it is inserted until it is
committed, so numbers follow the order in which trials become visible. SQLite has no row locks: there every
transaction begins as a writer.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import and_, event, func, insert, or_, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from autotune.errors import UsageError
from autotune.paths import install_command
from autotune.sharing.backend import Entry, failures, reason, unusable
from autotune.sharing.url import StorageUrl

CONNECT_TIMEOUT_S = 10
STALL_MS = 15_000  # a client that stalls within a transaction loses its session, and its locks with it
LOCK_MS = 10_000  # longest wait for the transaction of another client
SQLITE_TIMEOUT_S = 30
MOST = 1000  # trials in one statement
RETRY_S = (0.1, 0.2, 0.4, 0.8, 1.6)  # processes that create the tables at once make each other fail


def open_database(url: StorageUrl) -> Any:
    """Open a PostgreSQL or SQLite database as an `optuna.storages.RDBStorage`.

    Raises:
        UsageError: It is neither, cannot be reached, or needs a Python package that is missing.
    """
    if url.text.startswith("postgres") and url.text.count("@") > 1:
        raise unusable(url, "it has more than one @: write %40 for an @ in a user name or password")
    try:
        parsed = make_url(url.text.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is None or "://" not in url.text:
        raise unusable(url, "it is not a URL")
    kind = parsed.get_backend_name()
    if kind not in ("postgresql", "sqlite"):
        raise unusable(url, f"{kind} is not supported")
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if kind == "sqlite":
        folder = Path(parsed.database or "").parent
        if parsed.database in (None, "", ":memory:"):
            raise unusable(url, "a database in memory cannot be shared")
        if not folder.is_dir():
            raise unusable(url, f"there is no folder {folder}")
    for pause in (*RETRY_S, None):
        # What is raised is raised outside of the handlers: what they handle may quote the password.
        missing = False
        try:
            return _opened(parsed, kind)
        except ImportError:
            missing = True
        except Exception as error:  # of SQLAlchemy, Optuna, the driver or the resolver of host names
            why = reason(error, url)
            final = isinstance(error, OperationalError) and kind == "postgresql"
            final |= type(error) is DatabaseError  # a file that is no database
            final |= type(error) is RuntimeError  # tables of another Optuna
            final |= isinstance(error, ArgumentError) or not isinstance(error, failures())
        if missing:
            raise UsageError(_missing(url, parsed.drivername.partition("+")[2]))
        if final or pause is None:
            raise unusable(url, why)
        time.sleep(pause * random.uniform(0.5, 1.5))
    raise AssertionError("the last attempt returned or raised")


def _missing(url: StorageUrl, driver: str) -> str:
    """Return what to do where the Python package of a database is missing."""
    if driver == "psycopg":
        return f"storage {url.shown} needs the Python package psycopg: {install_command('postgres')}"
    return f"storage {url.shown} needs the Python package {driver}: install it, or give postgresql://"


def _opened(url: Any, kind: str) -> Any:
    arguments: dict[str, Any] = {"timeout": SQLITE_TIMEOUT_S}
    if kind == "postgresql":
        wanted = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "keepalives_idle": CONNECT_TIMEOUT_S,
            "keepalives_interval": 3,
            "keepalives_count": 3,
            "tcp_user_timeout": CONNECT_TIMEOUT_S * 1000,
        }
        arguments = {key: value for key, value in wanted.items() if key not in url.query}
    text = url.render_as_string(hide_password=False)
    template = text.replace("{", "{{").replace("}", "}}")  # Optuna formats it
    storage = RDBStorage(template, engine_kwargs={"connect_args": arguments})
    if kind == "postgresql":
        event.listen(storage.engine, "connect", _limit_stalls)
    else:
        event.listen(storage.engine, "connect", _leave_transactions_to_us)
        event.listen(storage.engine, "begin", _begin_as_writer)
    storage.engine.dispose()  # the first connections were made without these listeners
    return storage


def _limit_stalls(connection: Any, record: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET idle_in_transaction_session_timeout = {STALL_MS}")
        cursor.execute(f"SET lock_timeout = {LOCK_MS}")
    connection.commit()


def _leave_transactions_to_us(connection: Any, record: Any) -> None:
    connection.isolation_level = None


def _begin_as_writer(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


class DatabaseTrials:
    """The trials of one study in a database.

    Args:
        storage: As `open_database` returns it.
        study_id: The study's id in the storage.
        distributions: Distribution of each parameter.
    """

    def __init__(self, storage: Any, study_id: int, distributions: Mapping[str, Any]) -> None:
        from optuna.storages._rdb import models  # private: what else is shared does not depend on it

        self._engine = storage.engine
        self._study_id = study_id
        self._distributions = distributions
        self._json = {name: distribution_to_json(each) for name, each in distributions.items()}
        self._studies: Any = models.StudyModel.__table__
        self._trials: Any = models.TrialModel.__table__
        self._parameters: Any = models.TrialParamModel.__table__
        self._attributes: Any = models.TrialUserAttributeModel.__table__
        self._values: Any = models.TrialValueModel.__table__
        self._finite = models.TrialValueModel.TrialValueType.FINITE
        self._ids: dict[int, int] = {}  # trial_id of each number read
        self._last = -1  # highest trial_id read
        self._running: list[int] = []  # trial_ids

    def create(self, parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Add a RUNNING trial; its parameters are stored when it ends."""
        studies, trials = self._studies.c, self._trials.c
        lock = select(studies.study_id).where(studies.study_id == self._study_id).with_for_update()
        count = select(func.count()).where(trials.study_id == self._study_id).scalar_subquery()
        trial = insert(self._trials).values(
            study_id=self._study_id, number=count, state=TrialState.RUNNING, datetime_start=datetime.now()
        )
        with self._engine.begin() as connection:
            if connection.execute(lock).first() is None:
                raise KeyError(self._study_id)
            trial_id = connection.execute(trial.returning(trials.trial_id)).scalar_one()
            self._add_attributes(connection, trial_id, attributes)

    def changes(self) -> list[Entry]:
        """Return the trials that are new or have ended since the last call, by number."""
        trials, attributes, values = self._trials.c, self._attributes.c, self._values.c
        looked_at = and_(
            trials.study_id == self._study_id,
            or_(trials.trial_id > self._last, trials.trial_id.in_(self._running)),
        )
        with self._engine.begin() as connection:
            states = select(trials.trial_id, trials.number, trials.state).where(looked_at)
            rows = connection.execute(states.order_by(trials.number)).all()
            running = {trial_id for trial_id, _, state in rows if state == TrialState.RUNNING}
            changed = [row for row in rows if row[0] > self._last or row[0] not in running]
            of_trial: dict[int, dict[str, Any]] = {trial_id: {} for trial_id, _, _ in changed}
            measured: dict[int, float] = {}
            for begin in range(0, len(changed), MOST):
                ids = list(of_trial)[begin : begin + MOST]
                stored = select(attributes.trial_id, attributes.key, attributes.value_json)
                for trial_id, key, text in connection.execute(stored.where(attributes.trial_id.in_(ids))):
                    of_trial[trial_id][key] = _value(text)
                timed = select(values.trial_id, values.value).where(values.trial_id.in_(ids))
                measured.update(tuple(row) for row in connection.execute(timed))
        self._ids.update((number, trial_id) for trial_id, number, _ in changed)
        self._running = sorted(running)
        self._last = max([self._last, *of_trial])
        return [
            Entry(number, trial_id in running, measured.get(trial_id), of_trial[trial_id])
            for trial_id, number, _ in changed
        ]

    def finish(
        self, number: int, value: float | None, parameters: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> bool:
        """End a RUNNING trial in one transaction; False when it had ended before in another way."""
        trials, stored = self._trials.c, self._attributes.c
        trial_id = self._ids[number]
        this = trials.trial_id == trial_id
        rows = [
            {
                "trial_id": trial_id,
                "param_name": name,
                "param_value": self._distributions[name].to_internal_repr(choice),
                "distribution_json": self._json[name],
            }
            for name, choice in parameters.items()
        ]
        end = {
            "state": TrialState.FAIL if value is None else TrialState.COMPLETE,
            "datetime_complete": datetime.now(),
        }
        with self._engine.begin() as connection:
            state = connection.execute(select(trials.state).where(this).with_for_update()).scalar()
            if state is None:
                raise KeyError(trial_id)
            if state != TrialState.RUNNING:
                there = select(stored.key, stored.value_json).where(stored.trial_id == trial_id)
                found = {key: _value(text) for key, text in connection.execute(there)}
                return attributes.items() <= found.items()
            if rows:
                connection.execute(insert(self._parameters), rows)
            self._add_attributes(connection, trial_id, attributes)
            if value is not None:
                timed = {"trial_id": trial_id, "objective": 0, "value": value, "value_type": self._finite}
                connection.execute(insert(self._values), timed)
            connection.execute(update(self._trials).where(this), end)
        return True

    def _add_attributes(self, connection: Any, trial_id: int, attributes: Mapping[str, Any]) -> None:
        rows = [
            {"trial_id": trial_id, "key": key, "value_json": json.dumps(each)}
            for key, each in attributes.items()
        ]
        connection.execute(insert(self._attributes), rows)


def _value(text: str) -> Any:
    """Return the JSON value of an attribute; None for what somebody wrote there that is none."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None
