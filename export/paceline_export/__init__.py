"""Export of draft and target language models: sources, fetching, ONNX graphs, checks."""
