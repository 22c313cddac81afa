"""Measures what operators, optimizers and links cost on this machine."""
