"""The command line of paceline. Nothing imports this package."""
