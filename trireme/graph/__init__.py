"""Dataflow placement: a captured model, its costs, and which device computes which operation."""
