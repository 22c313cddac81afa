"""`trireme checkpoint`: lists, shows, verifies and exports the checkpoints of a run."""
