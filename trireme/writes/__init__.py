"""Finds what programs write to their values themselves: sent to servers, or refused."""
