"""Deferred construction: a model without memory, of which a process makes what it needs."""
