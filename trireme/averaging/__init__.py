"""Plug-in: the strategies `averaging` and `diloco`, whose workers train locally."""
