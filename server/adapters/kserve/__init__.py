"""A gRPC server of the Open Inference Protocol (KServe v2) in front of a server of ours."""
