"""What a terminal shows of a job: `trireme status`, and `trireme top` while it runs."""
