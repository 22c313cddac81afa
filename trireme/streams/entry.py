"""What reads streams, as its entry point declares it."""

from __future__ import annotations

from trireme.data.streams import StreamType

STREAMS = StreamType("trireme.streams.opening:open_stream")
