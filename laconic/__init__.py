"""Laconic: the same answers, with fewer bits."""

from laconic.chatter import hush

__version__ = "0.1.0"

hush()
