"""What this part adds to Trireme, as its entry point names it."""

from __future__ import annotations

from trireme.ps.shard.values.direct_steps import DirectStepsType

FUSED = DirectStepsType("trireme.kernels.fused:open_steps")
