"""Plays cases through graphs and through PyTorch, each file in a way of its own."""
