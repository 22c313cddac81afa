"""The cluster: its specification, its membership, and the coordinator that serves them."""
