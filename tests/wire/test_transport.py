from __future__ import annotations

import pytest

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
    with pytest.raises(ConfigurationError, match=r"there are tcp://host:port, .*memory://name"):
        connect(address, timeout=1.0)
    with pytest.raises(ConfigurationError, match="unknown scheme"):
        listen(address)


def test_tls_is_refused_and_not_ignored() -> None:
    address = "tls://127.0.0.1:0"
    with pytest.raises(ConfigurationError, match="TLS was asked for"):
        connect(address, timeout=1.0)
    with pytest.raises(ConfigurationError, match="TLS was asked for"):
        listen(address)
