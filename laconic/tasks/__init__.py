"""Tasks: from raw samples to tensors, from outputs to answers and metrics. One task a file; numpy, never torch."""
