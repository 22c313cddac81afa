"""Hooks that record a run for other tools: traces, MLflow and Weights & Biases."""
