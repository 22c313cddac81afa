"""Pictures of a model as a dataflow graph: as text."""
