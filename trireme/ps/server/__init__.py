"""One parameter server's process: connections, receive buffers, metrics."""
