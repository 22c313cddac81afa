"""What TLS cannot do without: each byte of an exchange encrypted once and decrypted once."""

from __future__ import annotations

import os
import ssl
from multiprocessing.connection import Connection

from benchmarks.exchange.contender import Exchange, answer, fork_client
from trireme.certificates import Certificates
from trireme.tls.authority import JobAuthority
from trireme.tls.transport import ssl_context

_RECORD = 1 << 14


def cipher_exchange(name: str, nbytes: int, burst: float) -> Exchange:
    """One process on one core: encrypts and decrypts so many bytes, each way; nothing is sent."""
    return fork_client(name, burst, _client, nbytes)


def _client(pipe: Connection, nbytes: int) -> None:
    authority = JobAuthority.make()
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    own, its = (Certificates(authority.issue(task)) for task in ("worker:0", "ps:0"))
    worker = ssl_context(own, server_side=False).wrap_bio(back, there)
    server = ssl_context(its, server_side=True).wrap_bio(there, back, server_side=True)
    for end in (worker, server, worker, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    data, received = memoryview(os.urandom(nbytes)), memoryview(bytearray(nbytes))

    def exchange() -> None:
        for sender, receiver in ((worker, server), (server, worker)):
            done = 0
            while done < nbytes:
                count = sender.write(data[done : done + _RECORD])
                assert receiver.read(count, received[done : done + count]) == count
                done += count

    answer(pipe, exchange)
