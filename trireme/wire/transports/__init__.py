"""The transports: tcp, tls, shared memory, and connections inside one process."""
