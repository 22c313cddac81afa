"""What one server holds: the values, their optimizer, and what workers have of them."""
