"""TensorBoard: event files, and all that fills its dashboards."""
