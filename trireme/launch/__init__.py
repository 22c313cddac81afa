"""Where am I, and how are the tasks of a job started. Starts processes; knows no training."""
