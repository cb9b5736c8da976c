"""Operation of a gateway: its state, the end of requests, versions of models."""
