"""What the fork server imports: all that its children need and that starts no thread."""

from __future__ import annotations

import torch
import torch.distributed

import trireme.cluster.member
import trireme.models
import trireme.ps.client.client
import trireme.ps.server.service

__all__ = ["torch", "trireme"]

torch.set_num_threads(1)
# The first optimizer of a process imports torch._dynamo, which takes more than a second.
torch.optim.SGD([torch.zeros(1)])
