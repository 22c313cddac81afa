"""`trireme doctor`: finds what on this host, its network or a disk would stop a job."""
