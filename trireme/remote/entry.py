"""The object stores that fsspec opens, as the entry points of their schemes declare them."""

from __future__ import annotations

from trireme.location import StoreType

_OPEN, _PLACE = "trireme.remote.object_store:ObjectStore", "trireme.remote.place:RemotePlace"

STORE = StoreType(_OPEN, _PLACE)
MEMORY = StoreType(_OPEN, _PLACE, shared=False)
