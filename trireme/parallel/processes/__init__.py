"""The processes that hold one model together, and what they tell each other."""
