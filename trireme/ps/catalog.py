"""The catalog of all messages that a connection to a parameter server may carry."""

from __future__ import annotations

from trireme.ps import lending_messages, messages, replication_messages, snapshot_messages
from trireme.ps.leader import decisions
from trireme.wire.message import Catalog, Message

PS_MESSAGES: tuple[type[Message], ...] = tuple(
    kind
    for module in (messages, lending_messages, snapshot_messages, decisions, replication_messages)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, Message)
    and kind.kind  # the base classes have none
    and kind.__module__ == module.__name__
)
PS_CATALOG = Catalog(PS_MESSAGES)
