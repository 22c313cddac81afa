"""`trireme.distribute`, for a program whose loop is its own."""
