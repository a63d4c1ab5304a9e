"""Training on several devices: data parallelism and fully sharded data parallelism."""
