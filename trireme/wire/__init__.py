"""Bytes between processes. Knows nothing of training."""
