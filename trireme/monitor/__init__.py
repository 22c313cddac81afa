"""Records of tasks, and the interfaces of boards and exporters."""
