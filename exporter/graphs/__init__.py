"""From eager models to the ONNX graphs of a package."""
