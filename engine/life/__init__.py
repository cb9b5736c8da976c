"""The life of an engine: states, start and end, and what watches its steps."""
