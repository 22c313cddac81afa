"""Messages between processes. Knows nothing of training."""
