"""What a task tells of itself: its numbers, its records, and what shows or serves them."""
