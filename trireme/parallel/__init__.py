"""Processes that hold one model together: meshes, shards, tensors and pipelines.

PyTorch's own collectives, FSDP, tensor parallelism and pipeline schedules do the work
(`torch.distributed`); here is how a model is cut for them, and joined again for people.
"""
