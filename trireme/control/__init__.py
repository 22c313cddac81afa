"""`trireme scale` and `trireme stop`: what a running job is asked from outside."""
