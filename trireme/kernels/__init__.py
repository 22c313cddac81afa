"""Servers' updates by torch's fused kernels, without the bookkeeping of `torch.optim`."""
