"""The KServe V2 protocol over gRPC."""
