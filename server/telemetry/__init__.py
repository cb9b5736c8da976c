"""What operators see of a server: logs, metrics, traces."""
