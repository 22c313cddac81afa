"""What the loop of a program has that `distribute` joins to a job."""
