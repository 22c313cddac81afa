"""Models as dataflow graphs: capture, optimisation, placement on tasks, cut and execution."""
