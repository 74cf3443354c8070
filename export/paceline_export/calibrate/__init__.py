"""Weights whose rounding errors are weighed by what a model's layers get to see, and what rounding costs in quality."""
