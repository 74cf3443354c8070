"""Engines: TensorRT's ahead-of-time builds of a bundle's graphs, for GPUs that need not be there."""
