"""Hooks: early stopping, and traces."""
