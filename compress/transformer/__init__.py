"""Structural changes to transformer blocks: locating heads and units, cutting, refitting, proving."""
