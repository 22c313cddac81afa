"""The processes of a job: a task, the template that tasks are forked from, the coordinator."""
