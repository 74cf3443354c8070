"""The sampling arithmetic of a round as ONNX graphs; `build.py` writes them into a bundle."""
