"""What a request means, whatever it came by: HTTP and gRPC translate to and from it, and do not know each other."""
