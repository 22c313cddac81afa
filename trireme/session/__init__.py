"""A run from joining the cluster to its last checkpoint, as a script sees it."""
