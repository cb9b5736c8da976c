"""Compares two packages, or a package and a checkpoint, on a person's own lines."""
