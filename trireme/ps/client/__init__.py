"""A worker's client of the parameter servers: its requests, and the connections that carry them."""
