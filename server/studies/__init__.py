"""Processes of the server for the studies of the load test; tools of the repository."""
