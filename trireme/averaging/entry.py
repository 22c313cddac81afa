"""The backend of workers that train locally, as its entry point declares it."""

from __future__ import annotations

from trireme.strategies import BackendType

LOCAL = BackendType("trireme.averaging.backend:LocalSgd")
