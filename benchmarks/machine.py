"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
"""The project's root."""

_PACKAGES = ("torch", "numpy", "msgspec")


def describe() -> dict[str, Any]:
    """Returns machine, system and versions; what the peers have is told by `benchmarks.peers`."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "trireme": _commit(),
        "threads": "one BLAS thread a process",
    }


def loopback_bytes() -> int:
    """Returns how many bytes have passed the loopback interface so far."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(each.bytes_sent for name, each in counters.items() if name in ("lo", "lo0"))


def load() -> str:
    """Returns the load averages: what else the machine was doing."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _commit() -> str:
    """Returns the checkout's commit, and whether it was changed since."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no git checkout"
    return said
