"""When training ends: signals, `should_stop()`, and the last iteration of a loop."""
