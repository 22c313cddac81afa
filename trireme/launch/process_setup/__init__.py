"""What a process sets up for itself: threads, scheduling, signals, the program that it runs."""
