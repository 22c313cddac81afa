"""The connections between servers that run in threads of a test."""

from __future__ import annotations

from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.peer_links import PeerLinks
from trireme.wire.handshake import Identity
from trireme.wire.service import Service


def peer_links(handler: ShardHandler, service: Service, job: str, secret: bytes) -> PeerLinks:
    """Connects a server to the others that its views name, as a server task does."""
    identity = Identity(job, f"ps:{handler.index}")
    links = PeerLinks(service, identity, secret, handler.connected)
    handler.peers_changed = lambda peers, view: links.want(peers, view, "")
    handler.peer_gone = links.lost
    service.turned = handler.turn_over
    return links
