"""Options and weights that many families share, by the stack of layers that they have."""
