"""Studies of engine and server, and tools for them; not in the wheel."""
