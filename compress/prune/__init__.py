"""Fewer weights: whole heads, widths, layers and channels, or single weights."""
