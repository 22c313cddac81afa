"""Captures a model as a dataflow graph, and optimises it."""
