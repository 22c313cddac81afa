"""What serves metrics for Prometheus, as its entry point declares it."""

from __future__ import annotations

from trireme.monitor.exporter import Exporter

EXPORTER = Exporter("trireme.prometheus.exposition:expose")
