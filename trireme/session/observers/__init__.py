"""What a worker watches of itself: progress and liveness."""
