"""Transformer blocks: finding heads and FFN units, removing them, refitting and proving the result."""
