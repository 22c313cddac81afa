"""One push and pull with Adam, by Trireme, by its peers, and by as little as can do it."""
