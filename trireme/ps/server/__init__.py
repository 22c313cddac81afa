"""One parameter server's process: connections, permissions, receive buffers, metrics."""
