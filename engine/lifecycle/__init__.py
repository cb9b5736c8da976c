"""The lifecycle of an engine: states, start and end, and the watch over its steps."""
