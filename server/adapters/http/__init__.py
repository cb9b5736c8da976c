"""An HTTP server of other protocols in front of a server of ours: a client of it, no more."""
