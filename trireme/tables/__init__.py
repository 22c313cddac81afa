"""Sparse tables: rows by 64-bit key, made on first touch, updated by row optimizers. No I/O."""
