"""The public port, and how calls find a worker."""
