"""Commands that make, verify and compare models."""
