"""Displays of a job's metrics: the progress line, reports, Prometheus, TensorBoard."""
