"""What one shard holds and decides, without I/O: values, rounds, the exactly-once table."""
