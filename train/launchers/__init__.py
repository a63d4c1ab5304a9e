"""Launchers: where the ranks of a run are started."""
