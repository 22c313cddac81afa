"""Records of tasks, and the interface of exporters."""
