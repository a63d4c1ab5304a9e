"""Laconic: the same answers, with fewer bits."""

__version__ = "0.1.0"
