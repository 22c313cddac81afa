"""Orders of examples by samplers and weights."""
