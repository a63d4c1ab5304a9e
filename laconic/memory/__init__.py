"""Techniques that save memory: one a file, each in the place of the part that it replaces."""
