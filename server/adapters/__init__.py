"""Parts common to the adapters of other protocols: they are clients of the server, no more."""
