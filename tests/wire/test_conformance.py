from __future__ import annotations

from tests.conformance import TransportConformance


class TestTcp(TransportConformance):
    address = "tcp://127.0.0.1:0"


class TestTcpOverIpv6(TransportConformance):
    address = "tcp://[::1]:0"


class TestShm(TransportConformance):
    address = "shm://"


class TestMemory(TransportConformance):
    address = "memory://"
