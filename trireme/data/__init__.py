"""Where examples come from, in which order, and who gets which. Knows nothing of servers."""
