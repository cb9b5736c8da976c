"""The engine of models that answer in one pass."""
