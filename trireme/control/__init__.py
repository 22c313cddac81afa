"""`trireme scale` and `trireme stop`, which resize or end a running job."""
