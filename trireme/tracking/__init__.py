"""Hooks: early stopping, and records for other tools: traces, MLflow, Weights & Biases."""
