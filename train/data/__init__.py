"""Batches for training: sampling, building in worker processes, prefetching."""
