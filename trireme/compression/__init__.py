"""Pushes that are packed by a codec: `--compress`."""
