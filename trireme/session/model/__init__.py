"""The model of a worker: what it trains, and the computation of losses and gradients."""
