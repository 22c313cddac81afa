"""`trireme completion`: the scripts by which shells complete commands."""
