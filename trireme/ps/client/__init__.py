"""A worker's side of the parameter server: what it says, and the connections that carry it."""
