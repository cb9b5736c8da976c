"""Runs the same work through Tokenweir and through other engines, side by side."""
