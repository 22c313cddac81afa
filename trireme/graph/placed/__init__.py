"""A model as a placed dataflow graph: its decision, its parts and its execution."""
