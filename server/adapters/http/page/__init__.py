"""The page for people, with the load of the server."""
