"""The version of Trireme, which the package exports and its build reads."""

__version__ = "0.1.0.dev0"
