"""Systems that a user would pick instead of paceline, each in a Python of its own."""
