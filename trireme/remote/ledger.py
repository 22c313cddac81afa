"""The ledger of a run in an object store: who may write there, and which checkpoints it has.

`ledger/000000000042.json` is one of a sequence of numbered entries, of which the newest one alone
counts. It holds the whole state: the present writer and the run's checkpoints. An entry is added by
a conditional put that creates it, and is never changed. So every change is a compare-and-swap: of
two processes that add the same number one succeeds, and the other one reads again what it has
overlooked. A writer that was stopped, and whose successor has added an entry meanwhile, cannot
publish: its number is taken.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import msgspec

from trireme.remote.object_store import ObjectStore
from trireme.stores import StoreError

FOLDER = "ledger"
"""Where the entries are, below the run's URL."""

_KEPT = 8
_ATTEMPTS = 20


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the ledger.

    Attributes:
        writer: the process that added it, as JSON: `trireme.session.checkpoint.run_lock.Writer`.
        checkpoints: the folder of each checkpoint, below `checkpoints/`, by its name.
        token: a random name of the entry.
    """

    writer: msgspec.Raw
    checkpoints: dict[str, str] = {}
    token: str = ""


class _JobOf(msgspec.Struct):
    job: str


class Ledger:
    """Reads and extends the ledger of a run.

    Args:
        store: the objects of the run.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def newest(self) -> tuple[int, Entry | None]:
        """Returns the newest entry with its number; 0 and None where there is none.

        Raises:
            OSError: as the methods of `ObjectStore`, or the entry is damaged.
        """
        for _ in range(_ATTEMPTS):
            number = self.newest_number()
            if not number:
                return 0, None
            with suppress(FileNotFoundError):  # deleted, after newer ones
                return number, self._read(number)
        raise StoreError(f"{self._store.root / FOLDER} changes faster than it can be read")

    def newest_number(self) -> int:
        """Returns the number of the newest entry; 0 where there is none."""
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        names = (key.removeprefix(f"{FOLDER}/") for key in self._store.list(FOLDER))
        stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return [int(stem) for stem in stems if stem.isdecimal()]

    def _read(self, number: int) -> Entry:
        content = self._store.read(_key(number))
        try:
            return msgspec.json.decode(content, type=Entry)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise StoreError(
                f"{self._store.root / _key(number)} is damaged: {error}. Delete it to go on from "
                "the entry before it"
            ) from error

    def add(self, number: int, entry: Entry) -> bool:
        """Adds an entry; returns False where another process has added one of that number, or more.

        Older entries are deleted, but for a few.

        Raises:
            OSError: as the methods of `ObjectStore`.
        """
        named = msgspec.structs.replace(entry, token=secrets.token_hex(8))
        if not self._store.create(_key(number), msgspec.json.encode(named)):
            return False
        numbers = self._numbers()
        if max(numbers, default=0) > number:  # this number was used before, and deleted
            return False
        with suppress(OSError):  # what stays is deleted with a later entry
            self._store.delete(_key(old) for old in numbers if old <= number - _KEPT)
        return True

    def job(self) -> str:
        """Returns the id of the job that writes, or wrote last; "" where there is none."""
        _, entry = self.newest()
        return "" if entry is None else msgspec.json.decode(entry.writer, type=_JobOf).job


def _key(number: int) -> str:
    return f"{FOLDER}/{number:012d}.json"
