"""Decides what every step computes."""
