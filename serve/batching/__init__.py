"""From a request's tensors to batches: the fair queue, the layout of batches, and their counters."""
