"""Requests to the engine, and their results."""
