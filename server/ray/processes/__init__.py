"""Processes that a server starts beside its own: a Ray, the HTTP server; none outlives it."""
