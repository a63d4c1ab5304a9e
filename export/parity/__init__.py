"""The parity ledger: the outputs of a model at each step from the original to the HTTP response."""
