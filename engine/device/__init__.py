"""The GPU of this process."""
