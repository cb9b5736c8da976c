"""Chooses tokens from logits."""
