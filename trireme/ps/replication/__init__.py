"""Replicas of shards: the log of a primary, its backups, all replicas of a server. Without I/O."""
