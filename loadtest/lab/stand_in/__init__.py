"""A model that computes nothing, and processes of the server in front of it."""
