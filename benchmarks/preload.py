"""What the fork server imports: all that its children need and that starts no thread."""

from __future__ import annotations

import torch
import torch.distributed

torch.set_num_threads(1)
# The first optimizer of a process imports torch._dynamo, which takes more than a second.
torch.optim.SGD([torch.zeros(1)])
