"""The coordinator's journal: what it has decided, in one SQLite file, before anybody hears of it.

The file holds one state with its checksum. SQLite would take some damage for an older state, with
which terms and views would be given out twice.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from trireme.cluster.state import State
from trireme.errors import ClusterError, ConfigurationError

_APPLICATION = 0x54524952  # "TRIR": SQLite keeps it in the file's header
_VERSION = 3


class Journal:
    """The journal of one job's coordinator, which only one process can have open.

    Args:
        path: the file. It is made where there is none, for this user alone.
        resumes: whether to go on with what it holds, which must be something; else it is emptied.

    Attributes:
        state: the state that was written last; None for none.

    Raises:
        ConfigurationError: another process has it open, or it is no journal, damaged or empty, or
            there is no such directory.
        ClusterError: it cannot be read or written: the disk is full, or fails.
    """

    def __init__(self, path: Path, *, resumes: bool) -> None:
        self._path = path
        self.state: State | None = None
        with ExitStack() as failed:
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                self._database = sqlite3.connect(
                    path, isolation_level=None, timeout=0.0, check_same_thread=False
                )
                failed.callback(self.close)
                self._begin(resumes=resumes)
            except (OSError, sqlite3.Error) as error:
                raise self._failure(error) from error
            if resumes and self.state is None:
                raise ConfigurationError(
                    f"the coordinator's journal {path} holds nothing, and the job has begun: bring "
                    "the file of this job there, or start the whole job again with another file"
                )
            failed.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, state: State) -> None:
        """Writes a state to the disk, without what the tasks report of themselves: they repeat it.

        Raises:
            ClusterError: it cannot be written.
        """
        tasks = {name: replace(task, status={}) for name, task in state.tasks.items()}
        content = msgspec.msgpack.encode(replace(state, tasks=tasks))
        try:
            self._database.execute(
                "INSERT OR REPLACE INTO state (id, content, digest) VALUES (1, ?, ?)",
                (content, hashlib.sha256(content).digest()),
            )
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def close(self) -> None:
        self._database.close()

    def _begin(self, *, resumes: bool) -> None:
        execute = self._database.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = DELETE")  # one file, which may be brought elsewhere
        execute("PRAGMA synchronous = FULL")
        application = execute("PRAGMA application_id").fetchone()[0]
        tables = [name for (name,) in execute("SELECT name FROM sqlite_master")]
        if tables and application != _APPLICATION:
            raise ConfigurationError(
                f"{self._path} is a database of another program: name another file for the "
                "coordinator's journal"
            )
        version = execute("PRAGMA user_version").fetchone()[0]
        if tables and version != _VERSION:
            raise ConfigurationError(
                f"{self._path} is a journal of version {version}, and this release reads version "
                f"{_VERSION}: continue the job with the release that began it"
            )
        execute("BEGIN EXCLUSIVE")
        execute(f"PRAGMA application_id = {_APPLICATION}")
        execute(f"PRAGMA user_version = {_VERSION}")
        execute(
            "CREATE TABLE IF NOT EXISTS state "
            "(id INTEGER PRIMARY KEY, content BLOB NOT NULL, digest BLOB NOT NULL)"
        )
        if not resumes:
            execute("DELETE FROM state")
        row = execute("SELECT content, digest FROM state WHERE id = 1").fetchone()
        execute("COMMIT")
        if row is not None:
            self.state = self._decoded(*row)

    def _decoded(self, content: bytes, digest: bytes) -> State:
        try:
            if hashlib.sha256(content).digest() != digest:
                raise ValueError("its checksum is another one")
            return msgspec.msgpack.decode(content, type=State)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self._path} is damaged ({error}): remove it and start the whole job again"
            ) from error

    def _failure(self, error: Exception) -> ConfigurationError | ClusterError:
        if "locked" in str(error):
            return ConfigurationError(
                f"another process has the coordinator's journal {self._path} open: the job has a "
                "coordinator already; end that one first"
            )
        if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.OperationalError):
            return ConfigurationError(
                f"{self._path} is no journal of a coordinator, or damaged ({error}): remove it and "
                "start the whole job again, or name another file"
            )
        what = (
            f"the coordinator's journal {self._path} cannot be used: {error}; check the directory, "
            "its permissions, and the space on the disk"
        )
        return ConfigurationError(what) if isinstance(error, OSError) else ClusterError(what)


def resumed(now: float, state: State) -> State:
    """Returns the state with which another coordinator goes on.

    Times of the last coordinator's clock mean nothing on this one's: all deadlines begin again.
    Every task that was connected is disconnected until it comes back, which it does by itself.
    """
    tasks = {}
    for name, task in state.tasks.items():
        if task.active:
            task = replace(task, state="disconnected", reason="the coordinator was started again")
        tasks[name] = replace(
            task,
            connection=None,
            since=now,
            heard=now,
            pace=replace(task.pace, moved=now),
            signal=None if task.signal is None else (task.signal[0], now),
        )
    under_way = state.reconfiguration
    return replace(
        state,
        term=state.term + 1,
        tasks=tasks,
        started=now,
        over_since=now,
        noticed=now,
        plan_after=now,
        resumed=now,
        broken_links=tuple(replace(each, until=now) for each in state.broken_links),
        reconfiguration=None if under_way is None else replace(under_way, since=now),
    )
