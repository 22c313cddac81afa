"""Hooks that record a run for other tools: TensorBoard, traces, MLflow and Weights & Biases."""
