"""Places the operations of a graph on devices: costs, a simulated step, and the search."""
