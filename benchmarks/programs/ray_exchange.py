"""Push and pull by Ray: actors hold the values, the client talks over lines of JSON.

    {"numbers": N, "servers": S}    makes S actors of N numbers each; answers {"pids": [...]}
    {"count": C}                    exchanges C times; answers {"seconds": ...}

Runs in Ray's own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch


class Shard:
    """A parameter server: one flat vector and fused Adam."""

    def __init__(self, numbers: int) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.values = torch.zeros(numbers)
        self.optimizer = torch.optim.Adam([self.values], fused=True)

    def push_pull(self, gradient: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Applies a gradient and returns the values."""
        # Ray's arrays are read-only, which torch warns of; the kernel only reads it.
        self.values.grad = torch.from_numpy(gradient)
        self.optimizer.step()
        values: npt.NDArray[np.float32] = self.values.numpy()
        return values

    def pid(self) -> int:
        """The actor's process."""
        return os.getpid()


class Client:
    """The worker's side."""

    def __init__(self) -> None:
        self.shards: list[Any] = []
        self.gradients: list[npt.NDArray[np.float32]] = []
        self.values: list[npt.NDArray[np.float32]] = []

    def setup(self, numbers: int, servers: int) -> dict[str, Any]:
        for shard in self.shards:
            ray.kill(shard)
        make = ray.remote(Shard).remote
        self.shards = [make(numbers) for _ in range(servers)]
        self.gradients = [np.full(numbers, 1e-3, np.float32) for _ in range(servers)]
        self.values = [np.zeros(numbers, np.float32) for _ in range(servers)]
        return {"pids": ray.get([shard.pid.remote() for shard in self.shards])}

    def exchange(self, count: int) -> dict[str, Any]:
        begin = time.perf_counter()
        for _ in range(count):
            pairs = zip(self.shards, self.gradients, strict=True)
            answers = [shard.push_pull.remote(gradient) for shard, gradient in pairs]
            for part, answer in zip(self.values, answers, strict=True):
                np.copyto(part, ray.get(answer))
        return {"seconds": time.perf_counter() - begin}


def main() -> None:
    # The conversation needs the real standard output: Ray prints to what it takes for it.
    talk = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=int(sys.argv[1]),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    client = Client()
    print(json.dumps({"ready": ray.__version__}), file=talk)
    for line in sys.stdin:
        request = json.loads(line)
        if "numbers" in request:
            answer = client.setup(request["numbers"], request["servers"])
        else:
            answer = client.exchange(request["count"])
        print(json.dumps(answer), file=talk)


if __name__ == "__main__":
    main()
