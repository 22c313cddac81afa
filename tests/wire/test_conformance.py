from __future__ import annotations

from tests.certificates import certificates
from tests.conformance import PATIENCE, TransportConformance
from trireme.wire.transport import Listener, Stream, connect, listen


class TestTcp(TransportConformance):
    address = "tcp://127.0.0.1:0"


class TestTcpOverIpv6(TransportConformance):
    address = "tcp://[::1]:0"


class TestTls(TransportConformance):
    address = "tls://127.0.0.1:0"
    connects_alone = False

    def listen(self, address: str) -> Listener:
        return listen(address, certificates=certificates("ps:0"))

    def connect(self, address: str) -> Stream:
        return connect(address, timeout=PATIENCE, certificates=certificates("worker:0"))


class TestShm(TransportConformance):
    address = "shm://"


class TestMemory(TransportConformance):
    address = "memory://"
