"""Commands that serve models, and those for their tokens, signatures and cache."""
