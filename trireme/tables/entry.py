"""What makes tables, as its entry point declares it."""

from __future__ import annotations

from trireme.ps.extension import ExtensionType

TABLES = ExtensionType(
    held="trireme.tables.job.shard_tables:shard_tables",
    trained="trireme.tables.job.layer_rows:rows_of_layers",
    merged="trireme.tables.job.chain:merged",
    exported="trireme.tables.job.parquet:export_tables",
    connect="trireme.tables.job.connection:connect",
)
