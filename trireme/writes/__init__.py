"""Finds values that a program writes itself: they are sent to the servers, or refused."""
