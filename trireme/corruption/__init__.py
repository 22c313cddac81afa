"""Finds values that have changed by themselves: in memory, in a message, in a checkpoint."""
