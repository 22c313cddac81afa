"""Tasks of this host that are forked from one process, which has imported PyTorch."""
