"""Pictures of what attention heads look at."""
