"""The model of a worker: its assembly, and the computation of losses and gradients."""
