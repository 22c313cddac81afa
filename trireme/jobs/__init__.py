"""Jobs that a program or a notebook starts: `trireme.run`."""
