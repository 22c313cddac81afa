"""One parameter server's process: connections, who may say what, receive buffers, metrics."""
