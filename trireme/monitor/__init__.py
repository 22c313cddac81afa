"""Who shows the metrics."""
