"""Cuts a placed graph into segments, and runs those of one task."""
