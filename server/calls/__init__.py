"""The gRPC server under gateway and worker, and the parts of every call."""
