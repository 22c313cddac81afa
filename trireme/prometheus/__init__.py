"""Metrics of tasks for Prometheus: `--metrics-port`."""
