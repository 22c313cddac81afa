"""Backends of processes that hold one model together, with and without servers."""
