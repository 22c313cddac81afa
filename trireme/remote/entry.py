"""The object stores that fsspec opens, as the entry points of their schemes declare them."""

from __future__ import annotations

from trireme.location import StoreType

STORE = StoreType("trireme.remote.store:RemoteStore")
MEMORY = StoreType("trireme.remote.store:RemoteStore", shared=False)
