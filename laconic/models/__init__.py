"""Checkpoints of every supported kind: loading, signatures, weights, and the source a run starts from."""
