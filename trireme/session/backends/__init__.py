"""Ways to train: each exchanges gradients or deltas for new values, all behind one interface."""
