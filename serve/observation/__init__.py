"""What operators see of a request: logs and traces."""
