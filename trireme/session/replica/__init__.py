"""The model of one worker: its assembly, its buffers, and the computation of gradients."""
