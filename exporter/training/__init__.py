"""Training: the recipe of "Attention Is All You Need" (section 5) for every architecture."""
