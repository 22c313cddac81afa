"""Finds out from the environment which task this process is, whatever launcher started it."""
