"""Records of tasks in the run directory."""
