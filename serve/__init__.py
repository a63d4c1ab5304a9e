"""What answers: an HTTP server with dynamic batching."""
