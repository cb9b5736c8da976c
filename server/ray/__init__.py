"""Workers as Ray Serve replicas."""
