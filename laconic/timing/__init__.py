"""Interleaved timing of several models on this machine, and its results."""
