"""Parts common to the servers in front of ours: they are clients of it, no more."""
