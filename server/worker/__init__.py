"""The gRPC server on the engines of one process."""
