"""Processes that hold one model together: meshes, shards, tensor parallelism and pipelines.

PyTorch's collectives, FSDP, tensor parallelism and pipeline schedules (`torch.distributed`) do the
work. This package splits a model for them, and joins its parts to whole tensors for checkpoints.
"""
