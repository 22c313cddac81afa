"""What one shard holds: the values, their optimizer, and sums of gradients."""
