"""Checkpoints in an object store, such as `s3://bucket/run`, by fsspec."""
