from __future__ import annotations

import pytest

from tests.certificates import certificates
from trireme.errors import ConfigurationError
from trireme.wire.transport import connect, listen


@pytest.mark.parametrize("address", ["localhost:80", "tcp:host:80", "", "memory"])
def test_an_address_has_a_scheme(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"has no scheme: write it as tcp://"):
        connect(address, timeout=1.0)
    with pytest.raises(ConfigurationError, match="no scheme"):
        listen(address)


@pytest.mark.parametrize("address", ["pigeon://loft", "TCP://127.0.0.1:0", "://x"])
def test_an_unknown_scheme_names_those_that_exist(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there are memory://name, .*tcp://host:port"):
        connect(address, timeout=1.0)
    with pytest.raises(ConfigurationError, match="unknown scheme"):
        listen(address)


def test_tls_without_a_certificate_is_refused() -> None:
    address = "tls://127.0.0.1:0"
    for use in (lambda: connect(address, timeout=1.0), lambda: listen(address)):
        with pytest.raises(ConfigurationError, match=r"no certificate: .*trireme certs issue"):
            use()


def test_who_has_a_certificate_says_nothing_in_plain_text() -> None:
    address, own = "tcp://127.0.0.1:0", certificates("ps:0")
    for use in (
        lambda: connect(address, timeout=1.0, certificates=own),
        lambda: listen(address, certificates=own, allow_plaintext=True),
    ):
        with pytest.raises(ConfigurationError, match="is without TLS, and this task has a"):
            use()


def test_memory_of_one_host_needs_no_certificate() -> None:
    listener = listen("memory://", certificates=certificates("ps:0"))
    connect(listener.address, timeout=1.0, certificates=certificates("worker:0")).close()
    listener.close()
