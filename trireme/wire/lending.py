"""Memory that one side of a connection has lent the other, and what crosses it.

The lender names two lists of places in it: *outbound*, from where its own payloads come, and
*inbound*, where it wants payloads for itself. A frame whose payload lies there says so by a flag,
and no bytes of it cross the connection. Nothing is locked: the order of request and answer is what
keeps one side from writing what the other reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Lending"]

Views = tuple[memoryview, ...]


class Lending:
    """What one side of a connection needs to know of lent memory.

    Args:
        incoming: what a flagged frame of the peer's means: these places.
        outgoing: for the lender: a payload that is this very object goes by reference.
        target: for the borrower: a tuple of byte views of these sizes is copied here.
    """

    def __init__(
        self, incoming: Views, *, outgoing: Views | None = None, target: Views | None = None
    ) -> None:
        self.incoming = incoming
        self.incoming_bytes = sum(view.nbytes for view in incoming)
        self._outgoing = outgoing
        self._target = target
        self._sizes = [view.nbytes for view in target] if target is not None else []
        self._fitting: Views = ()  # the payload that was found to fit last
        self._carried = sum(view.nbytes for view in outgoing or target or ())

    @classmethod
    def of_lender(cls, outbound: Views, inbound: Views) -> Lending:
        """Returns the lender's side: its own memory."""
        return cls(inbound, outgoing=outbound)

    @classmethod
    def of_borrower(cls, outbound: Views, inbound: Views) -> Lending:
        """Returns the borrower's side: the same places, mapped there."""
        return cls(outbound, target=inbound)

    def carry(self, payload: Iterable[Buffer]) -> int:
        """Brings a payload to the peer through the memory, where it can.

        Returns:
            Its length in bytes; 0 when it has to cross the connection.
        """
        if payload is self._outgoing:
            return self._carried
        if self._target is None or not payload:
            return 0
        if payload is not self._fitting:
            if not isinstance(payload, tuple) or not self._fits(payload):
                return 0
            self._fitting = payload
        for source, target in zip(self._fitting, self._target, strict=True):
            target[:] = source
        return self._carried

    def _fits(self, payload: tuple[object, ...]) -> bool:
        """Returns whether a payload is plain bytes of the sizes that are wanted."""
        return (
            all(
                isinstance(view, memoryview) and view.format == "B" and view.ndim == 1
                for view in payload
            )
            and [view.nbytes for view in payload if isinstance(view, memoryview)] == self._sizes
        )
