"""Learning from the original."""
