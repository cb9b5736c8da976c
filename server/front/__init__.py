"""What the servers in front of ours have in common: they are clients of it, no more."""
