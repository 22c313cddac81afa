"""The strategies `averaging` and `diloco`, whose workers train locally."""
