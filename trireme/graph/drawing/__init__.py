"""Pictures of a model as a dataflow graph: as text, as SVG, and as a page of HTML."""
