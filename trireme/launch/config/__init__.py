"""The configuration of a job: the sources of its values, what each task receives, the secret."""
