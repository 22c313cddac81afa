"""Interfaces of records and of exporters."""
