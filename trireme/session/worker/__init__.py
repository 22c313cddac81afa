"""A worker of a job: its membership, its updates, its checkpoints and its records."""
