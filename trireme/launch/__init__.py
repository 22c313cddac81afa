"""Finds out which task this process is, and starts the tasks of a job."""
