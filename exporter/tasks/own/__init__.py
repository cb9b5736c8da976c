"""Tasks that learn from a person's own data."""
