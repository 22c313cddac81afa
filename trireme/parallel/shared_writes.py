"""What programs write themselves to the values that processes train in step with each other."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.session.model.trained import Trained
from trireme.tensors import is_dtensor
from trireme.writes.watched_writes import ValueWatch, named

Total = Callable[[Sequence[float]], Callable[[], Sequence[float]]]
"""Sums numbers over processes: begins that, and returns a function that waits for the sums."""


class SharedWrites(ValueWatch):
    """Finds out whether all processes have written the same to their values, or nothing.

    The values of one shard do not tell: clipping may change some in it, and none in another. So
    the writes to parameters of which others have a part are counted. What goes through `.data` is
    not counted, and changes values that no other process has.
    """

    def __init__(
        self, trained: Trained, *, loaded: dict[nn.Parameter, tuple[int, int]] | None
    ) -> None:
        """Watches the parameters.

        Args:
            trained: the parameters.
            loaded: checksums of the whole tensors that `load_state_dict` has filled shards from,
                with versions of the parameters, which are taken out here; None where each process
                holds all of all parameters.
        """
        super().__init__(trained)
        self._replicated = replicated = loaded is None
        self._loaded = {} if loaded is None else loaded
        self._mine: list[str] = []
        self._warned = replicated
        self._before: set[str] = set()  # written to before the package wrote itself
        self._voted: dict[str, int] = {}  # the versions that the last votes were about
        self._judged: list[nn.Parameter] = []  # of `loaded`, those that they were about
        self._take_shards()

    def remember(self, step: int | None = None) -> None:
        super().remember(step)
        self._counts = self._shard_versions()
        if step is not None:
            self._take_shards()

    def without(self, names: Collection[str]) -> tuple[set[str], set[str]]:
        found, unknown = super().without(names)
        return found | {*self._changed()}.difference(names), unknown

    def keep(self, found: set[str], unknown: set[str]) -> None:
        super().keep(found, unknown)
        self._before = found

    def end_of_step(self) -> None:
        """Notes what was written to since the votes, as between two passes: the next tell of it."""
        now = self._counted()
        self._before = {name for name, count in self._voted.items() if now.get(name) != count}

    def _changed(self) -> list[str]:
        """Returns the parameters that were written to, so far as versions of shards tell."""
        now, before = self._shard_versions(), self._counts
        shards = {name for name, count in now.items() if before.get(name) != count}
        return [name for name in self._trained.parameters if name in self._before | shards]

    def _take_shards(self) -> None:
        for parameter in self._judged:
            self._loaded.pop(parameter, None)
        self._counts = self._shard_versions()
        self._storages = {name: self._storage(name) for name in self._counts}
        self._draws = torch.get_rng_state() if self._counts and not self._warned else None

    def _storage(self, name: str) -> int:
        return int(self._trained.parameters[name].untyped_storage()._cdata)

    def warning(self) -> str:
        """Checks what the program has written to shards; returns what it must know, once.

        Raises:
            ConfigurationError: it has assigned to the `data` of one, which leaves the shard as it
                was.
        """
        if lost := [name for name, at in self._storages.items() if self._storage(name) != at]:
            raise ConfigurationError(
                f"the program has assigned to .data of {named(lost)}, of which each process has a "
                "shard: the shard stays as it was, and the change would be lost. Write in place "
                "under torch.no_grad(), as parameter.mul_(0.5), or call load_state_dict"
            )
        parameters = self._trained.parameters
        drawn = [
            name
            for name in self._changed()
            if self._loaded.get(parameters[name], (0, -1))[1] != parameters[name]._version
        ]
        if not drawn or self._draws is None or torch.equal(self._draws, torch.get_rng_state()):
            return ""
        self._warned = True
        return (
            f"the program has written to {named(drawn)} itself, of which each process has a shard, "
            "and has drawn random numbers. If the values are drawn (reset_parameters, normal_), "
            "each process draws those of its own shard, and the whole is ANOTHER than in one "
            "process: draw them in a copy of the model, and load its state_dict() in every process"
        )

    def votes(self) -> list[float]:
        """Returns numbers for a sum over the processes: what this one has written."""
        changed, written = self._changed(), self.written()
        others = [name for name in [*written, *self.unknown] if name not in self._counts]
        names = list(dict.fromkeys([*changed, *others]))
        late = bool(self._before) and not self._replicated  # no value of now tells of it
        self._voted, self._before = self._counted(), set()
        self._judged = list(self._loaded)
        self._mine = list(dict.fromkeys([*names, *written]))
        if not names:
            return [0.0] * 4
        digest = self._digest(names)
        return [1.0, digest, digest**2, float(bool(written or self._loaded or late))]

    def _digest(self, names: Sequence[str]) -> float:
        whole = [name for name in names if name not in self._counts]
        parts = [name for name in names if name in self._counts]
        loaded = [self._loaded.get(self._trained.parameters[name], (0,))[0] for name in parts]
        values = self.values_of(whole), loaded
        return float(zlib.crc32(repr((names, values)).encode()) & 0xFFFF)

    def _counted(self) -> dict[str, int]:
        return {name: each._version for name, each in self._trained.parameters.items()}

    def _shard_versions(self) -> dict[str, int]:
        parameters = self._trained.parameters
        return {name: each._version for name, each in parameters.items() if is_dtensor(each)}

    def agree(self, totals: Sequence[float], processes: int, total: Total) -> None:
        """Checks the sums of the votes: that all processes have written the same, or none.

        Raises:
            ConfigurationError: they have not.
        """
        count, digests, squares, written = totals
        if not count or (count == processes and digests**2 == squares * count):
            return
        if not written:  # they may have put back what was there: all values tell
            digest = self._digest(list(self._trained.parameters))
            digests, squares = total([digest, digest**2])() if self._replicated else (0.0, 0.0)
            if digests**2 == squares * processes:
                return
        mine = named(self._mine) if self._mine else "nothing"
        raise ConfigurationError(
            f"{count:.0f} of {processes} processes have written to parameters themselves since the "
            f"last step, this one to {mine}, and not all of them the same values. Make the same "
            "change in every process, at the same step; changes that depend on a process's batch, "
            "as those of nn.Embedding(max_norm=...), cannot be made so"
        )
