"""The parameter server: where the parameters live, and how workers push and pull."""
