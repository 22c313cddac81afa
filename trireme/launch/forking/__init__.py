"""Tasks that are forked from a process that has imported PyTorch once for all of them."""
