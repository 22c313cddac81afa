"""What makes tables, as its entry point declares it."""

from __future__ import annotations

from trireme.ps.tables import TablesType

TABLES = TablesType(
    "trireme.tables.job.support:Support", connect="trireme.tables.job.connection:connect"
)
