"""The transport `shm`: processes of one host, and the memory that they share."""
