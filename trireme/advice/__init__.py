"""Warnings and notes about programs whose training goes wrong without an error."""
