"""What one shard holds: the values, their optimizer, and what workers have of them."""
