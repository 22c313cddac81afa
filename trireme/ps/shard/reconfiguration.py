"""Stops the shards of a job at one common cut, so that they can be divided anew.

A view that announces the shards of the next generation holds back all decisions. Each shard tells
shard 0 its step and the last decided push of each worker. Shard 0 takes the largest of all and
tells every shard to go that far and to stop there. Then all shards have decided the same pushes,
and what is not decided is pushed again after the division: it is decided once, by the new shards.

A shard that has stopped changes its state no more. Another view lets it go on.
"""

from __future__ import annotations

from trireme.ps.server_messages import ShardFrozen, StopAt


class Reconfiguration:
    """One shard's part in a reconfiguration.

    Args:
        shard: the shard's number.

    Attributes:
        view: the number of the view that has announced it; 0 while none is under way.
        stopped: whether the shard has stopped at the common cut.
    """

    def __init__(self, shard: int) -> None:
        self.view = 0
        self.stopped = False
        self._shard = shard
        self._shards = 1
        self._frozen: dict[int, ShardFrozen] = {}

    @property
    def token(self) -> int:
        """The name of the cut; no worker's cut has it."""
        return -self.view

    def begin(self, view: int, shards: int) -> None:
        """Begins, as a view has announced it.

        Args:
            view: the view's number.
            shards: how many shards the present generation has.
        """
        self.view, self._shards, self.stopped = view, shards, False
        self._frozen = {s: said for s, said in self._frozen.items() if said.view == view}

    def end(self) -> None:
        """Gives it up."""
        self.view, self.stopped = 0, False

    def hear(self, shard: int, said: ShardFrozen) -> StopAt | None:
        """Takes what a shard has decided; returns the cut once all have said it. At shard 0.

        A shard may hear of the view before shard 0 does.
        """
        if said.view < self.view:
            return None
        self._frozen[shard] = said
        current = [frozen for frozen in self._frozen.values() if frozen.view == self.view]
        if self.view == 0 or len(current) < self._shards:
            return None
        decided: dict[int, int] = {}
        for frozen in current:
            for worker, sequence in frozen.decided:
                decided[worker] = max(sequence, decided.get(worker, 0))
        step = max(frozen.step for frozen in current)
        return StopAt(self.view, step, tuple(sorted(decided.items())))
