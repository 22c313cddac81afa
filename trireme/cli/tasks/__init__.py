"""The processes of a job: a task, the coordinator."""
