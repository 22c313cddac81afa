"""`trireme scale`: changes the number of tasks of a running job."""
