"""What a worker watches of itself: progress, phases, liveness, lost updates."""
