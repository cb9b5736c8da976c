"""The engine of models that generate."""
