"""Candidates: plans built for engines, tried, audited and raced."""
