"""Importance criteria of pruning, one a module."""
