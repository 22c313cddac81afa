"""The transports: tcp, shared memory, and connections inside one process."""
