"""Graph transformations, one per file: each takes a traced model and changes it in place."""
