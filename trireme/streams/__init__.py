"""Data sets that are read from the beginning, dealt to workers by position."""
