"""A shell for every test."""

from tests.integration.conftest import shell

__all__ = ["shell"]
