"""Makes packages: models in PyTorch, their training, their checkpoints, and the export to ONNX."""
