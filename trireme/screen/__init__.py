"""`trireme top`: a job on a terminal, while it runs."""
