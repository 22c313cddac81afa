"""What records the status of tasks, as its entry point declares it."""

from __future__ import annotations

from trireme.monitor.recording import RecordsType

RECORDS = RecordsType("trireme.records.recording:TaskRecords")
