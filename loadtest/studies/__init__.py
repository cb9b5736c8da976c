"""Studies of the engine alone: what batching at every step brings, and how its cost grows."""
