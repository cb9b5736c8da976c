"""Calls of graphs on the rows of a cache, planned before any of a step runs."""
